"""Splitting of lines of text into sentences by rules."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

SENTENCE_RULES = ("split", "lines")
MAX_CHARACTERS = 2000  # of a sentence; tokenizing longer sentences needs much memory

_CLOSING = "\"'”’»)\\]"
_OPENING = "\"'“‘«([_*"
# The quantifiers are possessive, and a match begins only at the first mark of a run: otherwise a
# million dots would take hours.
_END = re.compile(rf"(?<![.!?…])[.!?…]++[{_CLOSING}_*]*+\s++|[。！？]++[{_CLOSING}」』]*+\s*+")
_ABBREVIATIONS = frozenset(
    "mr mrs ms messrs mme mlle dr prof rev hon st sr jr gen col capt lieut lt sgt maj gov sen rep "
    "esq no nos vol vols fig figs art ch chap p pp cf vs viz etc e.g i.e jan feb mar apr jun jul "
    "aug sep sept oct nov dec mt ft".split()
)


def sentences(lines: Iterable[str], rule: str, counts: Counter[str]) -> Iterator[str]:
    """Yields the sentences of a document, none of them empty.

    A sentence never crosses lines. The rule `split` cuts a line after `.`, `!`, `?` or an ellipsis,
    with any closing quotes and brackets, if white space and a capital letter or a digit follow; but
    not after initials and common English abbreviations. This rule also cuts after the full stops of
    Chinese and Japanese. With the rule `lines` each line is a sentence, as in the original BERT
    code.

    A sentence of more than `MAX_CHARACTERS` is cut at white space, or at that length if it has no
    white space. `counts["cut_sentences"]` counts such sentences.
    """
    for line in lines:
        for sentence in _split(line) if rule == "split" else [line.strip()]:
            if len(sentence) > MAX_CHARACTERS:
                counts["cut_sentences"] += 1
                yield from _cut(sentence)
            elif sentence:
                yield sentence


def _split(line: str) -> Iterator[str]:
    start = 0
    for match in _END.finditer(line):
        if _ends_sentence(line, start, match):
            yield line[start : match.end()].strip()
            start = match.end()
    yield line[start:].strip()


def _ends_sentence(line: str, start: int, match: re.Match[str]) -> bool:
    if match[0][0] in "。！？":
        return True
    # A sentence begins with a capital letter, a digit, or a letter of a script without case.
    following = line[match.end() : match.end() + 4].lstrip(_OPENING)
    if following and not (following[0].isupper() or following[0].isdigit()):
        return following[0].isalpha() and not following[0].islower()  # letters without case
    if match[0].strip() != ".":
        return True
    # A full stop may belong to an abbreviation or an initial. These have at most 20 characters, so
    # the word is searched only in the 20 characters before the full stop.
    before = line[max(start, match.start() - 20) : match.start()].split()
    word = before[-1].lstrip(_OPENING) if before else ""
    # "I." ends a sentence about half of the time; other single capitals are initials.
    initial = len(word) == 1 and word.isupper() and word != "I"
    return not initial and word.lower() not in _ABBREVIATIONS


def _cut(sentence: str) -> Iterator[str]:
    start = 0
    while len(sentence) - start > MAX_CHARACTERS:
        space = sentence.rfind(" ", start, start + MAX_CHARACTERS + 1)
        stop = space if space > start else start + MAX_CHARACTERS
        yield sentence[start:stop]
        # The space at the cut belongs to neither sentence.
        start = stop + (stop == space)
    if start < len(sentence):
        yield sentence[start:]

"""WordPiece: the same tokens as the algorithm in plain Python, and reproducible vocabularies."""

import subprocess
import sys
import unicodedata

import pytest

from lamb_tpu.data.text import wordpiece
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer, train_vocabulary
from tests.raising import rejected
from tests.shared import shared
from tests.tiny import ROOT


def is_punctuation(character: str) -> bool:
    code = ord(character)
    ascii_mark = 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126
    return ascii_mark or unicodedata.category(character).startswith("P")


def plain_tokens(text: str, vocabulary: dict[str, int], cased: bool) -> list[str]:
    """BERT's rules in plain Python: clean, lower, split, longest match first."""
    cleaned = ""
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            cleaned += " "
        elif ord(character) in (0, 0xFFFD) or category.startswith("C"):
            continue
        elif 0x4E00 <= ord(character) <= 0x9FFF:
            cleaned += f" {character} "
        else:
            cleaned += character
    if not cased:
        decomposed = unicodedata.normalize("NFD", cleaned.lower())
        cleaned = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    words = "".join(f" {c} " if is_punctuation(c) else c for c in cleaned).split()
    tokens = []
    for word in words:
        segments, start = [], 0
        while start < len(word) <= 200:
            for stop in range(len(word), start, -1):
                segment = ("##" if start else "") + word[start:stop]
                if segment in vocabulary:
                    break
            else:
                break
            segments.append(segment)
            start = stop
        tokens += segments if start == len(word) else ["[UNK]"]
    return tokens


TEXTS = [
    "Hello, world! unaffable",
    "Café déjà-vu naïve Ångström",
    "[MASK] is no [SEP] here",
    "中文 and English混合",
    "a\u00a0b\u200bc\ufffdd\te",
    "x" * 200 + " " + "y" * 201,
    "electroencephalographically ##ing",
    "𝔘nicode ☃ €5 1,000.50",
]


@pytest.mark.parametrize("cased", [False, True])
def test_the_original_rules(vocabulary: Vocabulary, cased: bool) -> None:
    lines = shared("data", "wikitext2_valid_test", "wiki.valid.raw").read_text(encoding="utf-8")
    texts = TEXTS + lines.split("\n")[:600]
    tokenizer = make_tokenizer(vocabulary, cased)
    assert tokenizer.num_special_tokens_to_add(is_pair=False) == 0
    for text in texts:
        assert tokenizer.encode(text).tokens == plain_tokens(text, vocabulary.ids, cased), text


TRAIN = """
from lamb_tpu.data.text.wordpiece import train_vocabulary
lines = open({path!r}, encoding='utf-8').read().split('\\n')[:400]
print(ascii(train_vocabulary(lambda: lines, 800, False).tokens))
"""


def test_training_a_vocabulary() -> None:
    path = shared("data", "wikitext2_valid_test", "wiki.valid.raw")
    lines = path.read_text(encoding="utf-8").split("\n")[:400]
    trained = train_vocabulary(lambda: lines, 800, cased=False)
    assert len(trained) == 800 and tuple(trained.tokens[:5]) == SPECIAL_TOKENS
    assert {"the", "and", "##s"} <= set(trained.tokens) and "The" not in trained.ids
    tokens = make_tokenizer(trained, cased=False).encode("The hand of\nthe sun").tokens
    assert "[UNK]" not in tokens
    assert trained.tokens[5:15] == list("!\"$%&'(),-")  # sorted; "#" does not occur
    again = subprocess.run(
        [sys.executable, "-c", TRAIN.format(path=str(path))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.strip() == ascii(trained.tokens)
    with rejected("--train-vocab", 20, "is less than the 118 special tokens and"):
        train_vocabulary(lambda: lines, 20, cased=False)


def test_characters_are_counted_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["the cat sat", "über the mat, 12 times", "zzz qq the end"] * 3
    full = train_vocabulary(lambda: lines, 60, cased=False)
    monkeypatch.setattr(wordpiece, "_MAX_CHARACTERS", 8)
    few = train_vocabulary(lambda: lines, 60, cased=False)
    monkeypatch.setattr(wordpiece, "_MAX_WORDS", 2)
    assert train_vocabulary(lambda: lines, 60, cased=False).tokens == few.tokens
    monkeypatch.setattr(wordpiece, "_MAX_CHARACTERS", 1000)
    assert train_vocabulary(lambda: lines, 60, cased=False).tokens == full.tokens
    assert len(few) < len(full)

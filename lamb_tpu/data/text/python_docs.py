"""Text from Python's own help topics, for tests and smoke runs.

It serves masked language modelling, with a document for each topic, and question answering, with
questions made from the topics in SQuAD's form. The topics differ slightly between versions of
Python.
"""

import functools
import pathlib
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pydoc_data import topics

import numpy as np

from lamb_tpu.data.hashing import below, words
from lamb_tpu.data.text import masked_lm
from lamb_tpu.data.text.masked_lm import MaskedLmSource
from lamb_tpu.data.text.preparation import Settings, prepare_text
from lamb_tpu.data.text.sentences import sentences
from lamb_tpu.data.text.shards import VOCABULARY, TokenShards
from lamb_tpu.data.text.squad import Question
from lamb_tpu.data.text.squad_source import SquadSource, Windows
from lamb_tpu.errors import UserError

SPLITS = ("train", "test")
_TEST_EVERY = 5  # one of this many topics, in their order, goes to the test split
_LEAST_VOCABULARY = 512  # the characters of the text need about 200
_LEAST_WORDS = 8  # in a paragraph, and in a sentence that becomes a question
_GAP = "_"  # replaces the words of the answer in a question


@dataclass(frozen=True)
class Options(masked_lm.Options):
    """Options of masked language modelling, and the size of the vocabulary."""

    vocab_size: int = 2048


@dataclass(frozen=True)
class ClozeOptions(Windows):
    """Options of SQuAD's windows, and the size of the vocabulary."""

    vocab_size: int = 2048


def load_python_docs(split: str, options: Options) -> MaskedLmSource:
    """Loads a split for masked language modelling.

    Raises:
      UserError: the split or an option is wrong.
    """
    return MaskedLmSource(_shards(options.vocab_size)[check_split(split)], options)


def load_python_docs_cloze(split: str, options: ClozeOptions, training: bool) -> SquadSource:
    """Loads a split as questions.

    Raises:
      UserError: the split or an option is wrong.
    """
    vocabulary = _shards(options.vocab_size)[check_split(split)].vocabulary
    name = f"python_docs_cloze:{split}"
    return SquadSource(name, cloze_questions(split), vocabulary, False, options, training)


def documents(split: str) -> dict[str, list[str]]:
    """Returns topic -> paragraphs of prose, each in one line and in one topic only."""
    found: dict[str, list[str]] = {}
    # Some topics repeat paragraphs of others; each stays in the first, so that the splits share
    # none.
    seen = set[str]()
    for topic, text in sorted(topics.topics.items()):
        blocks = (_prose(block) for block in re.split(r"\n\s*\n", text))
        found[topic] = [block for block in dict.fromkeys(blocks) if block and block not in seen]
        seen.update(found[topic])
    kept = [topic for topic in found if found[topic]]
    return {
        topic: found[topic]
        for number, topic in enumerate(kept)
        if (number % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test")
    }


def cloze_questions(split: str) -> list[Question]:
    """Makes questions: one to three words of a sentence are the answer, the rest is the question.

    The context is the paragraph, which has at least two sentences.
    """
    questions: list[Question] = []
    for topic, paragraphs in documents(split).items():
        for context in paragraphs:
            parts = list(sentences([context], "split", Counter()))
            place = 0
            for part in parts:
                # Searched from the last sentence's end on, because a sentence may occur twice.
                first = context.index(part, place)
                place = first + len(part)
                found = list(re.finditer(r"\w+", part))
                if len(parts) < 2 or len(found) < _LEAST_WORDS:
                    continue
                # A fixed seed: the questions are a data set, and the same in every run.
                draws = words(0, len(questions), np.arange(2))
                size = 1 + int(below(draws[0], 3))
                start = int(below(draws[1], len(found) - size + 1))
                begin, end = found[start].start(), found[start + size - 1].end()
                text = f"{part[:begin]}{_GAP}{part[end:]}"
                answer = (part[begin:end], first + begin)
                name = f"{topic}/{len(questions)}"
                questions.append(Question(name, text, context, (answer,)))
    return questions


@functools.cache
def _shards(vocab_size: int) -> dict[str, TokenShards]:
    """Returns both splits in memory; the vocabulary is trained on the first."""
    if vocab_size < _LEAST_VOCABULARY:
        raise UserError(
            f"config.data.options.vocab_size is {vocab_size}; it must be at least "
            f"{_LEAST_VOCABULARY}"
        )
    prepared = {}
    with tempfile.TemporaryDirectory() as root:
        for split in SPLITS:
            folder, output = pathlib.Path(root, "text", split), pathlib.Path(root, split)
            folder.mkdir(parents=True)
            for topic, paragraphs in documents(split).items():
                (folder / f"{topic}.txt").write_text("\n".join(paragraphs), encoding="utf-8")
            if split == SPLITS[0]:
                settings = Settings(train_vocab=vocab_size)
                vocabulary = output / VOCABULARY
            else:
                settings = Settings(vocab=str(vocabulary))
            prepare_text([f"{folder}/*.txt"], output, settings, processes=1)
            # In memory, because the folder is deleted at the end.
            prepared[split] = TokenShards(output, in_memory=True)
    return prepared


def check_split(split: str) -> str:
    """Returns a split that the topics have; raises a UserError for others."""
    if split not in SPLITS:
        raise UserError(
            f"config.data: the topics of Python's help have no split {split!r}; they have "
            f"{' and '.join(SPLITS)}"
        )
    return split


def _prose(block: str) -> str:
    """Returns a block of lines as one line without markup; '' for code, a table or a title."""
    text = " ".join(block.split())
    text = re.sub(r"^(?:\* |[0-9]+\. )", "", text)
    text = re.sub(r"\*+(\w[^*]*)\*+", r"\1", text)  # emphasis
    is_code = any(mark in text for mark in ("::=", ">>>", "+--", "==="))
    is_prose = len(text.split()) >= _LEAST_WORDS and text[-1] in ".:?!)"
    return text if is_prose and not is_code else ""

"""Text from Python's help topics, for tests and smoke runs.

For masked language modelling each topic is a document. For question answering, questions in SQuAD's
form are made from the topics. The topics differ slightly between versions of Python.
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
from lamb_tpu.errors import out_of_range, unknown

SPLITS = ("train", "test")
_TEST_EVERY = 5  # every fifth topic is in the test split
_LEAST_VOCABULARY = 512  # the characters of the text need about 200 tokens
_LEAST_WORDS = 8  # in a paragraph, and in a sentence that becomes a question
_GAP = "_"  # replaces the answer's words in a question


@dataclass(frozen=True)
class PythonDocsOptions(masked_lm.MaskedLmOptions):
    """Options of masked language modelling, and the size of the vocabulary."""

    vocab_size: int = 2048


@dataclass(frozen=True)
class ClozeOptions(Windows):
    """Options of SQuAD's windows, and the size of the vocabulary."""

    vocab_size: int = 2048


def load_python_docs(split: str, options: PythonDocsOptions) -> MaskedLmSource:
    """Loads a split for masked language modelling."""
    return MaskedLmSource(_shards(options.vocab_size)[check_split(split)], options)


def load_python_docs_cloze(split: str, options: ClozeOptions, training: bool) -> SquadSource:
    """Loads a split as questions."""
    shards = _shards(options.vocab_size)[check_split(split)]
    return SquadSource(
        name=f"python_docs_cloze:{split}",
        questions=cloze_questions(split),
        vocabulary=shards.vocabulary,
        cased=False,
        windows=options,
        training=training,
    )


def documents(split: str) -> dict[str, list[str]]:
    """Returns topic -> paragraphs of prose; each paragraph is one line, and is in one topic only."""
    prose: dict[str, list[str]] = {}
    # Some topics repeat paragraphs of other topics. A paragraph stays only in its first topic, so
    # that the splits have no paragraph in common.
    seen = set[str]()
    for topic, text in sorted(topics.topics.items()):
        blocks = (_prose(block) for block in re.split(r"\n\s*\n", text))
        prose[topic] = [block for block in dict.fromkeys(blocks) if block and block not in seen]
        seen.update(prose[topic])
    prose_topics = [topic for topic in prose if prose[topic]]
    return {
        topic: prose[topic]
        for number, topic in enumerate(prose_topics)
        if (number % _TEST_EVERY == _TEST_EVERY - 1) == (split == "test")
    }


def cloze_questions(split: str) -> list[Question]:
    """Makes questions by removing one to three words, the answer, from a sentence.

    The context is the sentence's paragraph, which has at least two sentences.
    """
    questions: list[Question] = []
    for topic, prose in documents(split).items():
        for context in prose:
            context_sentences = list(sentences([context], "split", Counter()))
            searched = 0
            for sentence in context_sentences:
                # The search starts after the previous sentence, because a sentence may occur twice.
                first = context.index(sentence, searched)
                searched = first + len(sentence)
                word_matches = list(re.finditer(r"\w+", sentence))
                if len(context_sentences) < 2 or len(word_matches) < _LEAST_WORDS:
                    continue
                # The seed is fixed, so that the set has the same questions in every run.
                draws = words(0, len(questions), np.arange(2))
                size = 1 + int(below(draws[0], 3))
                start = int(below(draws[1], len(word_matches) - size + 1))
                begin, end = word_matches[start].start(), word_matches[start + size - 1].end()
                text = f"{sentence[:begin]}{_GAP}{sentence[end:]}"
                answer = (sentence[begin:end], first + begin)
                name = f"{topic}/{len(questions)}"
                questions.append(Question(name, text, context, (answer,)))
    return questions


@functools.cache
def _shards(vocab_size: int) -> dict[str, TokenShards]:
    """Returns both splits in memory; the vocabulary is trained on the training split."""
    if vocab_size < _LEAST_VOCABULARY:
        valid = f"at least {_LEAST_VOCABULARY}"
        raise out_of_range("config.data.options.vocab_size", vocab_size, valid)
    prepared: dict[str, TokenShards] = {}
    with tempfile.TemporaryDirectory() as root:
        for split in SPLITS:
            folder, output = pathlib.Path(root, "text", split), pathlib.Path(root, split)
            folder.mkdir(parents=True)
            for topic, prose in documents(split).items():
                (folder / f"{topic}.txt").write_text("\n".join(prose), encoding="utf-8")
            settings = Settings(train_vocab=vocab_size)
            if prepared:
                settings = Settings(vocab=str(pathlib.Path(root, SPLITS[0], VOCABULARY)))
            prepare_text([f"{folder}/*.txt"], output, settings, processes=1)
            # Read into memory, because the folder is temporary.
            prepared[split] = TokenShards(output, in_memory=True)
    return prepared


def check_split(split: str) -> str:
    """Returns `split`; raises a UserError if the topics have no such split."""
    if split not in SPLITS:
        raise unknown("split of Python's help topics", split, SPLITS)
    return split


def _prose(block: str) -> str:
    """Joins a block of lines without its markup; returns '' for code, a table or a title."""
    text = " ".join(block.split())
    text = re.sub(r"^(?:\* |[0-9]+\. )", "", text)
    text = re.sub(r"\*+(\w[^*]*)\*+", r"\1", text)  # emphasis
    is_code = any(mark in text for mark in ("::=", ">>>", "+--", "==="))
    is_prose = len(text.split()) >= _LEAST_WORDS and text[-1] in ".:?!)"
    return text if is_prose and not is_code else ""

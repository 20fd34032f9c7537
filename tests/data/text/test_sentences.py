"""Tests that lines are split into sentences as by hand, and that no text is lost."""

import time
from collections import Counter

import pytest

from lamb_tpu.data.text.sentences import MAX_CHARACTERS, sentences
from tests.shared import shared


@pytest.mark.parametrize(
    "line, expected",
    [
        ("It rained. She left! Why? Nobody knew.", 4),
        ("Mr. Darcy met Dr. Jones in St. Ives.", 1),
        ("J. R. R. Tolkien wrote it. So did E. Nesbit.", 2),
        ("It was he and I. They left.", 2),
        ("“Go away!” she said. “Why?” He went.", 3),
        ("He paid 3.50 dollars at 5 p.m. on Monday.", 1),
        ("He came (late.) Then he left...  Or did he?", 3),
        ("In 1918. 42 men died.", 2),
        ("我来了。你走了！好吗？", 3),
        ("no end at all", 1),
        ("", 0),
    ],
)
def test_by_hand(line: str, expected: int) -> None:
    actual = list(sentences([line], "split", Counter()))
    assert len(actual) == expected, actual
    assert "".join("".join(actual).split()) == "".join(line.split())


def test_lines_are_sentences() -> None:
    actual = list(sentences(["One. Two.", "  ", "three "], "lines", Counter()))
    assert actual == ["One. Two.", "three"]


def test_a_sentence_never_crosses_a_line() -> None:
    assert list(sentences(["a b", "c. D"], "split", Counter())) == ["a b", "c.", "D"]


@pytest.mark.parametrize(
    "line, segments",
    [("x" * (3 * MAX_CHARACTERS), 3), ("x" * MAX_CHARACTERS, 1), ("word " * MAX_CHARACTERS, 5)],
)
def test_long_sentences_are_cut(line: str, segments: int) -> None:
    counts = Counter()
    actual = list(sentences([line], "split", counts))
    assert len(actual) == segments and all(0 < len(segment) <= MAX_CHARACTERS for segment in actual)
    assert counts["cut_sentences"] == (segments > 1)
    joint = " " if " " in line.strip() else ""
    assert joint.join(actual) == line.strip()


def test_a_line_of_ten_megabytes() -> None:
    line = "Never an end but many words , " * 350_000
    counts = Counter()
    actual = list(sentences([line], "split", counts))
    assert counts["cut_sentences"] == 1 and "".join(actual).count("words") == 350_000


@pytest.mark.parametrize("unit", [".", "…!", '."', "。", ". "])
def test_runs_of_marks_take_no_longer_than_words(unit: str) -> None:
    start = time.process_time()
    actual = list(sentences([unit * 100_000], "split", Counter()))
    # Splitting takes milliseconds; if a match were tried at each mark, it would take over a minute.
    assert time.process_time() - start < 10
    assert "".join("".join(actual).split()) == "".join((unit * 100_000).split())


def test_real_text_keeps_every_character() -> None:
    text = shared("data", "wikitext2_valid_test", "wiki.valid.raw").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.split("\n")]
    actual = list(sentences(lines, "split", Counter()))
    assert "".join("".join(actual).split()) == "".join(text.split())
    words = sorted(len(sentence.split()) for sentence in actual)
    assert 15 < words[len(words) // 2] < 30  # typical of English prose

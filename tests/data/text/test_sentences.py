"""Sentences: by hand, and nothing of the text lost."""

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
    found = list(sentences([line], "split", Counter()))
    assert len(found) == expected, found
    assert "".join("".join(found).split()) == "".join(line.split())


def test_lines_are_sentences() -> None:
    found = list(sentences(["One. Two.", "  ", "three "], "lines", Counter()))
    assert found == ["One. Two.", "three"]


def test_a_sentence_never_crosses_a_line() -> None:
    assert list(sentences(["a b", "c. D"], "split", Counter())) == ["a b", "c.", "D"]


@pytest.mark.parametrize(
    "line, pieces",
    [("x" * (3 * MAX_CHARACTERS), 3), ("x" * MAX_CHARACTERS, 1), ("word " * MAX_CHARACTERS, 5)],
)
def test_what_is_too_long_is_cut(line: str, pieces: int) -> None:
    counts = Counter()
    found = list(sentences([line], "split", counts))
    assert len(found) == pieces and all(0 < len(piece) <= MAX_CHARACTERS for piece in found)
    assert counts["cut_sentences"] == (pieces > 1)
    joint = " " if " " in line.strip() else ""
    assert joint.join(found) == line.strip()


def test_a_line_of_ten_megabytes() -> None:
    line = "Never an end but many words , " * 350_000
    counts = Counter()
    found = list(sentences([line], "split", counts))
    assert counts["cut_sentences"] == 1 and "".join(found).count("words") == 350_000


@pytest.mark.parametrize("unit", [".", "…!", '."', "。", ". "])
def test_runs_of_marks_take_no_longer_than_words(unit: str) -> None:
    start = time.process_time()
    found = list(sentences([unit * 100_000], "split", Counter()))
    assert time.process_time() - start < 10  # a moment; over a minute where each mark is tried
    assert "".join("".join(found).split()) == "".join((unit * 100_000).split())


def test_real_text_keeps_every_character() -> None:
    text = shared("data", "wikitext2_valid_test", "wiki.valid.raw").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.split("\n")]
    found = list(sentences(lines, "split", Counter()))
    assert "".join("".join(found).split()) == "".join(text.split())
    words = sorted(len(sentence.split()) for sentence in found)
    assert 15 < words[len(words) // 2] < 30  # as English prose has them

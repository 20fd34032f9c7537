"""Reading documents from files: every rule, any cut into segments, and faulty files."""

import os
import pathlib
import random
import re
import tracemalloc
from collections import Counter

import pytest
import tensorflow_datasets as tfds

from lamb_tpu.data.text import reader
from tests.data.tiny_tfds import Tiny
from tests.raising import rejected
from tests.shared import shared


def all_documents(content: str, rule: str) -> list[list[str]]:
    """Returns the documents of a text, split by regular expressions on the full text."""
    blank = r"(?:\A|^)[^\S\n]*\n"
    if rule == "file":
        blocks = [content]
    elif rule == "blank-lines":
        blocks = re.split(blank, content, flags=re.M)
    else:
        title = r"[^\S\n]*= [^=\n][^\n]*[^=\n] =[^\S\n]*$"
        blocks = re.split(rf"(?:{blank}|\A)(?={title})", content, flags=re.M)
    documents = [[line.strip() for line in block.split("\n") if line.strip()] for block in blocks]
    return [document for document in documents if document]


def made_up_text(seed: int) -> str:
    rng = random.Random(seed)
    lines = []
    for number in range(200):
        title = f" = Title {number} = "
        words = [f"word {number}", f"é{number} " * rng.randint(1, 9), f"x = {number} ="]
        titles = [title, f"\n{title}\n", f" = = Section {number} = = "]
        lines.append(rng.choice(["", "", "  ", *words, *titles]))
    return "\n".join(lines) + "\n" * rng.randint(0, 2)


def read(path: pathlib.Path, rule: str, max_bytes: int) -> tuple[list[list[str]], Counter[str]]:
    """Cuts a file into segments and reads them; returns the documents and the counts."""
    counts = Counter[str]()
    segments = reader.cut_files([str(path)], rule, max_bytes)
    assert sum(segment.num_bytes for segment in segments) == path.stat().st_size
    return [text for each in segments for text in reader.read_segment(each, rule, counts)], counts


@pytest.mark.parametrize("rule", reader.DOCUMENT_RULES)
@pytest.mark.parametrize("max_bytes", [1, 7, 100, 10**6])
def test_segments_partition_documents(tmp_path: pathlib.Path, rule: str, max_bytes: int) -> None:
    for seed in range(5):
        path = tmp_path / f"{seed}.txt"
        content = made_up_text(seed)
        path.write_text(content, encoding="utf-8")
        actual, counts = read(path, rule, max_bytes)
        assert actual == all_documents(content, rule)
        assert counts == {"documents": len(actual), "broken_lines": 0}


@pytest.mark.parametrize(
    "split, first", [("valid", "= Homarus gammarus ="), ("test", "= Robert Boulter =")]
)
def test_articles_of_wikitext(split: str, first: str) -> None:
    path = shared("data", "wikitext2_valid_test", f"wiki.{split}.raw")
    documents, _ = read(path, "titles", 100_000)
    assert documents == all_documents(path.read_text(encoding="utf-8"), "titles")
    assert documents[0][0] == first
    assert len(documents) == 60  # Merity et al., arXiv:1609.07843, table 1


def test_lines_that_are_not_utf8_are_counted_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.txt"
    path.write_bytes(b"\xef\xbb\xbfgood\nb\xffad\n\nalso b\xc3\nfine\r\n")
    for max_bytes in (1, 3, 100):
        documents, counts = read(path, "blank-lines", max_bytes)
        assert documents == [["good", "b\ufffdad"], ["also b\ufffd", "fine"]]
        assert counts == {"documents": 2, "broken_lines": 2}


def test_empty_files_are_counted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text(" \n\n")
    counts = Counter()
    for segment in reader.cut_files(reader.find_files([str(tmp_path / "*")]), "file", 10):
        assert not list(reader.read_segment(segment, "file", counts))
    assert counts["empty_documents"] == 2 and counts["documents"] == 0


def test_binary_file_is_rejected(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"text\nPNG\0\0")
    with rejected("*/image.png", ..., "is not text: its line at byte 5 holds a", "leave the file"):
        read(path, "file", 10)


def test_segment_within_a_document_is_not_read_to_the_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("text\n" * 100 + "\0")  # the NUL byte would be rejected
    for rule in ("blank-lines", "titles"):
        assert not list(reader.read_segment(reader.Segment(str(path), 10, 20, 10), rule, Counter()))


def test_huge_document_is_rejected(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_DOCUMENT_BYTES", 2_000_000)
    path = tmp_path / "dump.txt"
    path.write_text("text\n\n" * 500_000)
    with rejected("*/dump.txt", ..., "has 3 MB, which is too large for a document"):
        reader.cut_files([str(path)], "file", 10**6)
    assert len(reader.cut_files([str(path)], "blank-lines", 10**6)) == 3


def test_document_without_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_DOCUMENT_BYTES", 1_000_000)
    path = tmp_path / "dump.txt"
    path.write_text("text\n" * 150_000 + "\n" + "text\n" * 150_000)
    first, *_ = reader.cut_files([str(path)], "blank-lines", 10**5)
    assert len(list(reader.read_segment(first, "blank-lines", Counter()))) == 1
    with rejected("*/dump.txt", ..., "has a document of over 1 MB, up to byte 1,000,001"):
        list(reader.read_segment(first, "titles", Counter()))


def test_sorted_unique_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    for name in ("b.md", "a/c.md", "a/x.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    actual = reader.find_files([f"{tmp_path}/**/*.md", "b*"])
    assert actual == [f"{tmp_path}/a/c.md", f"{tmp_path}/b.md"]
    with rejected("--input", ..., "matches no file", "give a file, or a pattern that matches"):
        reader.find_files([f"{tmp_path}/b*", f"{tmp_path}/none*"])
    with rejected("--input", "a/", "matches no file", "give a/**/* for the files in the"):
        reader.find_files(["a/"])


class TinyText(Tiny, skip_registration=True):
    """Five records of text, for a folder of prepared sets."""

    name = "tiny_text"
    features = {"text": tfds.features.Text()}
    examples = [{"text": f"Record {n}.\n\nIts second line, é." if n else "\n"} for n in range(5)]


def test_records_of_a_tfds_set(tmp_path: pathlib.Path) -> None:
    TinyText.prepare(tmp_path)
    bytes_each = tfds.builder("tiny_text", data_dir=tmp_path).info.splits["train"].num_bytes // 5
    segments = reader.cut_tfds("tfds:tiny_text", str(tmp_path), 2 * bytes_each)
    assert [(segment.start, segment.stop) for segment in segments] == [(0, 2), (2, 4), (4, 5)]
    counts = Counter()
    documents = [
        text for segment in segments for text in reader.read_tfds(segment, str(tmp_path), counts)
    ]
    assert sorted(documents) == [[f"Record {n}.", "Its second line, é."] for n in range(1, 5)]
    assert counts == {"documents": 4, "empty_documents": 1, "broken_lines": 0}
    with rejected("--input", "tfds:tiny_text:test", "has no split 'test'", "use train"):
        reader.cut_tfds("tfds:tiny_text:test", str(tmp_path), 60)
    with rejected("--input", "tfds:no_such_set", "(Dataset no_such_set not found.)"):
        reader.cut_tfds("tfds:no_such_set", str(tmp_path), 60)
    with rejected("--input", "tfds:mnist", "is not prepared in"):
        reader.cut_tfds("tfds:mnist", str(tmp_path), 60)


def test_tfds_sets_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    TinyText.prepare(tmp_path)
    (segment,) = reader.cut_tfds("tfds:tiny_text", str(tmp_path), 10**6)
    (path,) = tmp_path.rglob("*.array_record-*")
    content = bytearray(path.read_bytes())
    content[70] ^= 0xFF
    path.write_bytes(content)
    with rejected("a record of --input=tfds:tiny_text", ..., "is damaged (Corrupted"):
        list(reader.read_tfds(segment, str(tmp_path), Counter()))
    # The default format of TFDS cannot be read by index.
    path.rename(str(path).replace("array_record", "tfrecord"))
    (info,) = tmp_path.rglob("dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with rejected("--input", "tfds:tiny_text", "is prepared as tfrecord, which cannot"):
        reader.cut_tfds("tfds:tiny_text", str(tmp_path), 10**6)


def test_pipes_and_devices(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with rejected("--input", ..., "is a pipe, a device or a broken link"):
            reader.find_files([f"{tmp_path}/{name}"])
        # A pipe may have replaced the file since.
        segment = reader.Segment(str(tmp_path / name), 0, 10, 10)
        with rejected(tmp_path / name, ..., "cannot be read (it is a "):
            list(reader.read_segment(segment, "file", Counter()))


def test_line_without_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_MAX_DOCUMENT_BYTES", 100_000)
    path = tmp_path / "dump.txt"
    path.write_bytes(b"a " * 5_000_000 + b"\n\nnext\n")
    tracemalloc.start()
    with rejected("*/dump.txt", ..., "has a document of over 0 MB, up to byte 0"):
        first = reader.Segment(str(path), 0, 10**6, 10**6)
        list(reader.read_segment(first, "blank-lines", Counter()))
    # A segment that begins within a line skips the rest of this line.
    segment = reader.Segment(str(path), 10**6, 10**7 + 2, 10**7)
    assert list(reader.read_segment(segment, "blank-lines", Counter())) == [["next"]]
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()

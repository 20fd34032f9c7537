"""Documents of files: every rule, wherever a file is cut, and what is wrong with a file."""

import pathlib
import random
import re
from collections import Counter

import pytest
import tensorflow_datasets as tfds

from lamb_tpu.data.text import reader
from lamb_tpu.errors import UserError
from tests.shared import shared


def whole(content: str, rule: str) -> list[list[str]]:
    """The documents of a text, by regular expressions on all of it."""
    blank = r"(?:\A|^)[^\S\n]*\n"
    if rule == "file":
        parts = [content]
    elif rule == "blank-lines":
        parts = re.split(blank, content, flags=re.M)
    else:
        title = r"[^\S\n]*= [^=\n][^\n]*[^=\n] =[^\S\n]*$"
        parts = re.split(rf"(?:{blank}|\A)(?={title})", content, flags=re.M)
    documents = [[line.strip() for line in part.split("\n") if line.strip()] for part in parts]
    return [document for document in documents if document]


def made_up_text(seed: int) -> str:
    rng = random.Random(seed)
    lines = []
    for number in range(200):
        lines.append(
            rng.choice(
                [
                    "",
                    "",
                    "  ",
                    f"word {number}",
                    f"é{number} " * rng.randint(1, 9),
                    f" = Title {number} = ",
                    f"\n = Title {number} = \n",
                    f" = = Section {number} = = ",
                    f"x = {number} =",
                ]
            )
        )
    return "\n".join(lines) + "\n" * rng.randint(0, 2)


@pytest.mark.parametrize("rule", reader.DOCUMENT_RULES)
@pytest.mark.parametrize("max_bytes", [1, 7, 100, 10**6])
def test_pieces_hold_every_document_once(tmp_path: pathlib.Path, rule: str, max_bytes: int) -> None:
    for seed in range(5):
        path = tmp_path / f"{seed}.txt"
        content = made_up_text(seed)
        path.write_text(content, encoding="utf-8")
        counts = Counter()
        pieces = reader.cut_files([str(path)], rule, max_bytes)
        assert sum(piece.num_bytes for piece in pieces) == path.stat().st_size
        found = [text for piece in pieces for text in reader.read_piece(piece, rule, counts)]
        assert found == whole(content, rule)
        assert counts == {"documents": len(found), "broken_lines": 0}


@pytest.mark.parametrize(
    "split, first", [("valid", "= Homarus gammarus ="), ("test", "= Robert Boulter =")]
)
def test_articles_of_wikitext(split: str, first: str) -> None:
    path = shared("data", "wikitext2_valid_test", f"wiki.{split}.raw")
    counts = Counter()
    pieces = reader.cut_files([str(path)], "titles", 100_000)
    documents = [text for piece in pieces for text in reader.read_piece(piece, "titles", counts)]
    assert documents == whole(path.read_text(encoding="utf-8"), "titles")
    assert documents[0][0] == first
    assert len(documents) == 60  # Merity et al., arXiv:1609.07843, table 1


def test_what_is_not_utf8_is_counted_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "broken.txt"
    path.write_bytes(b"\xef\xbb\xbfgood\nb\xffad\n\nalso b\xc3\nfine\r\n")
    for max_bytes in (1, 3, 100):
        counts = Counter()
        pieces = reader.cut_files([str(path)], "blank-lines", max_bytes)
        documents = [
            text for piece in pieces for text in reader.read_piece(piece, "blank-lines", counts)
        ]
        assert documents == [["good", "b\ufffdad"], ["also b\ufffd", "fine"]]
        assert counts == {"documents": 2, "broken_lines": 2}


def test_empty_files_are_counted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text(" \n\n")
    counts = Counter()
    for piece in reader.cut_files(reader.find_files([str(tmp_path / "*")]), "file", 10):
        assert not list(reader.read_piece(piece, "file", counts))
    assert counts["empty_documents"] == 2 and counts["documents"] == 0


def test_a_file_that_is_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"text\nPNG\0\0")
    (piece,) = reader.cut_files([str(path)], "file", 10)
    with pytest.raises(UserError, match=r"image.png is no text: its line at byte 5 holds a NUL"):
        list(reader.read_piece(piece, "file", Counter()))


def test_a_piece_within_a_document_is_not_read_to_the_end(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("text\n" * 100 + "\0")  # which would be refused
    for rule in ("blank-lines", "titles"):
        assert not list(reader.read_piece(reader.Piece(str(path), 10, 20, 10), rule, Counter()))


def test_a_file_too_large_for_one_document_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_DOCUMENT_BYTES", 2_000_000)
    path = tmp_path / "dump.txt"
    path.write_text("text\n\n" * 500_000)
    with pytest.raises(UserError, match="dump.txt has 3 MB, too much for one document"):
        reader.cut_files([str(path)], "file", 10**6)
    assert len(reader.cut_files([str(path)], "blank-lines", 10**6)) == 3


def test_a_document_that_never_ends_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_DOCUMENT_BYTES", 1_000_000)
    path = tmp_path / "dump.txt"
    path.write_text("text\n" * 150_000 + "\n" + "text\n" * 150_000)
    first, *_ = reader.cut_files([str(path)], "blank-lines", 10**5)
    assert len(list(reader.read_piece(first, "blank-lines", Counter()))) == 1
    with pytest.raises(
        UserError,
        match=r"dump.txt has a document of over 1 MB, .* byte 1,000,001 "
        "nothing in it begins another under --documents=titles",
    ):
        list(reader.read_piece(first, "titles", Counter()))


def test_files_are_sorted_and_found_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    for name in ("b.md", "a/c.md", "a/x.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    found = reader.find_files([f"{tmp_path}/**/*.md", "b*"])
    assert found == [f"{tmp_path}/a/c.md", f"{tmp_path}/b.md"]
    with pytest.raises(UserError, match=r"--input=.*/none\* matches no file"):
        reader.find_files([f"{tmp_path}/b*", f"{tmp_path}/none*"])
    with pytest.raises(UserError, match=r"=a/ matches no file; for those in it give a/\*\*/\*$"):
        reader.find_files(["a/"])


class TinyText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Five records of text, for a folder of prepared sets."""

    VERSION = tfds.core.Version("1.0.0")
    name = "tiny_text"

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
        )

    def _split_generators(self, dl_manager: object) -> dict:
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(5):
            yield number, {"text": f"Record {number}.\n\nIts second line, é." if number else "\n"}


def test_records_of_a_tfds_set(tmp_path: pathlib.Path) -> None:
    TinyText(data_dir=tmp_path).download_and_prepare(file_format="array_record")
    bytes_each = tfds.builder("tiny_text", data_dir=tmp_path).info.splits["train"].num_bytes // 5
    pieces = reader.cut_tfds("tfds:tiny_text", str(tmp_path), 2 * bytes_each)
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 2), (2, 4), (4, 5)]
    counts = Counter()
    documents = [
        text for piece in pieces for text in reader.read_tfds(piece, str(tmp_path), counts)
    ]
    assert sorted(documents) == [[f"Record {n}.", "Its second line, é."] for n in range(1, 5)]
    assert counts == {"documents": 4, "empty_documents": 1, "broken_lines": 0}
    with pytest.raises(UserError, match="has no split 'test'; it has train"):
        reader.cut_tfds("tfds:tiny_text:test", str(tmp_path), 60)
    with pytest.raises(UserError, match="TFDS has no 'no_such_set'"):
        reader.cut_tfds("tfds:no_such_set", str(tmp_path), 60)
    with pytest.raises(UserError, match="tfds:mnist: the set is not prepared in"):
        reader.cut_tfds("tfds:mnist", str(tmp_path), 60)


def test_tfds_sets_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    TinyText(data_dir=tmp_path).download_and_prepare(file_format="array_record")
    (piece,) = reader.cut_tfds("tfds:tiny_text", str(tmp_path), 10**6)
    (path,) = tmp_path.rglob("*.array_record-*")
    content = bytearray(path.read_bytes())
    content[70] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match="tfds:tiny_text: a record cannot be read, .* delete .*1.0"):
        list(reader.read_tfds(piece, str(tmp_path), Counter()))
    # As TFDS prepares a set by default.
    path.rename(str(path).replace("array_record", "tfrecord"))
    (info,) = tmp_path.rglob("dataset_info.json")
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match="is prepared as tfrecord, which cannot be read by index"):
        reader.cut_tfds("tfds:tiny_text", str(tmp_path), 10**6)

"""Shards: ids that are read back, in memory or by record, and errors that name the damage."""

import json
import math
import pathlib
import random
import resource
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from lamb_tpu.data.text import shards
from tests.data.text.corpus import write_folder
from tests.raising import rejected


def made_up(seed: int) -> list[list[list[int]]]:
    """Makes documents, lists of sentences of ids; one sentence is far longer than a record."""
    rng = random.Random(seed)
    documents = [
        [[rng.randrange(5, 60) for _ in range(rng.randint(1, 40))] for _ in range(length)]
        for length in [3, 1, 1500, 8, 1]
    ]
    documents[3][2] = [7] * 20_000
    return documents


@pytest.mark.parametrize("in_memory", [True, False])
def test_everything_is_read_again(tmp_path: pathlib.Path, in_memory: bool) -> None:
    documents = made_up(0)
    write_folder(tmp_path, documents, num_shards=2)
    store = shards.TokenShards(tmp_path, in_memory)
    flat = [token for document in documents for sentence in document for token in sentence]
    assert store.read(np.arange(len(flat))).tolist() == flat
    for number, document in enumerate(documents):
        first, stop = store.document_starts[number : number + 2]
        assert stop - first == len(document)
        for index, sentence in zip(range(first, stop), document):
            start, end = store.sentence_starts[index : index + 2]
            assert store.read(np.arange(start, end)).tolist() == sentence
    positions = np.random.default_rng(0).integers(0, len(flat), (40, 9))
    np.testing.assert_array_equal(store.read(positions), np.array(flat)[positions])
    assert store.read(positions).dtype == np.int32
    assert store.read(np.zeros((0, 4), np.int64)).shape == (0, 4)
    starts = [len(sum(sum(documents[:n], []), [])) for n in range(len(documents) + 1)]
    assert store.document_token_starts.tolist() == starts
    assert store.document_token_starts is store.document_token_starts  # cached


def test_records_are_short(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path, made_up(0), num_shards=1)
    (path,) = tmp_path.glob("*.array_record")
    records = ArrayRecordReader(str(path)).read_all()
    sizes = [len(record) for record in records]
    assert len(records) > 5 and sorted(sizes)[-2] < 2 * 8192 + 4 * 8194
    assert [int.from_bytes(record[:4], "little") for record in records].count(0) == 5


def test_a_large_vocabulary_needs_wide_ids(tmp_path: pathlib.Path) -> None:
    assert shards.id_dtype(2**16) == np.uint16 and shards.id_dtype(2**16 + 1) == np.uint32
    write_folder(tmp_path, [[[70_000, 3]], [[1]]], num_shards=1, vocabulary_size=70_001)
    store = shards.TokenShards(tmp_path)
    assert store.read(np.arange(3)).tolist() == [70_000, 3, 1]


def test_the_fingerprint_is_of_the_content(tmp_path: pathlib.Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_folder(tmp_path / name, made_up(seed), num_shards=2)
    first, second, third = (shards.TokenShards(tmp_path / n).fingerprint for n in "abc")
    assert first == second != third and len(first) == 12


def damage(folder: pathlib.Path, what: str) -> None:
    path = sorted(folder.glob("*.array_record"))[1]
    manifest = json.loads((folder / "manifest.json").read_text())
    if what == "missing":
        path.unlink()
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    elif what == "changed":
        content = bytearray(path.read_bytes())
        content[70] ^= 0xFF  # in the first chunk
        path.write_bytes(content)
    elif what == "extra":
        (folder / "more.array_record").write_bytes(path.read_bytes())
    elif what == "vocabulary":
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    elif what == "counts":
        manifest["counts"]["tokens"] += 1
    elif what == "format":
        manifest["settings"]["format"] = 99
    elif what == "no manifest":
        (folder / "manifest.json").unlink()
        return
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "what, message",
    [
        ("missing", ("*/text-00001-of-00002.array_record", ..., "is missing, though")),
        ("cut", ("*/text-00001-of-00002.array_record", ..., "has 131,067 bytes, not 131,072 as")),
        ("changed", ("*/text-00001-of-00002.array_record", ..., "cannot be read (Corrupted")),
        ("extra", ("*/more.array_record", ..., "is not listed in manifest.json")),
        ("vocabulary", ("*/vocab.txt", ..., "does not match its sha256 in manifest")),
        ("counts", ("*", ..., "holds (5, 1513, 50322) documents,")),
        ("format", ("*", ..., "was prepared in another format")),
        ("no manifest", ("*/manifest.json", ..., "cannot be read (No such file or directory)")),
    ],
)
def test_damage_is_named(tmp_path: pathlib.Path, what: str, message: tuple[Any, ...]) -> None:
    write_folder(tmp_path, made_up(0), num_shards=2)
    damage(tmp_path, what)
    with rejected(*message):
        shards.TokenShards(tmp_path)


def test_damage_that_comes_later_is_named(tmp_path: pathlib.Path) -> None:
    write_folder(tmp_path, made_up(0), num_shards=2)
    store = shards.TokenShards(tmp_path, in_memory=False)
    damage(tmp_path, "changed")
    with rejected("*", ..., "cannot be read (Corrupted", "if it is damaged, delete the folder and"):
        store.read(np.arange(store.sentence_starts[-1]))


def test_limit_of_open_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, [[[number % 50 + 5]] for number in range(150)], num_shards=150)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(path.name) for path in pathlib.Path("/proc/self/fd").iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 50, limits[1]))
        actual = shards.TokenShards(tmp_path, in_memory=False).read(np.arange(150))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert actual.tolist() == [number % 50 + 5 for number in range(150)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 400))
    with rejected("*", ..., "has 150 shards, too many for the 400 files a process may open"):
        shards.TokenShards(tmp_path, in_memory=False)
    assert len(shards.TokenShards(tmp_path, in_memory=True).document_starts) == 151


def test_a_full_disk_is_named(tmp_path: pathlib.Path) -> None:
    ids = np.random.default_rng(0).integers(0, 2**16, 5000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        with rejected("*/shard", ..., "File too large"):
            shards.write_shard(tmp_path / "shard", [[ids]] * 30, shards.id_dtype(2**16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (["counts"], None, "counts"),
        (["counts", "tokens"], "9", "counts.tokens"),
        (["counts", "tokens"], -1, "counts.tokens"),
        (["counts", "documents"], math.nan, "counts.documents"),
        (["shards"], {}, "shards"),
        (["shards", 0, "bytes"], [], "shards[1].bytes"),
        (["shards", 0], [], "shards[1]"),
        (["vocabulary"], "v", "vocabulary"),
        (["vocabulary", "sha256"], 5, "vocabulary.sha256"),
        (["settings", "cased"], 1, "settings.cased"),
    ],
)
def test_a_damaged_manifest_names_the_key(
    tmp_path: pathlib.Path, path: list[str | int], value: object, message: str
) -> None:
    write_folder(tmp_path, made_up(0), num_shards=2)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    section = manifest
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with rejected(f"*prepare the text again): {message}", ..., "is not valid"):
        shards.TokenShards(tmp_path)

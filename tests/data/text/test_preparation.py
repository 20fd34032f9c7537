"""Preparation: the output depends on neither processes nor interruptions; user errors."""

import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from lamb_tpu.data.text import preparation, shards
from lamb_tpu.data.text.preparation import Progress, Settings, prepare_text
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from tests.data.text.test_reader import TinyText
from tests.raising import rejected
from tests.tiny import ROOT

WORDS = ["the", "cat", "sat", "on", "##s", "a", "mat", ".", "!", "it"]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Twelve files of a few documents, and a vocabulary."""
    Vocabulary([*SPECIAL_TOKENS, *WORDS]).write(tmp_path / "vocab.txt")
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for number in range(12):
        name = f"deep/{number:02}.txt" if number % 3 else f"{number:02}.txt"
        text = "The cats sat.\nIt sat on a mat! The cat.\n\n" * (number + 1) + "A dog?\n"
        (tmp_path / "in" / name).write_text(text)
    return tmp_path


def settings(folder: pathlib.Path, **changes: object) -> Settings:
    return Settings(**{"vocab": str(folder / "vocab.txt"), "shard_bytes": 500, **changes})


def prepare(folder: pathlib.Path, output: str, processes: int = 1, **changes: object) -> dict:
    inputs = [f"{folder}/in/**/*.txt"]
    return prepare_text(inputs, folder / output, settings(folder, **changes), processes)


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_output(folder: pathlib.Path) -> None:
    manifest = prepare(folder, "out", documents="blank-lines")
    blocks = sum(range(1, 13))
    assert manifest["counts"] == {
        "documents": blocks + 12,
        "empty_documents": 0,
        "sentences": 3 * blocks + 12,
        "cut_sentences": 0,
        "tokens": 14 * blocks + 3 * 12,
        "unknown_tokens": 2 * 12,
        "broken_lines": 0,
    }
    names = [item["name"] for item in manifest["inputs"]]
    assert names[0] == "00.txt" and "deep/01.txt" in names and len(names) == 12
    for item in manifest["inputs"]:
        content = (folder / "in" / item["name"]).read_bytes()
        assert item["sha256"] == hashlib.sha256(content).hexdigest()
        assert item["bytes"] == len(content)
    assert len(manifest["shards"]) > 5
    for item in manifest["shards"]:
        content = (folder / "out" / item["name"]).read_bytes()
        assert item["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest == json.loads((folder / "out" / "manifest.json").read_text())
    assert (folder / "out" / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()

    store = shards.TokenShards(folder / "out")
    tokens = [store.vocabulary.tokens[token] for token in store.read(np.arange(17))]
    assert tokens[:14] == "the cat ##s sat . it sat on a mat ! the cat .".split()
    assert tokens[14:] == ["a", "[UNK]", "[UNK]"]  # the end of the first file
    assert store.sentence_starts[:6].tolist() == [0, 5, 11, 14, 17, 22]
    assert store.document_starts[:4].tolist() == [0, 3, 4, 7]


def test_every_way_gives_the_same_bytes(folder: pathlib.Path) -> None:
    prepare(folder, "one", documents="blank-lines")
    prepare(folder, "two", processes=2, documents="blank-lines")
    assert contents(folder / "one") == contents(folder / "two")
    # The output does not depend on the input's folder.
    (folder / "elsewhere").mkdir()
    (folder / "in").rename(folder / "elsewhere" / "in")
    changes = settings(folder, documents="blank-lines")
    prepare_text([f"{folder}/elsewhere/in/**/*.txt"], folder / "moved", changes, 1)
    assert contents(folder / "moved") == contents(folder / "one")


def test_a_second_run_does_nothing(folder: pathlib.Path) -> None:
    first = prepare(folder, "out")
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").glob("[!.]*")}
    assert prepare(folder, "out") == first
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "out").glob("[!.]*")}


def test_interrupted_run_continues(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(folder, "full")
    written = []
    original = preparation._prepare_shard

    def fail_at_third(path: pathlib.Path, *rest: object) -> str:
        written.append(path.name)
        if len(written) == 3:
            path.with_name(f".{path.name}.part").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        return original(path, *rest)

    monkeypatch.setattr(preparation, "_prepare_shard", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, "out")
    assert not (folder / "out" / "manifest.json").exists()
    with rejected("*/manifest.json", ..., "cannot be read (No such file or directory)"):
        shards.TokenShards(folder / "out")
    seen: list[Progress] = []
    inputs = [f"{folder}/in/**/*.txt"]
    prepare_text(inputs, folder / "out", settings(folder), 1, seen.append)
    assert len(set(written)) == len(written) - 1  # only the third shard was begun twice
    assert contents(folder / "out") == contents(folder / "full")
    total = sum(path.stat().st_size for path in (folder / "in").rglob("*.txt"))
    assert 0 < seen[0].resumed == seen[0].done < total
    assert seen[-1].done == seen[-1].total == total


def test_damaged_shards_are_redone(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(folder, "full")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(folder, "out")
    first, second, third = sorted((folder / "out").glob("*.array_record"))[:3]
    first.write_bytes(b"")
    second.with_suffix(".done.json").write_bytes(b"")
    third.unlink()
    prepare(folder, "out")
    assert contents(folder / "out") == contents(folder / "full")


def test_a_complete_output_that_is_damaged(folder: pathlib.Path) -> None:
    prepare(folder, "out")
    shard = sorted((folder / "out").glob("*.array_record"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with rejected("*/text-00001-of-00009.array_record", ..., "is missing, though"):
        prepare(folder, "out")
    shard.write_bytes(content)
    (folder / "out" / "vocab.txt").unlink()
    with rejected("*/vocab.txt", ..., "is missing, though manifest.json lists it"):
        prepare(folder, "out")
    (folder / "out" / "manifest.json").write_text("")
    with rejected("*/manifest.json", ..., "is damaged (Expecting value: line 1 column 1 (char 0))"):
        prepare(folder, "out")


def test_a_complete_output_whose_manifest_is_damaged(folder: pathlib.Path) -> None:
    prepare(folder, "out")
    path = folder / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    for changes, message in (
        ({"counts": None}, ("*: counts", None, "is not valid", "use a section of keys")),
        ({"shards": 5}, ("*: shards", 5, "is not valid", "use a list")),
        ({"vocabulary": {"name": "vocab.txt"}}, ("*: vocabulary.size", ..., "is missing")),
        ({"settings": []}, ("--output", ..., "has a manifest without settings", "delete the")),
    ):
        path.write_text(json.dumps(manifest | changes))
        with rejected(*message):
            prepare(folder, "out")
    for content in ("[" * 100_000, "[]", "\0"):
        path.write_text(content)
        with rejected(path, ..., "is damaged (", "delete the folder"):
            prepare(folder, "out")


@pytest.mark.long
def test_killed_and_started_again(folder: pathlib.Path) -> None:
    for path in (folder / "in").rglob("*.txt"):
        path.write_text(path.read_text() * 300)
    command = [
        sys.executable,
        "-m",
        "lamb_tpu.data.prepare_text",
        f"--input={folder}/in/**/*.txt",
        f"--vocab={folder}/vocab.txt",
        "--shard-bytes=50000",
        "--processes=2",
    ]
    prepare(folder, "full", shard_bytes=50_000)
    process = subprocess.Popen([*command, f"--output={folder}/out"], cwd=ROOT)
    deadline = time.monotonic() + 300
    while not list((folder / "out").glob("*.done.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(_is_alive(worker) for worker in workers):  # workers end with the main process
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (folder / "out" / "manifest.json").exists()
    prepare(folder, "out", shard_bytes=50_000)
    assert contents(folder / "out") == contents(folder / "full")


def _is_alive(process: str) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_vocabulary_is_trained(folder: pathlib.Path) -> None:
    manifest = prepare(folder, "out", vocab=None, train_vocab=60)
    assert manifest["vocabulary"]["size"] <= 60 and manifest["settings"]["train_vocab"] == 60
    assert manifest["counts"]["unknown_tokens"] == 0
    prepare(folder, "again", vocab=None, train_vocab=60)
    assert contents(folder / "out") == contents(folder / "again")


def test_a_vocabulary_of_weights_that_keep_case(folder: pathlib.Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    with rejected("--vocab", ..., "is a vocabulary with cased=True, as the file beside it says"):
        prepare(folder, "out")
    assert not (folder / "out").exists()
    assert prepare(folder, "out", cased=True)["settings"]["cased"] is True
    (folder / "text.json").write_text('{"cased": false}')
    with rejected("--vocab", ..., "is a vocabulary with cased=False, as the file beside it says"):
        prepare(folder, "other", cased=True)


def test_a_tfds_set(folder: pathlib.Path) -> None:
    TinyText.prepare(folder / "sets")
    changes = settings(folder, data_dir=str(folder / "sets"))
    manifest = prepare_text(["tfds:tiny_text"], folder / "out", changes, 1)
    assert manifest["counts"]["documents"] == 4 and manifest["counts"]["empty_documents"] == 1
    assert [item["name"] for item in manifest["inputs"]] == [
        "tiny_text-train.array_record-00000-of-00001"
    ]
    with rejected("--input", "tfds:tiny_text", "must be the only input", "leave out the other"):
        prepare_text(["tfds:tiny_text", f"{folder}/in/*"], folder / "both", changes, 1)


def test_documents_of_nothing_are_counted(folder: pathlib.Path) -> None:
    (folder / "in" / "control.txt").write_bytes(b"\x07\x08\n\xef\xbf\xbd\n")
    (folder / "in" / "empty.txt").write_bytes(b"")
    counts = prepare(folder, "out")["counts"]
    assert counts["documents"] == 12 and counts["empty_documents"] == 2
    assert len(shards.TokenShards(folder / "out").document_starts) == 13


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(documents="page"), ("--documents", "page", "is unknown", "use file, blank-lines or")),
        (dict(sentences="x"), ("--sentences", "x", "is unknown", "use split or lines")),
        (dict(train_vocab=50), ("--vocab or --train-vocab", ..., "must be given, but not both")),
        (dict(vocab=None), ("--vocab or --train-vocab", ..., "must be given, but not both")),
        (dict(shard_bytes=0), ("--shard-bytes", 0, "is out of range", "use 1 to 2147483647")),
        (dict(processes=0), ("--processes", 0, "is out of range", "use 1 to 2147483647")),
        (dict(vocab="none.txt"), ("the vocabulary none.txt", ..., "cannot be read (No such file")),
        (dict(vocab=__file__), ("*/test_preparation.py", ..., "is not a vocabulary of BERT: it")),
        (dict(vocab=None, train_vocab=8), ("--train-vocab", 8, "is less than the 28 special")),
    ],
)
def test_bad_settings(folder: pathlib.Path, changes: dict, message: tuple[Any, ...]) -> None:
    with rejected(*message):
        prepare(folder, "out", **changes)
    prepare(folder, "out")  # the error has not reserved the folder


def test_an_output_that_is_something_else(folder: pathlib.Path) -> None:
    prepare(folder, "out")
    Vocabulary([*SPECIAL_TOKENS, *WORDS, "dog"]).write(folder / "other.txt")
    for other in ({"vocab": str(folder / "other.txt")}, {"vocab": None, "train_vocab": 40}):
        with rejected("--output", ..., "was begun with another vocabulary"):
            prepare(folder, "out", **other)
    with rejected("--output", ..., "was begun with cased=False, not True"):
        prepare(folder, "out", cased=True)
    (folder / "in" / "00.txt").write_text("Other text.")
    with rejected("--output", ..., "was begun with other input files, or the files have changed"):
        prepare(folder, "out")
    with rejected(
        "--output", ..., "is not empty and holds no unfinished output", "use another folder"
    ):
        prepare(folder, "in")
    with rejected("--output", ..., "is a file", "use a folder"):
        prepare(folder, "vocab.txt")


def test_text_of_nothing(folder: pathlib.Path) -> None:
    (folder / "empty.txt").write_text("\n")
    with rejected("--output", ..., "would have no text, because the inputs", "give other inputs"):
        prepare_text([f"{folder}/empty.txt"], folder / "out", settings(folder), 1)


def test_errors_in_workers_are_raised(folder: pathlib.Path) -> None:
    (folder / "in" / "11.txt").write_bytes(b"a\0b")
    with rejected("*/11.txt", ..., "is not text: its line at byte 0 holds a", "leave the file"):
        prepare(folder, "out", processes=2)


@pytest.mark.long
def test_killed_worker_is_reported(folder: pathlib.Path) -> None:
    for path in (folder / "in").rglob("*.txt"):
        path.write_text(path.read_text() * 300)

    def kill(progress: Progress) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    inputs, changes = [f"{folder}/in/**/*.txt"], settings(folder, shard_bytes=20_000)
    with rejected("a process", ..., "was killed, perhaps because memory ran out"):
        prepare_text(inputs, folder / "out", changes, 2, kill)
    prepare_text(inputs, folder / "out", changes, 1)
    prepare_text(inputs, folder / "full", changes, 1)
    assert contents(folder / "out") == contents(folder / "full")


def test_two_at_once(folder: pathlib.Path) -> None:
    (folder / "out").mkdir()
    with preparation._locked(folder / "out"):
        with rejected("--output", folder / "out", "is being prepared by another process"):
            prepare(folder, "out")

"""Preparation: what comes out, the same by every way, and what a user can do wrong."""

import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lamb_tpu.data.text import preparation, shards
from lamb_tpu.data.text.preparation import Progress, Settings, prepare_text
from lamb_tpu.data.text.vocabulary import SPECIAL_TOKENS, Vocabulary
from lamb_tpu.errors import UserError
from tests.data.text.test_reader import TinyText
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


def test_what_comes_out(folder: pathlib.Path) -> None:
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
    assert tokens[14:] == ["a", "[UNK]", "[UNK]"]  # the first file ends
    assert store.sentence_starts[:6].tolist() == [0, 5, 11, 14, 17, 22]
    assert store.document_starts[:4].tolist() == [0, 3, 4, 7]


def test_every_way_gives_the_same_bytes(folder: pathlib.Path) -> None:
    prepare(folder, "one", documents="blank-lines")
    prepare(folder, "two", processes=2, documents="blank-lines")
    assert contents(folder / "one") == contents(folder / "two")
    # Where the input lies is no part of it either.
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


def test_an_interrupted_run_continues(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(folder, "whole")
    written = []
    original = preparation._prepare_shard

    def fail_at_third(path: pathlib.Path, *rest: object) -> None:
        written.append(path.name)
        if len(written) == 3:
            path.with_name(f".{path.name}.part").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        original(path, *rest)

    monkeypatch.setattr(preparation, "_prepare_shard", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, "out")
    assert not (folder / "out" / "manifest.json").exists()
    with pytest.raises(UserError, match="is no prepared text"):
        shards.TokenShards(folder / "out")
    seen: list[Progress] = []
    inputs = [f"{folder}/in/**/*.txt"]
    prepare_text(inputs, folder / "out", settings(folder), 1, seen.append)
    assert len(set(written)) == len(written) - 1  # only the third was begun twice
    assert contents(folder / "out") == contents(folder / "whole")
    total = sum(path.stat().st_size for path in (folder / "in").rglob("*.txt"))
    assert 0 < seen[0].resumed == seen[0].done < total
    assert seen[-1].done == seen[-1].total == total


def test_what_a_loss_of_power_left_is_made_again(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(folder, "whole")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare(folder, "out")
    first, second, third = sorted((folder / "out").glob("*.array_record"))[:3]
    first.write_bytes(b"")
    second.with_suffix(".done.json").write_bytes(b"")
    third.unlink()
    prepare(folder, "out")
    assert contents(folder / "out") == contents(folder / "whole")


def test_a_complete_output_that_is_damaged(folder: pathlib.Path) -> None:
    prepare(folder, "out")
    shard = sorted((folder / "out").glob("*.array_record"))[1]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} is missing, .*; delete the folder and prep"):
        prepare(folder, "out")
    shard.write_bytes(content)
    (folder / "out" / "vocab.txt").unlink()
    with pytest.raises(UserError, match="vocab.txt is missing, though manifest.json lists it; del"):
        prepare(folder, "out")
    (folder / "out" / "manifest.json").write_text("")
    with pytest.raises(UserError, match=r"manifest.json is damaged \(.*\); delete the folder"):
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
    prepare(folder, "whole", shard_bytes=50_000)
    process = subprocess.Popen([*command, f"--output={folder}/out"], cwd=ROOT)
    deadline = time.monotonic() + 300
    while not list((folder / "out").glob("*.done.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while any(_is_alive(worker) for worker in workers):  # they do not outlive the first process
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (folder / "out" / "manifest.json").exists()
    prepare(folder, "out", shard_bytes=50_000)
    assert contents(folder / "out") == contents(folder / "whole")


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
    with pytest.raises(UserError, match="vocab.txt is of text with cased = True, .*; give --cased"):
        prepare(folder, "out")
    assert not (folder / "out").exists()
    assert prepare(folder, "out", cased=True)["settings"]["cased"] is True
    (folder / "text.json").write_text('{"cased": false}')
    with pytest.raises(UserError, match="is of text with cased = False, .*; leave out --cased"):
        prepare(folder, "other", cased=True)


def test_a_tfds_set(folder: pathlib.Path) -> None:
    TinyText(data_dir=folder / "sets").download_and_prepare(file_format="array_record")
    changes = settings(folder, data_dir=str(folder / "sets"))
    manifest = prepare_text(["tfds:tiny_text"], folder / "out", changes, 1)
    assert manifest["counts"]["documents"] == 4 and manifest["counts"]["empty_documents"] == 1
    assert [item["name"] for item in manifest["inputs"]] == [
        "tiny_text-train.array_record-00000-of-00001"
    ]
    with pytest.raises(UserError, match="tfds:tiny_text must be the only input"):
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
        (
            dict(documents="page"),
            "--documents=page is unknown; known are file, blank-lines, titles",
        ),
        (dict(sentences="x"), "--sentences=x is unknown; known are split, lines"),
        (dict(train_vocab=50), "give one of --vocab=FILE and --train-vocab=N"),
        (dict(vocab=None), "give one of --vocab=FILE and --train-vocab=N"),
        (dict(shard_bytes=0), "--shard-bytes=0 must be at least 1"),
        (dict(processes=0), "--processes=0 must be at least 1"),
        (dict(vocab="none.txt"), "none.txt cannot be read"),
        (dict(vocab=__file__), "is no vocabulary of BERT's"),
        (dict(vocab=None, train_vocab=8), "--train-vocab=8 is too few"),
    ],
)
def test_bad_settings(folder: pathlib.Path, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(folder, "out", **changes)
    prepare(folder, "out")  # which a mistake has not taken


def test_an_output_that_is_something_else(folder: pathlib.Path) -> None:
    prepare(folder, "out")
    Vocabulary([*SPECIAL_TOKENS, *WORDS, "dog"]).write(folder / "other.txt")
    for other in ({"vocab": str(folder / "other.txt")}, {"vocab": None, "train_vocab": 40}):
        with pytest.raises(UserError, match="was begun with another vocabulary; delete the folder"):
            prepare(folder, "out", **other)
    with pytest.raises(UserError, match="was begun with cased = False, this command has True"):
        prepare(folder, "out", cased=True)
    (folder / "in" / "00.txt").write_text("Other text.")
    with pytest.raises(UserError, match="was begun from other input files, or they have changed"):
        prepare(folder, "out")
    with pytest.raises(UserError, match="is not empty and was not begun by this command"):
        prepare(folder, "in")
    with pytest.raises(UserError, match="vocab.txt is a file; it must be a folder"):
        prepare(folder, "vocab.txt")


def test_text_of_nothing(folder: pathlib.Path) -> None:
    (folder / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="hold no text"):
        prepare_text([f"{folder}/empty.txt"], folder / "out", settings(folder), 1)


def test_mistakes_in_other_processes_arrive(folder: pathlib.Path) -> None:
    (folder / "in" / "11.txt").write_bytes(b"a\0b")
    with pytest.raises(UserError, match="11.txt is no text: its line at byte 0 holds a NUL"):
        prepare(folder, "out", processes=2)


@pytest.mark.long
def test_a_process_that_is_killed_is_told(folder: pathlib.Path) -> None:
    for path in (folder / "in").rglob("*.txt"):
        path.write_text(path.read_text() * 300)

    def kill(progress: Progress) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    inputs, changes = [f"{folder}/in/**/*.txt"], settings(folder, shard_bytes=20_000)
    with pytest.raises(UserError, match="a process was killed, .* fewer than --processes=2"):
        prepare_text(inputs, folder / "out", changes, 2, kill)
    prepare_text(inputs, folder / "out", changes, 1)
    prepare_text(inputs, folder / "whole", changes, 1)
    assert contents(folder / "out") == contents(folder / "whole")


def test_two_at_once(folder: pathlib.Path) -> None:
    (folder / "out").mkdir()
    with preparation._locked(folder / "out"):
        with pytest.raises(UserError, match="is being prepared by another process"):
            prepare(folder, "out")

"""Preparation: rejected files, interruption, concurrent processes and damage."""

import functools
import http.server
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from unittest import mock

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from lamb_tpu import data
from lamb_tpu.data import prepare
from lamb_tpu.data.builders import Cifar10
from tests.data import tiny_cifar
from tests.raising import rejected
from tests.shared import ROOT, shared


def load_cifar(prepared: pathlib.Path, originals: pathlib.Path | None) -> data.Source:
    source_dir = None if originals is None else str(originals)
    return data.load("cifar10", "train", data_dir=str(prepared), source_dir=source_dir)


def start_preparing(
    originals: pathlib.Path, prepared: pathlib.Path, before: str
) -> subprocess.Popen[str]:
    """Starts a process that prepares the tiny archive and prints the sum of the training pixels."""
    script = f"""
import os, pathlib
from lamb_tpu import data
from lamb_tpu.data.builders import Cifar10
from tests.data import tiny_cifar
tiny_cifar.expect(pathlib.Path({str(originals)!r}))
{before}
source = data.load(
    "cifar10", "train", data_dir={str(prepared)!r}, source_dir={str(originals)!r}
)
print(source.arrays["image"].sum())
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, **pipes)


def test_missing_file(tmp_path: pathlib.Path) -> None:
    shutil.copytree(shared("data", "mnist"), tmp_path / "in", copy_function=os.symlink)
    (tmp_path / "in" / "t10k-labels-idx1-ubyte.gz").unlink()
    path = tmp_path / "in" / "t10k-labels-idx1-ubyte.gz"
    with rejected(path, ..., "is missing, but data set mnist needs it", "get it from https://"):
        data.load("mnist", "test", data_dir=str(tmp_path), source_dir=str(tmp_path / "in"))


def test_file_with_one_byte_changed(tmp_path: pathlib.Path) -> None:
    shutil.copytree(shared("data", "mnist"), tmp_path / "in", copy_function=shutil.copyfile)
    path = tmp_path / "in" / "train-labels-idx1-ubyte.gz"
    os.chmod(path, 0o644)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with rejected(path, ..., " (28,881 bytes), not 3552534a", "get it again from https://"):
        data.load("mnist", "test", data_dir=str(tmp_path), source_dir=str(tmp_path / "in"))
    assert not (tmp_path / "mnist" / "3.0.1").exists()


@pytest.mark.parametrize("size", [0, 100_000, -1])
def test_truncated_record_file(prepared_dir: str, tmp_path: pathlib.Path, size: int) -> None:
    shutil.copytree(prepared_dir, tmp_path / "copy")
    (path,) = (tmp_path / "copy").glob("mnist/*/mnist-test.array_record*")
    os.truncate(path, size % path.stat().st_size)
    key = "a record of data set mnist:test"
    with rejected(key, ..., "is damaged or incomplete (", f"delete {tmp_path}"):
        data.load("mnist", "test", data_dir=str(tmp_path / "copy"))


def test_damaged_in_the_middle_and_missing(prepared_dir: str, tmp_path: pathlib.Path) -> None:
    shutil.copytree(prepared_dir, tmp_path / "copy")
    (path,) = (tmp_path / "copy").glob("mnist/*/mnist-test.array_record*")
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(64))
    source = data.load("mnist", "test", data_dir=str(tmp_path / "copy"), in_memory=False)
    with rejected("a record of data set mnist:test", ..., "is damaged or incomplete (Corrupted"):
        list(data.eval_batches(source, 1000))
    path.unlink()
    with rejected("*/mnist-test.array_record-00000-of-00001 of data set mnist", ..., "is missing"):
        data.load("mnist", "test", data_dir=str(tmp_path / "copy"))


def test_prepared_set_needs_no_originals(cifar_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first = load_cifar(tmp_path / "prepared", cifar_dir)
    (cifar_dir / tiny_cifar.FILE_NAME).unlink()
    for originals in (cifar_dir, None):
        again = load_cifar(tmp_path / "prepared", originals)
        np.testing.assert_array_equal(again.arrays["image"], first.arrays["image"])


def test_failed_download(
    cifar_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_set = mock.Mock()
    monkeypatch.setattr(Cifar10, "download_and_prepare", prepare_set)
    for error in (tfds.download.DownloadError("full"), NonMatchingChecksumError("url", "file", "")):
        prepare_set.side_effect = error
        with rejected("the download of data set cifar10", ..., "failed (", "--config.data.dir="):
            load_cifar(tmp_path / "prepared", cifar_dir)
    prepare_set.side_effect = OSError("the disk is full")  # other errors keep their type
    with pytest.raises(OSError, match="the disk is full"):
        load_cifar(tmp_path / "prepared", cifar_dir)


def test_killed_half_way_leaves_no_set(cifar_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    dying = """
generate = Cifar10._generate_examples
def die(self, split, content):
    for index, example in generate(self, split, content):
        if split == "test" and index == 5:
            os._exit(9)
        yield index, example
Cifar10._generate_examples = die
"""
    process = start_preparing(cifar_dir, tmp_path / "prepared", dying)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 9, stderr
    assert list((tmp_path / "prepared" / "cifar10").glob("incomplete*"))
    assert not (tmp_path / "prepared" / "cifar10" / "3.0.2").exists()
    assert len(load_cifar(tmp_path / "prepared", cifar_dir)) == tiny_cifar.NUM_TRAIN


def test_two_processes_at_once(cifar_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # Without the lock, equal random seeds would give both processes the same temporary folder.
    slow = """
import random, time
generate = Cifar10._generate_examples
def slowly(self, split, content):
    time.sleep(1)
    print("generating", split)
    yield from generate(self, split, content)
Cifar10._generate_examples = slowly
random.seed(0)
"""
    processes = [start_preparing(cifar_dir, tmp_path / "prepared", slow) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    expected = tiny_cifar.write(tmp_path)["train"][0].sum()
    assert [int(stdout.split()[-1]) for stdout, _ in outputs] == [expected] * 2
    assert sum(stdout.count("generating train") for stdout, _ in outputs) == 1


def test_folder_that_is_no_prepared_set(cifar_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "prepared" / "cifar10" / "3.0.2"
    folder.mkdir(parents=True)
    with rejected("*/3.0.2 of data set cifar10", ..., "has no dataset_info.json"):
        load_cifar(tmp_path / "prepared", cifar_dir)


def test_no_network(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = urllib.error.URLError("no such host")
    monkeypatch.setattr(urllib.request, "urlopen", mock.Mock(side_effect=error))
    problem = "cifar-10-binary.tar.gz cannot be reached (<urlopen error no such host>)"
    with rejected("data set cifar10", ..., problem, "give --config.data.dir=FOLDER, a folder"):
        load_cifar(tmp_path, None)


def test_network_without_answer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(url: str, timeout: float) -> None:
        time.sleep(1)
        raise TimeoutError

    monkeypatch.setattr(prepare, "_REACH_SECONDS", 0.1)
    monkeypatch.setattr(urllib.request, "urlopen", hang)
    start = time.monotonic()
    with rejected("data set cifar10", ..., "and", "give --config.data.dir=FOLDER, a folder"):
        load_cifar(tmp_path, None)
    assert time.monotonic() - start < 0.9


def test_download(
    cifar_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    handler = functools.partial(Handler, directory=cifar_dir)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{tiny_cifar.FILE_NAME}"
        tiny_cifar.expect(cifar_dir, url)
        assert len(load_cifar(tmp_path / "prepared", None)) == tiny_cifar.NUM_TRAIN
        server.shutdown()
    # The download is stored: a second preparation needs no network.
    shutil.rmtree(tmp_path / "prepared" / "cifar10")
    assert len(load_cifar(tmp_path / "prepared", None)) == tiny_cifar.NUM_TRAIN


def test_bucket_is_rejected() -> None:
    builder = Cifar10(data_dir="/nowhere")
    builder._data_dir = "gs://bucket/cifar10/3.0.2"
    with rejected("data set cifar10", ..., "is not prepared in gs://bucket/cifar10/3.0.2"):
        with prepare._one_at_a_time(builder):
            pass

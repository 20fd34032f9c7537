"""A run goes on elsewhere: on other devices, in other processes, with its state split otherwise."""

import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.store import checksums
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny


@pytest.fixture
def recipe(tmp_path: pathlib.Path) -> pathlib.Path:
    """A config file of `tiny.digits()`."""
    file = tmp_path / "recipe.py"
    file.write_text(
        "from tests import tiny\ndef get_config(argument=None):\n    return tiny.digits()\n"
    )
    return file


def cut(workdir: pathlib.Path) -> pathlib.Path:
    """A copy in which update 4 is the last one saved."""
    copy = pathlib.Path(shutil.copytree(workdir, workdir.with_name(workdir.name + "-cut")))
    for step in (8, 12):
        shutil.rmtree(copy / "checkpoints" / str(step))
    return copy


def check(workdir: pathlib.Path, whole: pathlib.Path) -> None:
    """State, data position and records are those of the uninterrupted run."""
    config = tiny.digits()
    (found, position), (expected, position_expected) = (
        tiny.restored(config, folder) for folder in (workdir, whole)
    )
    close(tiny.arrays(found), tiny.arrays(expected))
    assert position["loader"] == position_expected["loader"]
    found, expected = (read_records(folder / "metrics.jsonl") for folder in (workdir, whole))
    assert len(found) == len(expected)
    for record, wanted in zip(found, expected, strict=True):
        assert record.pop("kind") == wanted.pop("kind")
        for each in (record, wanted):
            each.pop("sent_bytes", None)  # other devices send otherwise
        assert tiny.untimed(record) == pytest.approx(tiny.untimed(wanted), rel=1e-5)


def close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Every array to 1e-6 of its largest value."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value.astype(np.float64)).max() or 1.0
        difference = np.abs(found[name].astype(np.float64) - value).max()
        assert difference <= 1e-6 * scale, (name, difference / scale)


@contextlib.contextmanager
def damaged(file: pathlib.Path) -> Iterator[None]:
    """One bit of the file is another."""
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    yield
    file.write_bytes(whole)


def launched(processes: int, devices: int, *arguments: str) -> subprocess.CompletedProcess:
    done = tiny.command(
        "lamb_tpu.launch",
        "local",
        f"--processes={processes}",
        f"--devices-per-process={devices}",
        "--",
        *arguments,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_one_device_then_eight(
    tmp_path: pathlib.Path, recipe: pathlib.Path, trained: pathlib.Path
) -> None:
    workdir = tmp_path / "one"
    done = tiny.command("lamb_tpu.train", f"--config={recipe}", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    resumed = cut(workdir)
    train(tiny.digits(), resumed, quiet=True)
    check(resumed, trained)
    check(resumed, workdir)


@pytest.mark.long
def test_two_processes_then_one_and_back(
    tmp_path: pathlib.Path, recipe: pathlib.Path, trained: pathlib.Path
) -> None:
    workdir = tmp_path / "two"
    launched(2, 2, f"--config={recipe}", f"--workdir={workdir}")
    checkpoint = workdir / "checkpoints" / "12"
    names = json.loads((checkpoint / checksums.NAME).read_text())
    folders = [path for path in checkpoint.iterdir() if path.is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert set(names) == {str(path.relative_to(checkpoint)) for path in files}
    written = {name.split("/")[1] for name in names if "/d/" in name}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= written
    for name in names:
        with damaged(checkpoint / name):
            assert checksums.find_damage(checkpoint) == f"{name} is not as it was written"
    assert checksums.find_damage(checkpoint) is None

    resumed = cut(workdir)
    train(tiny.digits(), resumed, quiet=True)
    check(resumed, trained)

    # Back, over a newer checkpoint that cannot be read.
    file = next((resumed / "checkpoints" / "12" / "state").glob("ocdbt.process_0/d/*"))
    file.write_bytes(file.read_bytes()[:-100])
    shutil.rmtree(resumed / "checkpoints" / "8")
    done = launched(2, 2, f"--config={recipe}", f"--workdir={resumed}")
    assert "resumed from the checkpoint of update 4" in done.stdout
    told = tiny.unbroken(done.stderr)
    assert "checkpoint of update 12" in told and "is not as it was written" in told
    assert "cannot be read" not in (resumed / "logs" / "process-1.log").read_text()
    check(resumed, trained)


def split(**changes: Any) -> ConfigDict:
    return tiny.digits(**{f"parallel__{key}": value for key, value in changes.items()})


@pytest.mark.parametrize("backend", ["jit", "shard_map"])
@pytest.mark.parametrize("before, after", [("replicated", "zero1"), ("zero1", "replicated")])
def test_optimizer_state_split_otherwise(
    tmp_path: pathlib.Path, trained: pathlib.Path, before: str, after: str, backend: str
) -> None:
    workdir = tmp_path / "run"
    train(split(optimizer_state=before, backend=backend), workdir, quiet=True)
    resumed = cut(workdir)
    train(split(optimizer_state=after, backend=backend), resumed, quiet=True)
    check(resumed, trained)
    shutil.rmtree(workdir)


def test_backend_changed(copy: pathlib.Path, trained: pathlib.Path) -> None:
    resumed = cut(copy)
    train(split(backend="shard_map", optimizer_state="zero1"), resumed, quiet=True)
    check(resumed, trained)


def test_same_place_gives_the_same_bits(copy: pathlib.Path, trained: pathlib.Path) -> None:
    resumed = cut(copy)
    train(tiny.digits(), resumed, quiet=True)
    found, expected = (tiny.restored(tiny.digits(), folder)[0] for folder in (resumed, trained))
    tiny.assert_equal(found, expected)

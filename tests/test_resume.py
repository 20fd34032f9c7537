"""Tests that a run resumes on other devices, in other processes, or with another sharding of its state."""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.store import checksums
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.tiny import launched


def cut(workdir: pathlib.Path) -> pathlib.Path:
    """Returns a copy of a run without the checkpoints after update 4."""
    return tiny.cut(workdir, workdir.with_name(workdir.name + "-cut"), 4)


def check(workdir: pathlib.Path, full: pathlib.Path) -> None:
    config = tiny.digits()
    (actual, position), (expected, position_expected) = (
        tiny.restored(config, folder) for folder in (workdir, full)
    )
    close(tiny.arrays(actual), tiny.arrays(expected))
    assert position["loader"] == position_expected["loader"]
    actual, expected = (read_records(folder / "metrics.jsonl") for folder in (workdir, full))
    assert len(actual) == len(expected)
    for record, wanted in zip(actual, expected, strict=True):
        assert record.pop("kind") == wanted.pop("kind")
        for each in (record, wanted):
            each.pop("sent_bytes", None)  # depends on the number of devices
        assert tiny.untimed(record) == pytest.approx(tiny.untimed(wanted), rel=1e-5)


def close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Asserts that no element differs by more than 1e-6 of the largest value of its array."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value.astype(np.float64)).max() or 1.0
        difference = np.abs(actual[name].astype(np.float64) - value).max()
        assert difference <= 1e-6 * scale, (name, difference / scale)


@contextlib.contextmanager
def damaged(file: pathlib.Path) -> Iterator[None]:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    yield
    file.write_bytes(content)


def test_one_device_then_eight(tmp_path: pathlib.Path, trained: pathlib.Path) -> None:
    workdir = tmp_path / "one"
    tiny.succeed("lamb_tpu.train", tiny.recipe(tmp_path), f"--workdir={workdir}")
    resumed = cut(workdir)
    train(tiny.digits(), resumed, quiet=True)
    check(resumed, trained)
    check(resumed, workdir)


@pytest.mark.long
def test_two_processes_then_one_and_back(tmp_path: pathlib.Path, trained: pathlib.Path) -> None:
    workdir, recipe = tmp_path / "two", tiny.recipe(tmp_path)
    launched(2, 2, recipe, f"--workdir={workdir}")
    checkpoint = workdir / "checkpoints" / "12"
    names = json.loads((checkpoint / checksums.NAME).read_text())
    folders = [path for path in checkpoint.iterdir() if path.is_dir()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert set(names) == {str(path.relative_to(checkpoint)) for path in files}
    written = {name.split("/")[1] for name in names if "/d/" in name}
    assert {"ocdbt.process_0", "ocdbt.process_1"} <= written
    for name in names:
        with damaged(checkpoint / name):
            assert checksums.find_damage(checkpoint) == f"{name} has changed since it was written"
    assert checksums.find_damage(checkpoint) is None

    resumed = cut(workdir)
    train(tiny.digits(), resumed, quiet=True)
    check(resumed, trained)

    # Again in two processes, with a damaged newest checkpoint.
    file = next((resumed / "checkpoints" / "12" / "state").glob("ocdbt.process_0/d/*"))
    file.write_bytes(file.read_bytes()[:-100])
    shutil.rmtree(resumed / "checkpoints" / "8")
    done = launched(2, 2, recipe, f"--workdir={resumed}")
    assert "resumed from the checkpoint of update 4" in done.stdout
    output = tiny.unbroken(done.stderr)
    assert "checkpoint of update 12" in output and "has changed since it was written" in output
    assert "cannot be read" not in (resumed / "logs" / "process-1.log").read_text()
    check(resumed, trained)


def split(**changes: Any) -> ConfigDict:
    return tiny.digits(**{f"parallel__{key}": value for key, value in changes.items()})


@pytest.mark.parametrize("backend", ["jit", "shard_map"])
@pytest.mark.parametrize("before, after", [("replicated", "zero1"), ("zero1", "replicated")])
def test_another_sharding_of_the_optimizer_state(
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


def test_same_devices_give_the_same_bits(copy: pathlib.Path, trained: pathlib.Path) -> None:
    resumed = cut(copy)
    train(tiny.digits(), resumed, quiet=True)
    tiny.same_state(tiny.digits(), resumed, trained)


def test_evaluation_lost_in_a_power_failure_is_repeated(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.digits(checkpoint__every="6 steps")
    full = tmp_path / "full"
    train(config, full, quiet=True)
    expected = read_records(full / "metrics.jsonl")
    for step in (6, 12):
        workdir = tiny.cut(full, tmp_path / str(step), step)
        lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
        remaining = [line for line in lines if json.loads(line)["step"] <= step]
        assert json.loads(remaining[-1])["kind"] == "eval"
        (workdir / "metrics.jsonl").write_text("".join(remaining)[:-20])
        capsys.readouterr()
        train(config, workdir, quiet=True)
        output = f"metrics.jsonl has lost the evaluation of update {step}, which is repeated"
        assert output in tiny.unbroken(capsys.readouterr().err)
        actual = read_records(workdir / "metrics.jsonl")
        assert list(map(tiny.untimed, actual)) == list(map(tiny.untimed, expected))

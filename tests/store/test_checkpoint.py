"""Checkpoints: saving, restoring, keeping and removing, and damage."""

import errno
import json
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, reading
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.store import checksums
from lamb_tpu.store.checkpoint import Checkpoints
from tests import gcs, tiny
from tests.raising import rejected


def state(step: int) -> dict[str, Any]:
    tree = {
        "step": jnp.int32(step),
        "weights": jnp.full((16, 4), step / 3, jnp.float32),
        "small": jnp.arange(6, dtype=jnp.bfloat16),
        "key": jax.random.key(step),
    }
    return jax.device_put(tree, mesh_lib.replicated(mesh_lib.make_mesh({"data": -1})))


ABSTRACT = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0)
)


def position(step: int) -> dict[str, Any]:
    return {"loader": {"next_batch": step, "source": "digits:train"}, "seconds": step / 7}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the checkpoints of updates 2, 3 and 5."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder, keep=10) as checkpoints:
        save(checkpoints, 2, 3, 5)
    return folder


def save(checkpoints: Checkpoints, *steps: int) -> None:
    """Saves a state and a position for each of the updates `steps`."""
    for step in steps:
        checkpoints.save(step, state(step), position(step))


@pytest.fixture
def folder(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def latest(folder: pathlib.Path) -> tuple[int, list[str]]:
    """Restores the newest readable checkpoint and checks its state; returns its update and the reports."""
    output: list[str] = []
    with Checkpoints(folder, 10, output.append, writes=False) as checkpoints:
        actual, where = checkpoints.restore_latest(ABSTRACT)
    step = int(actual["step"])
    tiny.assert_equal(actual, state(step))
    assert where == position(step)
    return step, output


def test_state_and_position_come_back(saved: pathlib.Path) -> None:
    assert latest(saved) == (5, [])
    with Checkpoints(saved, 10, writes=False) as checkpoints:
        assert checkpoints.steps() == [2, 3, 5]
        actual, where = checkpoints.restore(3, ABSTRACT)
    tiny.assert_equal(actual, state(3))
    assert where == position(3)
    assert actual["weights"].sharding == ABSTRACT["weights"].sharding
    assert actual["small"].dtype == jnp.bfloat16


def test_only_the_newest_are_kept(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        save(checkpoints, 1, 2, 3, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"3", "4"}


def test_further_checkpoints_are_kept(tmp_path: pathlib.Path) -> None:
    best = 3
    with Checkpoints(tmp_path, 2, keep_besides=lambda step: step in (1, best)) as checkpoints:
        save(checkpoints, 1, 2, 3, 4, 5, 6)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3, 5, 6]
        best = 6  # the function is called again at each save
        save(checkpoints, 7)
        checkpoints.wait()
        save(checkpoints, 8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "6", "7", "8"]


def test_saving_does_not_ask_for_preemptions(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax must not poll: its polls, numbered by updates, would collide with those of `Preemption`."""
    asked: list[int] = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
    assert asked == []


def test_no_checkpoint_and_an_unknown_one(tmp_path: pathlib.Path, saved: pathlib.Path) -> None:
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert checkpoints.restore_latest(ABSTRACT) is None and checkpoints.steps() == []
    with Checkpoints(saved, 10, writes=False) as checkpoints:
        problem, remedy = "has no checkpoint of update 4", "use one of 2, 3, 5"
        with rejected(saved, problem=problem, remedy=remedy):
            checkpoints.restore(4, ABSTRACT)


def files(folder: pathlib.Path) -> list[str]:
    return [
        str(path.relative_to(folder / "5"))
        for path in sorted((folder / "5").glob("*/**/*"))
        if path.is_file()
    ]


def half(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, half, flip])
def test_damage_to_any_file_is_noticed(
    folder: pathlib.Path, damage: Callable[[pathlib.Path], None], capfd: pytest.CaptureFixture
) -> None:
    names = files(folder)
    assert len(names) >= 10 and any(name.startswith("state/ocdbt.process_0/d/") for name in names)
    for name in names:
        file = folder / "5" / name
        content = file.read_bytes()
        damage(file)
        step, output = latest(folder)
        assert step == 3, name
        assert len(output) == 1 and name in output[0]
        assert output[0].startswith(f"the checkpoint of update 5 in {folder} cannot be read")
        assert output[0].endswith("trying the previous checkpoint")
        file.write_bytes(content)
    assert latest(folder) == (5, [])
    assert capfd.readouterr().err == ""


def test_damage_that_no_checksum_shows(folder: pathlib.Path) -> None:
    # The files are intact, but hold a different state than requested, so Orbax rejects them.
    abstract = dict(ABSTRACT, weights=jax.ShapeDtypeStruct((3, 3), jnp.float32))
    with Checkpoints(folder, 10, writes=False) as checkpoints:
        with pytest.raises(UserError, match="update 5 in .* cannot be read .[A-Za-z]+Error: "):
            checkpoints.restore(5, abstract | {"more": ABSTRACT["weights"]})


def test_all_damaged(folder: pathlib.Path) -> None:
    for step in (2, 3, 5):
        (folder / str(step) / checksums.NAME).unlink()
    before, output = tiny.fingerprint(folder), []
    with Checkpoints(folder, 10, output.append) as checkpoints:
        key = f"none of the checkpoints [2, 3, 5] in {folder}"
        with rejected(key, problem="can be read", remedy="move the folder away"):
            checkpoints.restore_latest(ABSTRACT)
    assert len(output) == 3 and tiny.fingerprint(folder) == before


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("step", [4, 5])
def test_saving_after_a_damaged_one_was_skipped(folder: pathlib.Path, keep: int, step: int) -> None:
    half(folder / "5" / files(folder)[-1])
    with Checkpoints(folder, keep, lambda text: None) as checkpoints:
        assert int(checkpoints.restore_latest(ABSTRACT)[0]["step"]) == 3
        save(checkpoints, step)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, step][-keep:]
    assert latest(folder) == (step, [])


def test_reader_does_not_touch_a_save_in_progress(folder: pathlib.Path) -> None:
    unfinished = folder / "7.orbax-checkpoint-tmp"
    (unfinished / "state").mkdir(parents=True)
    assert latest(folder)[0] == 5 and unfinished.exists()
    with Checkpoints(folder, 10) as checkpoints:
        save(checkpoints, 8)
    assert not unfinished.exists()


def test_saved_is_the_state_at_the_call(tmp_path: pathlib.Path) -> None:
    # A step donates its buffers, so the writer must not read them later.
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    tree = {"weights": jnp.zeros((512, 512))}
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        where: dict[str, list[int]] = {"at": []}
        for step in range(1, 4):
            checkpoints.save(step, tree, where)
            where["at"].append(step)
            for _ in range(10):
                tree = bump(tree)
        checkpoints.wait()
        for step in range(1, 4):
            actual, position = checkpoints.restore(step, abstract)
            assert (np.asarray(actual["weights"]) == 10 * (step - 1)).all()
            assert position["at"] == list(range(1, step))


def test_shapes_and_some_of_the_arrays(folder: pathlib.Path) -> None:
    replicated = ABSTRACT["weights"].sharding
    with Checkpoints(folder, 10, writes=False) as checkpoints:
        step, shapes = checkpoints.latest_shapes()
        assert step == 5 and set(shapes) == {"step", "weights", "small"}
        assert shapes == {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, leaf in ABSTRACT.items()
            if name in shapes
        }
        actual = checkpoints.restore_part(
            3, {"weights": jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=replicated)}
        )
        expected = state(3)["weights"].astype(jnp.bfloat16)
        tiny.assert_equal(actual, {"weights": expected})
    half(folder / "5" / "state" / "_METADATA")
    output: list[str] = []
    with Checkpoints(folder, 10, output.append, writes=False) as checkpoints:
        assert checkpoints.latest_shapes()[0] == 3 and "_METADATA has changed" in output[0]
        with rejected(f"*update 5 in {folder}", problem="cannot be read (state/_METADATA has"):
            checkpoints.shapes(5)


@pytest.mark.long
def test_saves_leave_no_threads_or_descriptors(tmp_path: pathlib.Path) -> None:
    """Unless the caller waits for the end of a save, Orbax leaves the save's thread and descriptors open."""
    actual = []
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(1, 61):
            save(checkpoints, step)
            if step in (10, 60):
                checkpoints.wait()
                actual.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    (fds, threads), (fds_after, threads_after) = actual
    assert fds_after <= fds + 2 and threads_after <= threads + 2, actual


@pytest.mark.long
def test_saves_of_two_processes_leave_no_threads(tmp_path: pathlib.Path) -> None:
    job = ("--module=tests.job", "--", "saves", str(tmp_path))
    tiny.succeed("lamb_tpu.launch", "local", "--processes=2", *job)
    for index in (0, 1):
        (fds, threads), (fds_after, threads_after) = json.loads(
            (tmp_path / f"{index}.json").read_text()
        )
        assert fds_after <= fds + 2 and threads_after <= threads + 2, index


def fail_in(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Makes each save fail just before the checkpoint gets its name."""

    def fail(folder: pathlib.Path) -> None:
        raise error

    monkeypatch.setattr(checksums, "write", fail)


def test_save_that_fails_in_its_thread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    message = (
        f"the checkpoint of update 2 cannot be saved in {tmp_path} (No space left on device); free "
        "space or repair the disk, then start the same command again: the checkpoint of update 1 "
        "is safe"
    )
    with pytest.raises(UserError) as raised, Checkpoints(tmp_path, keep=1) as checkpoints:
        save(checkpoints, 1)
        checkpoints.wait()
        assert checkpoints.failure() is None
        fail_in(monkeypatch, full)
        save(checkpoints, 2)
        deadline = time.monotonic() + 30
        while checkpoints.failure() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert str(checkpoints.failure()) == message
        save(checkpoints, 3)
    assert str(raised.value) == message
    assert os.listdir(tmp_path) == ["1"] and capfd.readouterr().err == ""
    monkeypatch.undo()
    assert latest(tmp_path) == (1, [])


@pytest.mark.parametrize("is_known", [False, True])
def test_failure_of_the_last_save_is_reported(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
    is_known: bool,
) -> None:
    fail_in(monkeypatch, ValueError("unknown"))
    remedy = "there is no checkpoint yet"
    with rejected("*update 1", problem="ValueError: unknown", remedy=remedy):
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            save(checkpoints, 1)
            while is_known and checkpoints._background.error is None:
                time.sleep(0.01)
    output: list[str] = []
    with pytest.raises(KeyError), Checkpoints(tmp_path, 1, output.append) as checkpoints:
        save(checkpoints, 1)
        raise KeyError  # the error that ends a run has priority
    assert "update 1 cannot be saved" in output[0]
    assert not os.listdir(tmp_path) and capfd.readouterr().err == ""


def test_arrays_that_were_not_merged_are_not_saved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax finds the files to merge by a pattern, which matches none if the path itself has [ or ]."""
    monkeypatch.setattr(reading, "has_pattern", lambda path: False)
    with pytest.raises(UserError, match="ValueError: state/manifest.ocdbt is missing"):
        with Checkpoints(tmp_path / "a[1]", keep=1) as checkpoints:
            save(checkpoints, 1)


def test_checkpoint_that_is_gone_is_not_saved(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        save(checkpoints, 1)
        while not (tmp_path / "1").exists():
            time.sleep(0.01)
        shutil.rmtree(tmp_path / "1")
        with rejected("*update 1", problem="sha256.json is missing"):
            checkpoints.wait()
    folder = tmp_path / "lost"
    with rejected(f"*{folder},", problem="no longer exists", remedy="put it back and start"):
        with Checkpoints(folder, keep=3) as checkpoints:
            shutil.rmtree(folder)
            save(checkpoints, 1)
    assert not folder.exists()


def test_unwritable_folder_is_reported_before_any_save(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(file: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", fsync)
    problem = "cannot be written (Read-only file system)"
    with rejected(tmp_path, problem=problem, remedy="there is no checkpoint yet"):
        Checkpoints(tmp_path, keep=1)
    Checkpoints(tmp_path, keep=1, writes=False).close()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/checkpoints cannot be written .Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep=1)


@pytest.mark.parametrize("name", ["lr[0.1]", "a*b?", "]"])
def test_path_that_is_a_pattern(tmp_path: pathlib.Path, name: str) -> None:
    folder = tmp_path / name
    with Checkpoints(folder, keep=2) as checkpoints:
        save(checkpoints, 1, 2, 3)
    assert sorted(os.listdir(folder)) == ["2", "3"] and latest(folder) == (3, [])
    with Checkpoints(folder, 2, writes=False) as checkpoints:
        actual = checkpoints.restore_part(3, {"weights": ABSTRACT["weights"]})
        tiny.assert_equal(actual["weights"], state(3)["weights"])
        link = checkpoints._path
        assert link.is_symlink()
    assert not link.parent.exists()


def test_shapes_of_nothing(tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path / "new", keep=1) as checkpoints:
        assert checkpoints.latest_shapes() is None


def test_bucket_that_vanishes_leaves_a_sentence(
    bucket: gcs.Store, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = buckets.parse("gs://bucket/run/checkpoints", "--workdir")
    with Checkpoints(folder, keep=10) as checkpoints:
        save(checkpoints, 200)
        checkpoints.wait()
        capfd.readouterr()
        bucket.reject = lambda method, name: 404
        output = (
            "cannot be (saved|written).*; make the bucket writable, then start the same command "
            "again: the checkpoint of update 200 no longer exists"
        )
        with pytest.raises(UserError, match=output):
            save(checkpoints, 300)
            checkpoints.wait()
    time.sleep(0.5)  # threads of Orbax may still fail
    assert "Traceback" not in capfd.readouterr().err


def test_many_damaged_checkpoints_are_reported_in_a_few_lines(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    steps = Checkpoints.steps
    monkeypatch.setattr(Checkpoints, "steps", lambda self: listed.append(1) or steps(self))
    for step in range(11, 51):
        shutil.copytree(folder / "5", folder / str(step))
        (folder / str(step) / checksums.NAME).write_text("{}")
    lines: list[str] = []
    with Checkpoints(folder, 10, lines.append) as checkpoints:
        actual = checkpoints.restore_latest(ABSTRACT)
    assert actual is not None and int(actual[0]["step"]) == 5 and len(lines) == 6
    assert lines[-1] == "the 38 checkpoints before it are tried without a message for each"
    assert len(listed) == 1  # the folder is listed only once


def test_pipe_or_device_in_place_of_a_file(folder: pathlib.Path) -> None:
    """Reading a device would fill the memory, and reading a pipe would wait forever."""
    checksum = folder / "5" / checksums.NAME
    checksum.unlink()
    os.mkfifo(checksum)
    with Checkpoints(folder, 10, lambda line: None) as checkpoints:
        with rejected("*", problem="is a pipe, not a file"):
            checkpoints.restore(5, ABSTRACT)
    metadata = folder / "5" / "_CHECKPOINT_METADATA"  # which Orbax reads to list the checkpoints
    assert metadata.is_file()
    metadata.unlink()
    metadata.symlink_to("/dev/zero")
    with rejected(metadata, problem="is a device, not a file", remedy="remove that checkpoint"):
        Checkpoints(folder, 10)

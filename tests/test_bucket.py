"""Tests that runs in a bucket equal runs on a disk, even if killed, and that other commands read them."""

import json
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Sequence

import pytest
from ml_collections import ConfigDict

from lamb_tpu.compare import read
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.export import export
from lamb_tpu.files import buckets, leases, uploads
from lamb_tpu.predict import predict
from lamb_tpu.store import checksums
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.train import train
from tests import gcs, test_kill, tiny
from tests.test_resume import close

RUN = "gs://bucket/runs/digits"
History = Sequence[tuple[str, bytes | None]]


def records(workdir: str | pathlib.Path) -> list[dict]:
    path = buckets.parse(workdir, "--workdir") / "metrics.jsonl"
    return [tiny.untimed(record) for record in read_records(path)]


def check(bucket: gcs.Store, trained: pathlib.Path) -> None:
    tiny.same_state(tiny.digits(), RUN, trained)
    assert records(RUN) == records(trained)
    assert (trained / "parameters.txt").read_text() == bucket.text("runs/digits/parameters.txt")
    checkpoints = buckets.parse(f"{RUN}/checkpoints", "")
    for step in (4, 8, 12):
        assert checksums.find_damage(checkpoints / str(step)) is None
    assert "runs/digits/.lock" not in bucket.blobs
    assert not (tiny.ROOT / "gs:").exists()


@pytest.fixture(scope="module")
def history(_bucket_server: gcs.Store) -> History:
    """Returns the writes of a run that uploads each record at once, except the writes of the lock."""
    _bucket_server.clear()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(uploads, "_SECONDS", 0)
        monkeypatch.setattr(uploads, "_REST", 0)
        train(tiny.digits(), RUN, quiet=True)
    return [(name, data) for name, data in _bucket_server.history if not name.endswith(".lock")]


def when(history: History, name: str) -> int:
    """Returns the number of writes before the first write of an object."""
    return next(n for n, (written, _) in enumerate(history) if written.endswith(name))


def test_run_is_the_one_on_a_disk(
    bucket: gcs.Store, history: History, trained: pathlib.Path
) -> None:
    bucket.replay(history)
    check(bucket, trained)
    # Start again: the complete run is only evaluated.
    before = dict(bucket.blobs)
    train(tiny.digits(), RUN, quiet=True)
    assert {name: blob.data for name, blob in bucket.blobs.items()} == {
        name: blob.data for name, blob in before.items()
    }


# Moments at which the run is killed: only the writes so far remain.
MOMENTS = {
    "before the receipt": lambda history: when(history, "run.jsonl"),
    "before the first checkpoint": lambda history: when(history, "checkpoints/4/md5.json") - 3,
    "between two checkpoints": lambda history: when(history, "checkpoints/8/state/_METADATA") - 4,
    "in a save": lambda history: when(history, "checkpoints/8/state/manifest.ocdbt"),
    "before a save is complete": lambda history: when(history, "checkpoints/8/commit_success.txt"),
    "after a save": lambda history: when(history, "checkpoints/8/commit_success.txt") + 1,
    "at the end": lambda history: len(history) - 1,
}


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_run_goes_on(
    bucket: gcs.Store,
    history: History,
    trained: pathlib.Path,
    moment: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bucket.replay(history[: MOMENTS[moment](history)])
    committed = Workdir(RUN).has_checkpoint()
    train(tiny.digits(), RUN)
    assert ("resumed from the checkpoint" in capsys.readouterr().out) == committed
    check(bucket, trained)


@pytest.mark.long
def test_old_checkpoints_are_removed_and_damage_is_detected(
    bucket: gcs.Store, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny.digits(
        checkpoint__keep=2,
        log__tensorboard=True,
        log__mlperf=True,
        target__metric="accuracy",
        target__value=1.0,
    )
    train(config, RUN, quiet=True)
    there = {name.split("/")[0] for name in bucket.names("runs/digits/checkpoints/")}
    assert there == {"8", "12"}
    assert len(bucket.names("runs/digits/tensorboard/events.out")) == 1
    assert '"run_stop"' in bucket.text("runs/digits/mlperf.log")
    # The lines up to a checkpoint are written before the checkpoint is complete.
    before = bucket.history[: when(bucket.history, "checkpoints/8/commit_success.txt")]
    assert b'"eval_stop"' in dict(before)["runs/digits/mlperf.log"]
    # A rewritten object is detected even if it has the same length.
    name = next(name for name in bucket.blobs if "checkpoints/12/state/d/" in name)
    bucket.write(name, bytes(len(bucket.blobs[name].data)))
    assert evaluate_checkpoint(None, RUN)["step"] == 8
    assert f"{name.partition('/12/')[2]} has changed since it was written" in tiny.unbroken(
        capsys.readouterr().err
    )


@pytest.mark.long
def test_checkpoints_can_be_copied_to_a_disk_and_back(
    bucket: gcs.Store, history: History, trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bucket.replay(history)
    for name in bucket.names("runs/digits/"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bucket.blobs[f"runs/digits/{name}"].data)
    metrics = evaluate_checkpoint(None, tmp_path)
    assert metrics == evaluate_checkpoint(None, trained) == evaluate_checkpoint(None, RUN)
    bucket.clear()
    for path in trained.rglob("*"):
        if path.is_file():
            bucket.write(f"runs/digits/{path.relative_to(trained)}", path.read_bytes())
    assert evaluate_checkpoint(None, RUN) == metrics
    damaged = tmp_path / "checkpoints" / "12" / "position" / "data.json"
    damaged.write_bytes(damaged.read_bytes() + b" ")
    assert checksums.find_damage(tmp_path / "checkpoints" / "12") is not None


@pytest.mark.long
def test_other_commands_read_it(
    bucket: gcs.Store, history: History, trained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    bucket.replay(history)
    first, second = read([RUN, str(trained)])
    assert first.name == "gs/bucket/runs/digits" and first.evaluations != []
    assert first.points("accuracy")[-1][1] == second.points("accuracy")[-1][1]
    assert read([RUN])[0].name == "digits"
    # Another run in the bucket starts from the weights of this run.
    train(tiny.digits(init_from=RUN, duration="1 steps"), "gs://bucket/runs/next", quiet=True)
    assert json.loads(bucket.text("runs/next/init.json"))["init_from"] == RUN
    with pytest.raises(UserError, match="^--output gs://bucket/x is remote; give a local path"):
        export(RUN, "gs://bucket/x")


@pytest.mark.long
def test_figure_of_the_layers(bucket: gcs.Store) -> None:
    train(tiny.digits(optimizer__collect=True, duration="4 steps"), RUN, quiet=True)
    done = tiny.command("lamb_tpu.plots", f"--workdir={RUN}")
    assert (done.returncode, done.stdout.strip()) == (0, f"{RUN}/curves.png\n{RUN}/layers.png"), (
        done.stderr
    )
    assert bucket.blobs["runs/digits/layers.png"].data.startswith(b"\x89PNG")


@pytest.mark.long
def test_phases(bucket: gcs.Store) -> None:
    config = tiny.digits(duration="4 steps", eval__every="4 steps")
    tiny.change(
        config,
        {"phases": ConfigDict({"phase_1": {"batch_size": 32}, "phase_2": {"batch_size": 64}})},
    )
    train(config, RUN, quiet=True)
    # Make the last checkpoint of phase 2 incomplete.
    bucket.delete("runs/digits/phase_2/checkpoints/4/commit_success.txt", {})
    written = len(bucket.history)
    train(config, RUN, quiet=True)
    assert "runs/digits/phase_2/checkpoints/4/commit_success.txt" in bucket.blobs
    assert not [n for n, _ in bucket.history[written:] if "phase_1/checkpoints" in n]


@pytest.mark.long
def test_a_language_model_there(
    bucket: gcs.Store, pretrained: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    for path in pretrained.rglob("*"):
        if path.is_file():
            bucket.write(f"bert/{path.relative_to(pretrained)}", path.read_bytes())
    text = "the [MASK] is here"
    assert predict("gs://bucket/bert", text) == predict(str(pretrained), text)
    for source, output in (("gs://bucket/bert", "a"), (pretrained, "b")):
        export(source, tmp_path / output)
    assert tiny.fingerprint(tmp_path / "a") == tiny.fingerprint(tmp_path / "b")
    bucket.write("bert/model.safetensors", b"")
    with pytest.raises(UserError, match="gcloud storage cp -r gs://bucket/bert .$"):
        predict("gs://bucket/bert", text)


def test_errors(bucket: gcs.Store) -> None:
    with pytest.raises(UserError, match="^--workdir gs://nowhere/x: there is no bucket nowhere"):
        train(tiny.digits(), "gs://nowhere/x", quiet=True)
    with pytest.raises(UserError, match="^RUN gs://nowhere/x: there is no bucket nowhere"):
        read(["gs://nowhere/x"])
    with pytest.raises(UserError, match="^RUN gs://bucket/x holds no run: config.json is missing"):
        read(["gs://bucket/x"])
    with pytest.raises(UserError, match="^--workdir gs://bucket/x holds no run: config.json is mi"):
        evaluate_checkpoint(None, "gs://bucket/x")
    bucket.reject = lambda method, name: 403 * (method == "POST")
    printed = r"^--workdir gs://bucket/x cannot be written \(no permission: .*rejected\); give another folder"
    with pytest.raises(UserError, match=printed):
        train(tiny.digits(), "gs://bucket/x", quiet=True)
    assert not bucket.blobs


@pytest.mark.long
def test_bucket_that_is_lost_ends_the_run(bucket: gcs.Store, trained: pathlib.Path) -> None:
    def reject(method: str, name: str) -> int:
        return 403 * (method == "POST" and "checkpoints/8/state" in name)

    bucket.reject = reject
    printed = r"of update 8 cannot be saved in .* \(no permission.*\); see .* of update 4 is safe"
    with pytest.raises(UserError, match=printed):
        train(tiny.digits(), RUN, quiet=True)
    bucket.reject = lambda method, name: 0
    train(tiny.digits(), RUN, quiet=True)
    check(bucket, trained)


@pytest.mark.long
def test_run_that_has_lost_its_lock_ends(
    bucket: gcs.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_RENEW_SECONDS", 0.01)

    def take_away(method: str, name: str) -> int:
        if method == "POST" and "checkpoints/4/state" in name:
            bucket.blobs.pop("runs/digits/.lock", None)
        return 0

    bucket.reject = take_away
    with pytest.raises(UserError, match="^the lock .*/.lock was removed or taken over, so another"):
        train(tiny.digits(), RUN, quiet=True)
    assert "runs/digits/checkpoints/12/commit_success.txt" not in bucket.blobs


ARGUMENTS = [*test_kill.ARGUMENTS, "--config.duration=200 steps"]


@pytest.mark.long
def test_processes_that_are_killed(bucket: gcs.Store, tmp_path: pathlib.Path) -> None:
    tiny.succeed("lamb_tpu.train", *ARGUMENTS, f"--workdir={tmp_path}")
    for step, number in ((30, signal.SIGKILL), (60, signal.SIGTERM), (120, signal.SIGKILL)):
        process = tiny.start("lamb_tpu.train", *ARGUMENTS, f"--workdir={RUN}")
        while f"runs/digits/checkpoints/{step}/commit_success.txt" not in bucket.blobs:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        if step == 30:  # no other run may start while this one runs
            process.send_signal(signal.SIGSTOP)
            second = tiny.command("lamb_tpu.train", *ARGUMENTS, f"--workdir={RUN}")
            assert second.returncode == 2 and "is in use by another run" in second.stderr
        process.send_signal(number)
        process.communicate(timeout=120)
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: os.EX_TEMPFAIL}[number]
        assert ("runs/digits/.lock" in bucket.blobs) == (number == signal.SIGKILL)
    tiny.succeed("lamb_tpu.train", *ARGUMENTS, f"--workdir={RUN}")
    assert records(RUN) == records(tmp_path)
    names = bucket.names("runs/digits/checkpoints/200/")
    shutil.rmtree(tmp_path / "checkpoints" / "200")
    for name in names:
        file = tmp_path / "checkpoints" / "200" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bucket.blobs[f"runs/digits/checkpoints/200/{name}"].data)
    actual, expected = (evaluate_checkpoint(None, path) for path in (RUN, tmp_path))
    assert actual == expected


@pytest.mark.long
def test_two_processes(bucket: gcs.Store, trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tiny.launched(2, 4, tiny.recipe(tmp_path), f"--workdir={RUN}")
    assert not (tiny.ROOT / "gs:").exists()
    config = tiny.digits()
    actual, expected = (tiny.restored(config, workdir)[0] for workdir in (RUN, trained))
    close(tiny.arrays(actual), tiny.arrays(expected))
    assert [r["step"] for r in records(RUN)] == [r["step"] for r in records(trained)]

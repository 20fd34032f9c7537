"""Tests branches of a small run: records, repeated commands, and rejected runs."""

import json
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu.batching.critical import excess
from lamb_tpu.critical_batch import measuring
from lamb_tpu.critical_batch.branch import Branches
from lamb_tpu.critical_batch.choices import StudyRequest
from lamb_tpu.critical_batch.measuring import RECORDS, measure
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir
from tests import tiny
from tests.raising import rejected

REQUEST = StudyRequest("4 steps", factors="1,2", span="8 steps")


def count(monkeypatch: pytest.MonkeyPatch, stop: int = 99) -> list[tuple[int, int, int]]:
    """Collects the branches that are trained after this call; interrupts after `stop` branches."""
    trained: list[tuple[int, int, int]] = []
    losses = Branches.losses

    def counted(self: Branches, start: int, factor: int, seed: int, *rest: Any) -> list[float]:
        if len(trained) == stop:
            raise KeyboardInterrupt
        trained.append((start, factor, seed))
        return losses(self, start, factor, seed, *rest)

    monkeypatch.setattr(Branches, "losses", counted)
    return trained


def test_a_branch_is_trained_once(copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny.fingerprint(copy)
    request = REQUEST._replace(seeds=2)
    trained = count(monkeypatch, stop=3)
    with pytest.raises(KeyboardInterrupt):
        measure(None, str(copy), request)
    assert trained == [(4, 1, 0), (4, 2, 0), (4, 1, 1)]
    monkeypatch.undo()
    trained = count(monkeypatch)
    outcome = measure(None, str(copy), request)
    assert trained == [(4, 2, 1)]
    records = read_records(copy / RECORDS)
    assert len(records) == 4 and {record["rate_factor"] for record in records} == {1.0}
    # The first record is the run itself, which was evaluated at its end.
    end = read_records(copy / "metrics.jsonl", "eval")[-1]["loss"]
    assert records[0]["at"][-1] == 8 and records[0]["losses"][-1] == end
    means = [sum(record["losses"]) / 2 for record in records]
    [row] = outcome.rows
    assert row.excesses == [
        excess([means[0], means[2]], [means[0], means[2]]),
        excess([means[1], means[3]], [means[0], means[2]]),
    ]
    # In this short run, half the number of updates at the same learning rate gives a higher loss.
    assert 0.015 < row.excesses[1].mean < 0.025
    crossing = 64 * 2 ** (0.01 / row.excesses[1].mean)
    assert row.critical == (64, pytest.approx(crossing), True)
    # With another tolerance or fewer seeds, all branches have records; with another rule, none has.
    wide = measure(None, str(copy), request._replace(tolerance=10.0))
    assert wide.rows[0].critical == (128, 128.0, False)
    measure(None, str(copy), REQUEST)
    assert trained == [(4, 2, 1)]
    measure(None, str(copy), REQUEST._replace(scaling="linear"))
    assert trained[1:] == [(4, 1, 0), (4, 2, 0)]
    assert [r["rate_factor"] for r in read_records(copy / RECORDS)[4:]] == [1.0, 2.0]
    # The run has not changed.
    after = tiny.fingerprint(copy)
    assert {path: after[path] for path in before} == before


def test_another_split(copy: pathlib.Path) -> None:
    own = measure(None, str(copy), REQUEST)
    of_train = measure(None, str(copy), REQUEST._replace(split="train[:64]"))
    assert of_train.study.split == "train[:64]" and own.study.split == "test"
    own_records, other = (read_records(copy / RECORDS)[part] for part in (slice(2), slice(2, 4)))
    assert [record["split"] for record in other] == ["train[:64]"] * 2
    assert own_records[0]["losses"] != other[0]["losses"]
    assert json.loads((copy / "config.json").read_text())["data.eval_split"] == "test"
    with rejected(
        "config.data: split 'tset' of data set digits", ..., "is not valid (Unknown split"
    ):
        measure(None, str(copy), REQUEST._replace(split="tset"))


def test_noise_scale_of_the_nearest_record(copy: pathlib.Path) -> None:
    assert measure(None, str(copy), REQUEST).rows[0].noise_scale is None
    records = read_records(copy / "metrics.jsonl")
    for record in records:
        if record["kind"] == "train" and record["step"] in (3, 8):
            record["noise_scale"] = {3: 300.0, 8: "inf"}[record["step"]]
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    outcome = measure(None, str(copy), REQUEST)
    assert outcome.noise == [(3, 300.0), (8, math.inf)]
    assert outcome.rows[0].noise_scale == 300.0


def test_branches_that_diverge(copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = {1: [0.5, 0.5], 2: [math.nan, 0.5]}

    def losses(
        self: Branches, start: int, factor: int, seed: int, at: Any, measure: Any, trained: Any
    ) -> list[float]:
        trained(512)
        return actual[factor]

    monkeypatch.setattr(Branches, "losses", losses)
    for _ in range(2):  # measured, then read again
        [row] = measure(None, str(copy), REQUEST).rows
        assert row.critical == (64, 64.0, True) and row.excesses[1].mean == math.inf
    assert read_records(copy / RECORDS)[1]["losses"] == ["nan", 0.5]
    actual[1] = [0.5, math.inf]
    with rejected("--at", "4 steps", "with a loss of inf"):
        measure(None, str(copy), REQUEST._replace(scaling="linear"))


def test_only_one_command_at_a_time(copy: pathlib.Path) -> None:
    with Workdir(copy).hold():
        with pytest.raises(UserError, match="is in use by another run; wait until it ends"):
            measure(None, str(copy), REQUEST)


def without_checkpoints(folder: pathlib.Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def of_phases(folder: pathlib.Path) -> None:
    (folder / "phase_1").mkdir()
    (folder / "metrics.jsonl").rename(folder / "phase_1" / "metrics.jsonl")


def damaged(folder: pathlib.Path) -> None:
    (folder / "checkpoints" / "4" / "state" / "manifest.ocdbt").unlink()


@pytest.mark.parametrize(
    "change, message",
    [
        (without_checkpoints, "has no checkpoint yet"),
        (of_phases, "holds the phases phase_1; give the folder of one phase"),
        (shutil.rmtree, "holds no run: config.json is missing"),
        (damaged, "the checkpoint of update 4 .* cannot be read .state/manifest.ocdbt is missing"),
    ],
)
def test_rejected_folders(
    copy: pathlib.Path, change: Callable[[pathlib.Path], None], message: str
) -> None:
    change(copy)
    with pytest.raises(UserError, match=message):
        measure(None, str(copy), REQUEST)
    assert not (copy / RECORDS).exists()


def test_rejected_before_compilation(copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "make_evaluator", None)
    with rejected("--at", "1 steps", "is update 1, far from the checkpoints at"):
        measure(None, str(copy), REQUEST._replace(at="1 steps"))
    with pytest.raises(UserError, match="holds a run of another config .seed: 0 there, 1 now"):
        measure(tiny.digits(seed=1), str(copy), REQUEST)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with rejected("--num-processes", 2, "is more than the single process that branches need"):
        measure(None, str(copy), REQUEST)


def of_streams(folder: pathlib.Path) -> ConfigDict:
    return tiny.words(tiny.text(folder / "text"))


def under_agvm(folder: pathlib.Path) -> ConfigDict:
    fields = {"modules": (("body", "^hidden"), ("head", ""))}
    return tiny.change(tiny.digits(accumulation_steps=2), {"optimizer.agvm": fields})


def with_a_changing_batch(folder: pathlib.Path) -> ConfigDict:
    return tiny.digits(batch_rule=ConfigDict({"name": "ramp", "points": ((0, 64), (128, 128))}))


@pytest.mark.parametrize(
    "settings, problem",
    [
        (of_streams, "a branch at another batch size would read different"),
        (under_agvm, "under config.optimizer.agvm"),
        (with_a_changing_batch, "batch size follows config.batch_rule='ramp'"),
    ],
)
def test_rejected_runs(
    tmp_path: pathlib.Path, settings: Callable[[pathlib.Path], ConfigDict], problem: str
) -> None:
    folder = tmp_path / "run"
    tiny.save(settings(tmp_path), folder)
    (folder / "metrics.jsonl").touch()
    with rejected(f"--workdir {folder}", ..., problem):
        measure(None, str(folder), REQUEST)

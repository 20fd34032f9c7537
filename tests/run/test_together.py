"""Seeds side by side give the same runs, records and checkpoints as separate runs."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import Interrupted, Preempted, UserError
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.run import holding, together
from lamb_tpu.run.build import prepare
from lamb_tpu.train import train, train_together
from lamb_tpu.watch.guards import Diverged
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT
from tests.raising import rejected
from tests.run import test_calls
from tests.run.test_calls import same_end
from tests.test_train import Interrupted as Killed
from tests.test_train import checkpoints, diverging, interrupt_at, without_seconds

SEEDS = (0, 3)
TIMES = {"duration": "20 steps", "checkpoint__every": "8 steps", "eval__every": "10 steps"}
MODES: dict[str, dict[str, Any]] = {
    "one update": {},
    "calls": {"loop__updates_per_call": 5, "log__every": "5 steps"},
    "dropout": {"model": DROPOUT, "ema__decay": 0.9},
    "batch norm": {"model": BATCH_NORM, "accumulation_steps": 2},
    "shard_map": {"parallel__backend": "shard_map", "guards__max_skipped": 3},
    "zero1": {
        "parallel__backend": "shard_map",
        "parallel__optimizer_state": "zero1",
        "mesh__data": 2,
        "mesh__fsdp": 4,
    },
    "jit zero1": {"parallel__optimizer_state": "zero1"},
    "powersgd": test_calls.MODES["residual"],
    "statistics": {
        "parallel__backend": "shard_map",
        "statistics__halves": True,
        "statistics__per_example": 8,
        "statistics__interval": 7,
    },
}


def config_of(seed: int | None = None, **changes: Any) -> ConfigDict:
    """Returns the config of one seed, or of all seeds if `seed` is None."""
    return tiny.digits(**{**TIMES, **changes, **which(seed)})


def which(seed: int | None) -> dict[str, Any]:
    """Returns the config key and value for one seed, or for all seeds if `seed` is None."""
    return {"seeds": ", ".join(map(str, SEEDS))} if seed is None else {"seed": seed}


def close(actual: Any, expected: Any, limit: float) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("mode", some(MODES, ("one update", "calls")))
def test_seeds_equal_separate_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, mode: str, batched: bool
) -> None:
    """States agree to 1e-5 after 20 updates if operations are merged, otherwise bit for bit."""
    monkeypatch.setattr(step_lib, "is_batched", lambda mesh: batched)
    compare(tmp_path, lambda seed: config_of(seed, **MODES[mode]), 1e-5 if batched else 0)


def compare(folder: pathlib.Path, make: Callable[..., ConfigDict], limit: float) -> None:
    """Trains the seeds side by side and separately, and compares their states and checkpoints."""
    train(make(None), folder, quiet=True)
    for seed in SEEDS:
        actual, alone = folder / f"seed_{seed}", folder / "alone" / str(seed)
        train(make(seed), alone, quiet=True)
        (state, _), (wanted, _) = (tiny.restored(make(seed), each) for each in (actual, alone))
        assert int(state.step) == 20
        close(state, wanted, limit)
        assert checkpoints(actual) == checkpoints(alone) == [8, 16, 20]


@pytest.mark.long
def test_images(tmp_path: pathlib.Path) -> None:
    """Tests only separate operations: rounding in merged operations can change max-pooling's choice."""
    compare(tmp_path, lambda seed: config_of(seed, model=ConfigDict({"name": "lenet"})), 0)


@pytest.mark.long
@pytest.mark.parametrize("batched", [True, False])
def test_each_run_has_its_recurrent_state(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    monkeypatch.setattr(step_lib, "is_batched", lambda mesh: batched)
    folder = tiny.text(tmp_path)
    compare(
        tmp_path / "runs",
        lambda seed: tiny.words(folder, **TIMES, **which(seed)),
        1e-5 if batched else 0,
    )


def test_the_training_set_is_sent_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    hold = holding.hold
    monkeypatch.setattr(holding, "is_held", lambda run: True)
    monkeypatch.setattr(holding, "hold", lambda run: sent.append(run) or hold(run))
    train(config_of(), tmp_path / "held", quiet=True)
    assert len(sent) == 1
    monkeypatch.undo()
    train(config_of(), tmp_path / "sent", quiet=True)
    for seed in SEEDS:
        folders = [tmp_path / each / f"seed_{seed}" for each in ("held", "sent")]
        same_end(*folders, config_of(seed))


def test_a_group_resumes_bit_for_bit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is killed, one run loses a checkpoint and catches up, and a signal ends the group."""
    uninterrupted, workdir = tmp_path / "whole", tmp_path / "pieces"
    train(config_of(), uninterrupted, quiet=True)
    interrupt_at(monkeypatch, 13, "train")
    with pytest.raises(Killed):
        train(config_of(), workdir, quiet=True)
    shutil.rmtree(workdir / "seed_3" / "checkpoints" / "8")
    with monkeypatch.context() as patch:
        tiny.preempt_at(patch, 5)
        with pytest.raises(Preempted, match="^preempted at update"):
            train(config_of(), workdir, quiet=True)
    train(config_of(), workdir, quiet=True)
    for seed in SEEDS:
        folders = [each / f"seed_{seed}" for each in (workdir, uninterrupted)]
        same_end(*folders, config_of(seed))


def test_all_runs_save_on_a_signal(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives between the polls of two runs at the same update."""
    polls = 0
    poll = together.Preemption.poll

    def counted(self: Any) -> None:
        nonlocal polls
        polls += 1
        if polls == 8:  # the second run's poll after three updates
            self._noticed = self._interrupted = True
        poll(self)

    monkeypatch.setattr(together.Preemption, "poll", counted)
    with pytest.raises(Interrupted, match="^interrupted at update 3, saved"):
        train(config_of(), tmp_path, quiet=True)
    assert [checkpoints(tmp_path / f"seed_{seed}") for seed in SEEDS] == [[3], [3]]


def test_a_run_that_diverges_leaves_the_others_alone(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [diverging(1e20), config_of(3)]
    # Runs with different settings need separate programs.
    monkeypatch.setattr(together.Call, "key", property(lambda call: (call.step, id(call))))
    diverged, metrics = train_together(configs, [tmp_path / "a", tmp_path / "b"], quiet=True)
    assert isinstance(diverged, Diverged) and "at update" in str(diverged)
    assert isinstance(metrics, dict) and "accuracy" in metrics
    assert checkpoints(tmp_path / "b") == [8, 16, 20]


def test_the_error_names_the_seeds_that_diverged(tmp_path: pathlib.Path) -> None:
    config = diverging(1e20, seeds="0:3")
    with pytest.raises(Diverged, match="^the run of seed 0: .* more failed seeds: 1, 2$"):
        train(config, tmp_path, quiet=True)


def test_runs_end_at_their_targets(tmp_path: pathlib.Path) -> None:
    target = {
        "eval__every": "1 steps",
        "duration": "60 steps",
        "target__metric": "accuracy",
        "target__value": 0.6,
    }
    train(config_of(**target), tmp_path, quiet=True)
    ends = []
    for seed in SEEDS:
        train(config_of(seed, **target), tmp_path / str(seed), quiet=True)
        folders = [tmp_path / str(seed), tmp_path / f"seed_{seed}"]
        assert without_seconds(folders[0]) == without_seconds(folders[1])
        ends.append(checkpoints(folders[1])[-1])
    assert len(set(ends)) == 2


def test_means_and_messages(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = train(config_of(), tmp_path)
    output = capsys.readouterr().out
    alone = [train(config_of(seed), tmp_path / f"seed_{seed}") for seed in SEEDS]
    for name, value in metrics.items():
        assert value == pytest.approx(np.mean([each[name] for each in alone]))
    assert "means over 2 seeds: accuracy 0." in output
    assert output.count("learning rate: peak") == 1
    for seed in SEEDS:
        assert f"\nseed {seed}: update 20 (epoch 5): accuracy" in output


@pytest.mark.parametrize("text", ["5", "5:5", "5:3", "a:b", "1,1", "0:65", "1, ,2", "-1:2", ":3"])
def test_wrong_seeds(text: str) -> None:
    if text == "5":
        assert together.parse(text) == [5]
        return
    with rejected("config.seeds", text, "is not a list of 1 to", "use FIRST:END, such as"):
        together.parse(text)


def test_seeds_beyond_the_largest() -> None:
    with rejected("config.seeds", "4294967296, 1", "is out of range", "at most 4294967295"):
        together.parse("4294967296, 1")


@pytest.mark.parametrize(
    "changes, problem",
    [
        (
            {"phases": ConfigDict({"a": {"duration": "1 steps"}})},
            "cannot be combined with config.phases (a)",
        ),
        (
            {"batch_rule": {"name": "ramp", "points": ((0, 64),)}},
            "under config.batch_rule.name='ramp' the host adds up the",
        ),
    ],
)
def test_runs_that_cannot_share_a_program(
    tmp_path: pathlib.Path, changes: dict[str, Any], problem: str
) -> None:
    with rejected("config.seeds", "0, 3", problem, "use ''"):
        train(config_of(**changes), tmp_path)
    assert not list(tmp_path.iterdir())


def test_folders_of_runs_are_not_mixed_up(tmp_path: pathlib.Path) -> None:
    with rejected("config.seeds", "0, 3", "stands for several runs, each in a folder seed_N"):
        prepare(config_of(), tmp_path)
    train(config_of(0), tmp_path, quiet=True)
    with rejected(
        f"--workdir {tmp_path}", problem="has the checkpoints of a run with a single seed"
    ):
        train(config_of(), tmp_path)
    train(config_of(), tmp_path / "seeds", quiet=True)
    with pytest.raises(UserError, match="seeds"):
        train(config_of(0), tmp_path / "seeds")
    # Seeds may be added to a complete run.
    with_more = tiny.digits(**TIMES, seeds="0, 3, 4")
    train(with_more, tmp_path / "seeds", quiet=True)
    assert checkpoints(tmp_path / "seeds" / "seed_4") == [8, 16, 20]

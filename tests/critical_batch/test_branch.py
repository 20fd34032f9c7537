"""Compares branches at the run's batch size with the run, and larger batches with updates by hand."""

import dataclasses
import doctest
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.critical_batch import branch
from lamb_tpu.critical_batch.branch import Branches, default_scaling, measured_at, widened
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected


def of_run(run: Run, starts: list[int], factors: list[int], rule: str = "identity") -> Branches:
    checkpoints = Checkpoints(run.folder.checkpoints, 10, writes=False)
    return Branches(run, checkpoints, starts, factors, rule)


def measure_of(run: Run):
    evaluate = make_evaluator(run)
    return lambda state: evaluate(state)["loss"]


def test_docstrings() -> None:
    result = doctest.testmod(branch)
    assert result.failed == 0 and result.attempted >= 2


@pytest.mark.parametrize(
    "span, factors", [(64, [1, 2, 4, 8]), (56, [1, 2, 4, 8]), (24, [1, 2, 3]), (8, [1, 8])]
)
def test_every_factor_is_measured_at_the_same_examples(span: int, factors: list[int]) -> None:
    actual = measured_at(span, factors)
    assert actual[-1] == span and actual == sorted(set(actual)) and actual[0] >= 5 / 8 * span
    assert not [at for at in actual for factor in factors if at % factor]


@pytest.mark.parametrize(
    "optimizer, rule, expected",
    [
        ("lamb", "legw", "sqrt"),
        ("lamb", "random_matrix", "sqrt"),
        ("momentum", "random_matrix", "linear"),
        ("lars", "linear", "linear"),
        ("lars", "identity", "identity"),
    ],
)
def test_default_scaling(optimizer: str, rule: str, expected: str) -> None:
    assert default_scaling(rule, optimizer) == expected


def test_rate_is_the_schedules_at_the_same_examples(tmp_path: pathlib.Path) -> None:
    run = prepare(tiny.digits(duration="40 steps"), tmp_path)
    rate = run.recipe.learning_rates
    assert len(set(rate)) > 30
    wide = widened(run, [4, 20], 4, 1.5)
    assert (wide.spec.batch_size, wide.spec.accumulation_steps) == (256, 4)
    assert run.spec.batch_size == 64  # unchanged
    # The update count increases by one, the schedule by four.
    counts, positions = np.array([4, 5, 7, 20, 21, 24]), [4, 8, 16, 20, 24, 36]
    actual = np.array([float(wide.recipe.learning_rate(jnp.int32(count))) for count in counts])
    np.testing.assert_allclose(actual, 1.5 * rate[positions], rtol=1e-6)


def test_weight_decay_keeps_its_timescale(tmp_path: pathlib.Path) -> None:
    def recipe(folder: str, **changes: Any) -> Run:
        optimizer = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "rules": "all"}
        return prepare(
            tiny.digits(
                optimizer=ConfigDict(optimizer),
                duration="3 epochs",
                schedule__scaling="sqrt",
                schedule__base_batch_size=64,
                schedule__weight_decay_scaling="timescale",
                **changes,
            ),
            tmp_path / folder,
        )

    # The branch has the weight decay of a run at twice the batch size under the same rule.
    run, larger = recipe("a"), recipe("b", batch_size=128)
    actual = widened(run, [4], 2, math.sqrt(2)).recipe.weight_decay
    assert actual == pytest.approx(larger.recipe.weight_decay) != run.recipe.weight_decay
    plain = prepare(tiny.digits(), tmp_path / "c")
    assert widened(plain, [4], 2, 2.0).recipe.weight_decay is None


def test_at_the_runs_own_batch_a_branch_is_the_run(trained: pathlib.Path) -> None:
    run = prepare(tiny.digits(), trained)
    losses = of_run(run, [4, 8], [1]).losses(4, 1, 0, [2, 8], measure_of(run))
    records = read_records(trained / "metrics.jsonl", "eval")
    assert [record["step"] for record in records][-2:] == [6, 12]
    assert losses == [record["loss"] for record in records[-2:]]


@pytest.mark.long
def test_larger_batches_by_hand(tmp_path: pathlib.Path) -> None:
    settings = tiny.digits(
        optimizer=ConfigDict({"name": "sgd", "learning_rate": 0.1, "rules": "all"}),
        duration="16 steps",
        eval__every="16 steps",
    )
    train(settings, tmp_path, quiet=True)
    run = prepare(settings, tmp_path)
    rates = run.recipe.learning_rates
    states: list[TrainState] = []

    def measure(state: TrainState) -> float:
        states.append(jax.device_get(state.params))
        return float(state.step)

    counted: list[int] = []
    branches = of_run(run, [4], [1, 4], "linear")
    assert branches.rate_factors == {1: 1.0, 4: 4.0}
    assert branches.losses(4, 4, 0, [4, 12], measure, counted.append) == [5.0, 7.0]
    assert counted == [256] * 3
    with Checkpoints(run.folder.checkpoints, 10, writes=False) as checkpoints:
        first, _ = checkpoints.restore(4, run.abstract_state)
    params = jax.device_get(first.params)
    loader = data.TrainLoader(run.train_set, 256, settings.seed)
    loader.examples = 4 * 64

    def loss(params: Any, batch: Any) -> jax.Array:
        terms, _ = run.plain_task.loss(params, {}, batch, jax.random.key(0))
        return terms["cross_entropy"] / 256

    expected = []
    for update in range(3):
        grads = jax.grad(loss)(params, next(loader))
        rate = 4 * rates[4 + 4 * update]
        params = optax.apply_updates(params, jax.tree.map(lambda g: -rate * g, grads))
        expected.append(params)
    for actual, there in zip(states, (expected[0], expected[2]), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), actual, there)
    # All examples of the batch affect the result, including the last one.
    assert not np.allclose(states[1]["hidden0"]["kernel"], expected[1]["hidden0"]["kernel"])


def test_seeds_are_orders_of_the_examples(trained: pathlib.Path) -> None:
    run = prepare(tiny.digits(), trained)
    branches, measure = of_run(run, [4], [1, 2], "sqrt"), measure_of(run)
    losses = [branches.losses(4, 2, seed, [8], measure) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


class Recorded:
    """A source that records which examples are read; with `in_buckets`, examples have length classes."""

    def __init__(self, source: Any, in_buckets: bool) -> None:
        self._source, self.read = source, list[int]()
        self.buckets = np.arange(len(source)) % 3 if in_buckets else None

    def __len__(self) -> int:
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def gather(self, indices: np.ndarray, epochs: Any = None) -> Any:
        self.read += indices.tolist()
        return self._source.gather(indices, epochs)

    def trim(self, batch: Any, bucket: int) -> Any:
        return batch


@pytest.mark.parametrize("in_buckets", [False, True])
def test_all_batches_read_the_same_examples(trained: pathlib.Path, in_buckets: bool) -> None:
    run = prepare(tiny.digits(), trained)
    read = []
    for factor in (1, 2):
        source = Recorded(run.train_set, in_buckets)
        branches = of_run(dataclasses.replace(run, train_set=source), [4], [1, 2])
        branches.losses(4, factor, 0, [8], lambda state: 0.0)
        # Sort: a larger batch has its examples in the order of its microbatches.
        read.append([sorted(source.read[at : at + 128]) for at in range(0, 8 * 64, 128)])
    assert read[0] == read[1]
    # The batches are from two epochs with different orders.
    assert sorted(read[0][0] + read[0][1]) == list(range(256)) and read[0][0] != read[0][2]


def test_two_placements_agree(trained: pathlib.Path) -> None:
    actual = []
    for changes in ({}, {"parallel__backend": "shard_map", "parallel__optimizer_state": "zero1"}):
        run = prepare(tiny.digits(**changes), trained)
        actual += of_run(run, [4], [1, 2], "sqrt").losses(4, 2, 0, [8], measure_of(run))
    assert actual[0] == pytest.approx(actual[1], rel=1e-5)


def test_a_branch_that_diverges_is_an_outcome(trained: pathlib.Path) -> None:
    run = prepare(tiny.digits(), trained)
    branches = of_run(run, [4], [1, 2])
    branches._steps[2] = widened(run, [4], 2, 1e38).make_train_step()
    assert not math.isfinite(branches.losses(4, 2, 0, [8], measure_of(run))[0])


def test_models_that_need_the_whole_batch(custom_folder: pathlib.Path) -> None:
    from tests import custom_modules

    assert "in_a_list" in custom_modules.BROKEN["my_broken"]
    settings = tiny.digits()
    settings.model = ConfigDict({"name": "my_broken:in_a_list"})
    settings.optimizer = ConfigDict({"name": "sgd", "learning_rate": 0.1, "rules": "all"})
    run = prepare(settings, custom_folder / "run")
    with rejected("config.model", ..., ": the model has running statistics in 'calls/count'"):
        widened(run, [4], 2, 1.0)

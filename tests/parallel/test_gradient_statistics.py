"""Compares statistics of gradients in a step with statistics of separately computed gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import data
from lamb_tpu.batching import noise_scale
from lamb_tpu.batching.similarity import similarity
from lamb_tpu.parallel import accumulation
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.gradient_statistics import Statistics, check_second_moments
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, difference
from tests.parallel.test_changing import (
    GRANULARITY,
    PLACES,
    changing,
    prepared,
    start,
    taken,
    weighted,
)

MODULES = (("body", "^hidden"), ("rest", ""))
ALL = Statistics(noise_scale=True, preconditioned=True, halves=True, modules=MODULES)


def contributions(run: Run, state: TrainState, batches: list[Any]) -> Any:
    """Returns each example's share of the gradient times the number of examples, (examples, ...)."""
    batch = {
        name: np.concatenate([np.asarray(each[name]) for each in batches]) for name in batches[0]
    }
    task, rows = run.plain_task, len(next(iter(batch.values())))
    params, key, step = jax.device_get((state.params, jax.random.key_data(state.key), state.step))
    key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), step)
    weights = {name: jnp.asarray(weight) for name, weight in task.weights(batch).items()}

    def one(example: Any, position: jax.Array) -> Any:
        example = {name: value[None] for name, value in example.items()}
        grads, *_ = accumulation.gradients(task, params, {}, example, weights, key, position[None])
        return jax.tree.map(lambda g: rows * g, grads)

    return jax.device_get(jax.jit(jax.vmap(one))(batch, jnp.arange(rows, dtype=jnp.int32)))


def part_means(each: Any, parts: int) -> Any:
    return jax.tree.map(lambda g: g.reshape(parts, -1, *g.shape[1:]).mean(1, np.float64), each)


def expected_pair(each: Any, parts: int) -> noise_scale.Estimate:
    means = jax.tree.leaves(part_means(each, parts))
    examples = len(jax.tree.leaves(each)[0])
    small = sum(np.square(g).sum() for g in means) / parts
    large = sum(np.square(g.mean(0)).sum() for g in means)
    return noise_scale.estimate(small, large, examples / parts, examples)


def second(run: Run, counts: tuple[int, int], **options: Any) -> tuple[Any, TrainState, Any, Any]:
    """Makes two updates, of `counts[0]` and `counts[1]` microbatches.

    Returns of the second update: its sums, the state before, its microbatches, and the state after.
    """
    step, loader = changing(run, **options), data.TrainLoader(run.train_set, GRANULARITY, 0)
    first, then = (taken(run, loader, count) for count in counts)
    state, _ = step(start(run), first)
    kept = jax.tree.map(jnp.copy, state)
    after, sums = step(state, then, per_example=True)
    return jax.device_get(sums), kept, then, after


@pytest.mark.long
@pytest.mark.parametrize("place", some(PLACES, ("jit zero1", "shard_map zero1")))
def test_each_equals_its_reference(place: str) -> None:
    devices, changes = PLACES[place]
    run = prepared(devices, 2, model=DROPOUT, **changes)
    actual, state, batches, after = second(run, (2, 4), statistics=ALL)
    each = contributions(run, state, batches)
    named = "shard_map" in place
    parts = 4 * (devices if named else 1)
    values = {name: float(value) for name, (value, _) in actual.items()}
    pair = expected_pair(each, parts)
    assert values["noise_scale/grad_sq"] == pytest.approx(pair.grad_sq, rel=1e-4)
    assert values["noise_scale/trace"] == pytest.approx(pair.trace, rel=1e-4)

    moments = jax.device_get(state.opt_state.nu)
    flat = np.concatenate([v.ravel() for v in jax.tree.leaves(moments)])
    assert (flat == 0).any() and (flat > 0).any()  # 0 for weights of pixels that are always black
    fourth = jax.tree.map(
        lambda g, v: g * np.where(v > 0, np.where(v > 0, v / flat.mean(), 1) ** -0.25, 0),
        each,
        moments,
    )
    pair = expected_pair(fourth, parts)
    assert values["noise_scale/preconditioned_grad_sq"] == pytest.approx(pair.grad_sq, rel=1e-3)
    assert values["noise_scale/preconditioned_trace"] == pytest.approx(pair.trace, rel=1e-4)

    def half(odd: int) -> Any:
        # Parts have the order (microbatch, device). The halves split devices if there are several,
        # otherwise microbatches.
        return jax.tree.map(lambda g: g[odd::2].mean(0, np.float64), part_means(each, parts))

    cosines = similarity(half(0), half(1), dict(MODULES))
    assert cosines.keys() == {"similarity", "similarity/body", "similarity/rest"}
    for name, value in cosines.items():
        assert values[name] == pytest.approx(float(value), abs=2e-5)
    assert len({round(float(value), 3) for value in cosines.values()}) == 3
    # Statistics do not change the update: it equals that of a step without statistics.
    _, _, _, plain = second(run, (2, 4))
    assert difference(after, plain) < 1e-6


@pytest.mark.long
def test_weights_that_depend_on_examples() -> None:
    case = weighted(1.0, 4)
    p = np.asarray(case.first(jax.random.key(0), {}).params["p"], np.float64)
    x, y, w, v = (case.fields[name].astype(np.float64) for name in "xywv")
    each = 32 * (w * (x @ p - y) / w.sum() + v / v.sum())[:, None] * x
    taken_rows = each[:4]
    deviations = (taken_rows - taken_rows.mean(0)) @ each.mean(0)
    for backend, parts in ("jit", 4), ("shard_map", 8):
        statistics = Statistics(noise_scale=True, halves=True, per_example=4)
        step = ChangingStep(*case.arguments, backend, statistics=statistics)
        _, actual = step(case.first(jax.random.key(0), {}), case.batches, per_example=True)
        values = {name: float(value) for name, (value, _) in actual.items()}
        pair = expected_pair(each, parts)
        assert values["noise_scale/grad_sq"] == pytest.approx(pair.grad_sq, rel=1e-4)
        assert values["noise_scale/trace"] == pytest.approx(pair.trace, rel=1e-4)
        a, b = (part_means(each, parts)[odd::2].mean(0) for odd in (0, 1))
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        assert values["similarity"] == pytest.approx(cosine, abs=1e-5)
        assert values["variance"] == pytest.approx(taken_rows.var(0, ddof=1).sum(), rel=1e-4)
        assert values["inner_product_variance"] == pytest.approx(
            (deviations @ deviations) / 3, rel=1e-4
        )
        assert values["grad_sq"] == pytest.approx(np.square(each.mean(0)).sum(), rel=1e-4)


@pytest.mark.long
def test_updates_that_measure_nothing_have_no_weight() -> None:
    """Covers a single part, an odd number of microbatches, and second moments that are still 0."""
    run = prepared(1, 1, model=DROPOUT)
    step, loader = changing(run, statistics=ALL), data.TrainLoader(run.train_set, GRANULARITY, 0)
    state, weights = start(run), []
    for count in (1, 2, 3):
        state, sums = step(state, taken(run, loader, count))
        assert all(np.isfinite(float(value)) for value, _ in sums.values())
        weights.append({name: float(weight) for name, (_, weight) in sums.items()})
    names = (
        "noise_scale/trace",
        "noise_scale/preconditioned_trace",
        "similarity",
        "similarity/body",
    )
    assert [[each[name] for name in names] for each in weights] == [
        [0, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 0, 0],
    ]


@pytest.mark.long
def test_a_skipped_update_has_none() -> None:
    run = prepared(1, 1, model=DROPOUT)
    statistics = Statistics(noise_scale=True, halves=True, per_example=8)
    step = changing(run, statistics=statistics, skip_nonfinite=True)
    batches = taken(run, data.TrainLoader(run.train_set, GRANULARITY, 0), 2)
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), start(run).params)
    _, sums = step(dataclasses.replace(start(run), params=params), batches, per_example=True)
    pairs = {name: tuple(map(float, pair)) for name, pair in sums.items()}
    assert pairs.pop("skipped") == (1, 1)
    assert set(pairs.values()) == {(0.0, 0.0)} and len(pairs) > 8


@pytest.mark.long
def test_with_batch_norm() -> None:
    """Groups of BatchNorm lie within a part, so both backends measure the same."""
    values = []
    for devices, steps, changes in [(1, 8, {}), (8, 1, {"parallel__backend": "shard_map"})]:
        # 64 examples in 8 parts: microbatches of 8, or one microbatch over 8 devices.
        run = prepared(devices, steps, model=BATCH_NORM, **changes)
        size = GRANULARITY // steps
        step = changing(run, size, statistics=Statistics(noise_scale=True, halves=True))
        loader = data.TrainLoader(run.train_set, GRANULARITY, 0)
        batches = [rows_lib.shard_batch(loader.take(size), size, run.mesh) for _ in range(steps)]
        _, sums = step(start(run), batches)
        values.append({name: float(value) for name, (value, _) in sums.items()})
    for name in ("noise_scale/grad_sq", "noise_scale/trace", "similarity"):
        assert values[0][name] == pytest.approx(values[1][name], rel=1e-4)


def test_optimizers_without_second_moments() -> None:
    run = prepared(1, 1, model=DROPOUT)
    check_second_moments(run.abstract_state)
    for tx in (optax.sgd(0.1), optax.novograd(0.1), optax.chain(optax.adam(0.1), optax.adam(0.1))):
        state = jax.eval_shape(
            state_lib.make_init(run.task, tx, run.train_set.gather(np.zeros(1, np.int64))),
            jax.random.key(0),
        )
        with pytest.raises(ValueError, match="has second moments that do not match the parameters"):
            check_second_moments(state)


def test_which_updates_are_due() -> None:
    assert not Statistics() and not Statistics().is_due(99)
    statistics = Statistics(per_example=8, interval=3)
    assert statistics
    # Like `Rule.due`: after 3, 6, ... completed updates.
    assert [step for step in range(7) if statistics.is_due(step)] == [2, 5]
    assert [statistics.next_due(step) for step in range(5)] == [2, 2, 2, 5, 5]

"""Tests that updates from any number of microbatches equal those of one step for the full batch."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from lamb_tpu import data
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import changing as changing_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, LAMB, SHARD_MAP, ZERO1, WeightedSum, difference

GRANULARITY = 64
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "jit": (8, {}),
    "jit zero1": (8, ZERO1),
    "shard_map": (8, SHARD_MAP),
    "shard_map zero1": (8, SHARD_MAP | ZERO1),
}
NETS = {"batch_norm": BATCH_NORM, "dropout": DROPOUT}


def prepared(devices: int, steps: int, **changes: Any) -> Run:
    config = tiny.digits(
        batch_size=GRANULARITY * steps,
        accumulation_steps=steps,
        optimizer=LAMB,
        duration="40 steps",
        **changes,
    )
    return prepare(config, None, jax.devices()[:devices])


def start(run: Run) -> TrainState:
    return jax.jit(run.init, out_shardings=run.shardings)(jax.random.key(run.spec.seed), {})


def changing(run: Run, size: int = GRANULARITY, **options: Any) -> ChangingStep:
    return ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        run.abstract_rows(size, run.train_set.element_spec),
        run.spec.parallel.backend,
        parts=run.parts,
        **options,
    )


def taken(run: Run, loader: data.TrainLoader, count: int) -> list[dict[str, jax.Array]]:
    rows = rows_lib.local_rows(GRANULARITY, run.mesh)
    return [
        rows_lib.shard_batch(loader.take(GRANULARITY, rows), GRANULARITY, run.mesh)
        for _ in range(count)
    ]


def whole(run: Run, steps: int, before: int) -> tuple[TrainState, list[Any]]:
    """Returns the state and the sums after `steps` updates by the step for a constant batch size."""
    loader = data.TrainLoader(run.train_set, run.spec.batch_size, run.spec.seed, run.local_rows())
    loader.examples = before
    state, sums, step = start(run), [], run.make_train_step()
    for _ in range(steps):
        state, actual = step(state, run.shard_batch(next(loader)))
        sums.append(jax.device_get(actual))
    return state, sums


@pytest.mark.long
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("place", some(PLACES, ("jit", "shard_map zero1")))
def test_equals_one_step_for_the_full_batch(place: str, net: str) -> None:
    devices, changes = PLACES[place]
    run = prepared(devices, 3, model=NETS[net], **changes)
    expected, sums = whole(run, 3, 0)
    step, state = changing(run), start(run)
    loader = data.TrainLoader(run.train_set, GRANULARITY, run.spec.seed)
    for of_whole in sums:
        state, actual = step(state, taken(run, loader, 3))
        assert actual.keys() == of_whole.keys()
        for name, pair in jax.device_get(actual).items():
            np.testing.assert_allclose(pair, of_whole[name], rtol=1e-5, err_msg=name)
    assert difference(state, expected) < 2e-6
    assert difference(state.params, start(run).params) > 0.01


@pytest.mark.long
@pytest.mark.parametrize("backend", some(["jit", "shard_map"], ("shard_map",)))
def test_any_number_of_microbatches_and_no_program_more(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update equals that of a step made for this batch size, and no update compiles a program."""
    monkeypatch.setattr(changing_lib, "TOGETHER", 2)  # 3 microbatches then take two calls
    counts = 2, 1, 3, 1
    run = prepared(8, 1, model=BATCH_NORM, parallel__backend=backend)
    step, state = changing(run), start(run)
    step.compile()
    loader = data.TrainLoader(run.train_set, GRANULARITY, run.spec.seed)
    expected, taken_before = start(run), 0
    for count in counts:
        sized = prepared(8, count, model=BATCH_NORM, parallel__backend=backend)
        of_whole = data.TrainLoader(
            sized.train_set, GRANULARITY * count, sized.config.seed, sized.local_rows()
        )
        of_whole.examples = taken_before
        # Use the optimizer of `run`, so that the learning rate does not depend on the batch size.
        sized = dataclasses.replace(sized, tx=run.tx)
        expected, _ = sized.make_train_step()(expected, sized.shard_batch(next(of_whole)))
        taken_before += GRANULARITY * count
        batches = taken(run, loader, count)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            state, _ = step(state, batches)
        compiled = [record for record in caplog.records if "Compiling" in record.getMessage()]
        assert not compiled
        assert difference(state, expected) < 2e-6
    assert loader.examples == taken_before == GRANULARITY * sum(counts)


@dataclasses.dataclass(frozen=True)
class Weighted:
    """Microbatches of `WeightedSum` on two devices, without BatchNorm and dropout."""

    fields: dict[str, np.ndarray]  # the full batch
    gradient: np.ndarray  # gradient with respect to the parameters `p` at the first state
    first: Any  # returns the state before the first update
    batches: list[Any]
    arguments: tuple[Any, ...]  # task, optimizer, layout, shapes of the state and of a microbatch


def weighted(learning_rate: float, count: int = 3) -> Weighted:
    random, rows = np.random.default_rng(0), 8
    fields = {
        "x": random.normal(size=(rows * count, 4)),
        "y": random.normal(size=rows * count),
        "w": np.arange(float(rows * count)) ** 2,
        "v": np.arange(float(rows * count))[::-1] ** 3,
    }
    fields = {name: np.float32(value) for name, value in fields.items()}
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    task, tx = WeightedSum(), optax.sgd(lambda count: learning_rate)
    state = jax.eval_shape(state_lib.make_init(task, tx, fields), jax.random.key(0))
    layout = make_layout(state.params, mesh, parameters.resolve(state.params, "no_bias_no_norm"))
    placed = state_lib.with_shardings(state, state_lib.state_shardings(state, tx, layout))
    places = jax.tree.map(lambda leaf: leaf.sharding, placed)
    first = jax.jit(state_lib.make_init(task, tx, fields), out_shardings=places)
    batches = [
        rows_lib.shard_batch({k: v[i * rows :][:rows] for k, v in fields.items()}, rows, mesh)
        for i in range(count)
    ]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batches[0]
    )
    p = np.asarray(first(jax.random.key(0), {}).params["p"])
    x, w, v = (fields[name] for name in "xwv")
    gradient = (w * (x @ p - fields["y"]) / w.sum() + v / v.sum()) @ x
    return Weighted(fields, gradient, first, batches, (task, tx, layout, placed, shapes))


def test_weights_are_those_of_the_full_batch() -> None:
    """The two loss terms have different weights in each microbatch."""
    case = weighted(1.0)
    for backend in ("jit", "shard_map"):
        step = ChangingStep(*case.arguments, backend)
        state = case.first(jax.random.key(0), {})
        before = np.asarray(state.params["p"])
        after, _ = step(state, case.batches)
        np.testing.assert_allclose(before - np.asarray(after.params["p"]), case.gradient, rtol=1e-5)


def test_the_optimizer_gets_the_rate_of_the_call() -> None:
    case, traced = weighted(float("nan")), []

    def at_rate(rate: jax.Array) -> optax.GradientTransformation:
        traced.append(rate)
        return optax.sgd(lambda count: rate)

    step = ChangingStep(*case.arguments, optimizer_at=at_rate)
    for rate in (0.5, 0.25):
        state = case.first(jax.random.key(0), {})
        before = np.asarray(state.params["p"])
        after, _ = step(state, case.batches, rate)
        moved = before - np.asarray(after.params["p"])
        np.testing.assert_allclose(moved, rate * case.gradient, rtol=1e-5)
    assert len(traced) == 1  # one program for every rate


@pytest.mark.long
def test_updates_do_not_share_totals() -> None:
    run = prepared(1, 1, model=DROPOUT)
    step = changing(run)
    loader = data.TrainLoader(run.train_set, GRANULARITY, run.spec.seed)
    first, second = taken(run, loader, 1), taken(run, loader, 2)
    expected, _ = step(start(run), second)
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), start(run).params)
    other = changing(run)
    _, sums = other(dataclasses.replace(start(run), params=params), first)
    assert np.isnan(jax.device_get(sums)["loss"][0])
    actual, _ = other(start(run), second)
    assert difference(actual, expected) == 0


def test_a_carry_has_one_batch_size(tmp_path: pathlib.Path) -> None:
    run = prepare(tiny.words(tiny.text(tmp_path)), None, jax.devices()[:1])
    with pytest.raises(ValueError, match="'carry' has a value for each row of the batch; do not"):
        changing(run)

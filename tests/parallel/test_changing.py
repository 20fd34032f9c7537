"""Updates of batches of any number of microbatches: those of one step for the whole batch."""

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
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import state as state_lib
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.parallel.layout import make_layout
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, LAMB, WeightedSum, difference
from tests.quick import jit

QUANTUM = 64
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "jit": (8, {}),
    "jit zero1": (8, {"parallel__optimizer_state": "zero1"}),
    "shard_map": (8, {"parallel__backend": "shard_map"}),
    "shard_map zero1": (
        8,
        {"parallel__backend": "shard_map", "parallel__optimizer_state": "zero1"},
    ),
}
NETS = {"batch_norm": BATCH_NORM, "dropout": DROPOUT}


def prepared(devices: int, steps: int, **changes: Any) -> Run:
    config = tiny.digits(
        batch_size=QUANTUM * steps,
        accumulation_steps=steps,
        optimizer=LAMB,
        duration="40 steps",
        **changes,
    )
    return prepare(config, None, jax.devices()[:devices])


def start(run: Run) -> TrainState:
    return jit(run.init, out_shardings=run.shardings)(jax.random.key(run.config.seed), {})


def changing(run: Run, **options: Any) -> ChangingStep:
    return ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        run.abstract_rows(QUANTUM, run.train_set.element_spec),
        run.config.parallel.backend,
        parts=run.parts,
        **options,
    )


def taken(run: Run, loader: data.TrainLoader, count: int) -> list[dict[str, jax.Array]]:
    rows = mesh_lib.local_rows(QUANTUM, run.mesh)
    return [
        mesh_lib.shard_batch(loader.take(QUANTUM, rows), QUANTUM, run.mesh) for _ in range(count)
    ]


def whole(run: Run, steps: int, before: int) -> tuple[TrainState, list[Any]]:
    """The state after `steps` updates of the step for one batch size."""
    loader = data.TrainLoader(
        run.train_set, run.config.batch_size, run.config.seed, run.local_rows()
    )
    loader.examples = before
    state, sums, step = start(run), [], run.make_train_step()
    for _ in range(steps):
        state, found = step(state, run.shard_batch(next(loader)))
        sums.append(jax.device_get(found))
    return state, sums


@pytest.mark.long
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("place", some(PLACES, ("jit", "shard_map zero1")))
def test_as_one_step_for_the_whole_batch(place: str, net: str) -> None:
    devices, changes = PLACES[place]
    run = prepared(devices, 3, model=NETS[net], **changes)
    expected, sums = whole(run, 3, 0)
    step, state = changing(run), start(run)
    loader = data.TrainLoader(run.train_set, QUANTUM, run.config.seed)
    for of_whole in sums:
        state, found = step(state, taken(run, loader, 3))
        assert found.keys() == of_whole.keys()
        for name, pair in jax.device_get(found).items():
            np.testing.assert_allclose(pair, of_whole[name], rtol=1e-5, err_msg=name)
    assert difference(state, expected) < 2e-6
    assert difference(state.params, start(run).params) > 0.01


@pytest.mark.long
@pytest.mark.parametrize("backend", some(["jit", "shard_map"], ("shard_map",)))
def test_any_number_of_microbatches_and_no_program_more(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update is that of a step of its own size, and only the first of each kind compiles."""
    monkeypatch.setattr(changing_lib, "TOGETHER", 2)  # so that 3 take two calls
    counts = 2, 1, 3, 1
    run = prepared(8, 1, model=BATCH_NORM, parallel__backend=backend)
    step, state = changing(run), start(run)
    step.compile()
    loader = data.TrainLoader(run.train_set, QUANTUM, run.config.seed)
    expected, taken_before = start(run), 0
    for count in counts:
        sized = prepared(8, count, model=BATCH_NORM, parallel__backend=backend)
        of_whole = data.TrainLoader(
            sized.train_set, QUANTUM * count, sized.config.seed, sized.local_rows()
        )
        of_whole.examples = taken_before
        # With the learning rate of one batch size.
        sized = dataclasses.replace(sized, tx=run.tx)
        expected, _ = sized.make_train_step()(expected, sized.shard_batch(next(of_whole)))
        taken_before += QUANTUM * count
        batches = taken(run, loader, count)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            state, _ = step(state, batches)
        compiled = [record for record in caplog.records if "Compiling" in record.getMessage()]
        assert not compiled
        assert difference(state, expected) < 2e-6
    assert loader.examples == taken_before == QUANTUM * sum(counts)


def test_weights_are_those_of_the_whole_batch() -> None:
    """Two terms whose weights differ from microbatch to microbatch; no BatchNorm, no dropout."""
    random = np.random.default_rng(0)
    rows, count = 8, 3
    fields = {
        "x": random.normal(size=(rows * count, 4)),
        "y": random.normal(size=rows * count),
        "w": np.arange(24.0) ** 2,
        "v": np.arange(24.0)[::-1] ** 3,
    }
    fields = {name: np.float32(value) for name, value in fields.items()}
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    task, tx = WeightedSum(), optax.sgd(1.0)
    state = jax.eval_shape(state_lib.make_init(task, tx, fields), jax.random.key(0))
    layout = make_layout(state.params, mesh, parameters.resolve(state.params, "no_bias_no_norm"))
    placed = state_lib.with_shardings(state, state_lib.state_shardings(state, tx, layout))
    places = jax.tree.map(lambda leaf: leaf.sharding, placed)
    first = jit(state_lib.make_init(task, tx, fields), out_shardings=places)
    batches = [
        mesh_lib.shard_batch({k: v[i * rows :][:rows] for k, v in fields.items()}, rows, mesh)
        for i in range(count)
    ]
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batches[0]
    )
    p = np.asarray(first(jax.random.key(0), {}).params["p"])
    x, w, v = (fields[name] for name in "xwv")
    expected = (w * (x @ p - fields["y"]) / w.sum() + v / v.sum()) @ x
    for backend in ("jit", "shard_map"):
        step = ChangingStep(task, tx, layout, placed, shapes, backend)
        after, _ = step(first(jax.random.key(0), {}), batches)
        np.testing.assert_allclose(p - np.asarray(after.params["p"]), expected, rtol=1e-5)


@pytest.mark.long
def test_what_an_update_left_does_not_reach_the_next() -> None:
    run = prepared(1, 1, model=DROPOUT)
    step = changing(run)
    loader = data.TrainLoader(run.train_set, QUANTUM, run.config.seed)
    first, second = taken(run, loader, 1), taken(run, loader, 2)
    expected, _ = step(start(run), second)
    params = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), start(run).params)
    other = changing(run)
    _, sums = other(dataclasses.replace(start(run), params=params), first)
    assert np.isnan(jax.device_get(sums)["loss"][0])
    found, _ = other(start(run), second)
    assert difference(found, expected) == 0


def test_a_carry_has_one_batch_size(tmp_path: pathlib.Path) -> None:
    run = prepare(tiny.words(tiny.text(tmp_path)), None, jax.devices()[:1])
    with pytest.raises(ValueError, match="carry lives with the rows of one batch size"):
        changing(run)

"""AGVM in a run: updates, factors in the records, resuming, and rejected configs."""

import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, optim
from lamb_tpu.errors import UserError
from lamb_tpu.parallel.changing import ChangingStep
from lamb_tpu.run.batches import granularity
from lamb_tpu.run.build import prepare
from lamb_tpu.run.statistics import statistics_of
from lamb_tpu.run.updating import make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, difference
from tests.parallel.test_changing import PLACES
from tests.parallel.test_gradient_statistics import contributions, part_means
from tests.raising import rejected
from tests.run.test_calls import same_end
from tests.test_train import train_in_segments

# The second hidden layer is the anchor.
MODULES = (("first", "^hidden_0|^hidden0"), ("head", "^output"), ("rest", ""))
AGVM = {"modules": MODULES, "anchor": "rest", "interval": 2, "start": 1, "momentum": 0.5}


def config(agvm: Any = AGVM, **changes: Any) -> ConfigDict:
    """Returns a config with AGVM, and 12 updates of 4 microbatches each."""
    changes = {"accumulation_steps": 4, "model": DROPOUT, **changes}
    actual = tiny.digits(**changes)
    return actual if agvm is None else tiny.change(actual, {"optimizer.agvm": agvm})


@pytest.mark.long
@pytest.mark.parametrize("second_moment", [False, True])
@pytest.mark.parametrize("place", some(PLACES, ("jit zero1", "shard_map zero1")))
def test_an_update_is_that_of_the_wrapper_by_hand(place: str, second_moment: bool) -> None:
    devices, changes = PLACES[place]
    run = prepare(
        config({**AGVM, "second_moment": second_moment}, **changes), None, jax.devices()[:devices]
    )
    taken: list[dict[str, Any]] = []

    class Loader(data.TrainLoader):
        def take(self, count: int, rows: np.ndarray | None = None) -> Any:
            batch = super().take(count, rows)
            # The loader's rows are in the order of the devices; restore the order of the batch.
            order = slice(None) if rows is None else np.argsort(rows)
            taken.append({name: value[order] for name, value in batch.items()})
            return batch

    update = make_updating(run, Loader(run.train_set, 64, 0, run.local_rows()), compiles=False)
    state = run.first_state()
    one = prepare(config(None), None, jax.devices()[:1])
    inner = one.make_optimizer(run.recipe)
    by_hand = optim.agvm(
        inner,
        [pattern for _, pattern in MODULES],
        anchor=2,
        interval=2,
        start=1,
        momentum=0.5,
        second_moment=(lambda state: state.nu) if second_moment else None,
    )
    for step in range(4):
        before = jax.device_get(dict(params=state.params, opt_state=state.opt_state))
        kept = jax.tree.map(jnp.copy, state)
        taken.clear()
        state, _ = update(state, step)
        each = contributions(run, kept, taken)
        parts = part_means(each, 4 * (devices if "shard_map" in place else 1))
        halves = tuple(
            jax.tree.map(lambda g, odd=odd: np.float32(g[odd::2].mean(0)), parts) for odd in (0, 1)
        )
        mean = jax.tree.map(lambda g: np.float32(g.mean(0, np.float64)), each)
        updates, after = by_hand.update(mean, before["opt_state"], before["params"], halves=halves)
        expected = optax.apply_updates(before["params"], updates)
        assert difference(state.params, expected) < 1e-5
        np.testing.assert_allclose(state.opt_state.factors, after.factors, rtol=1e-4)
    factors = np.asarray(state.opt_state.factors)
    assert factors[2] == 1 and (np.abs(factors[:2] - 1) > 5e-3).all() and factors[0] != factors[1]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("agvm")
    train(config(), workdir, quiet=True)
    return workdir


@pytest.mark.long
def test_factors_are_in_the_records(uninterrupted: pathlib.Path) -> None:
    records = read_records(uninterrupted / "metrics.jsonl", "train")
    actual = [[record[f"agvm/{name}"] for name, _ in MODULES] for record in records]
    # The factors are measured in updates 3, 5, 7, ...
    assert actual[:2] == [[1.0] * 3] * 2
    assert [row[2] for row in actual] == [1.0] * 12
    changed = [now[0] != before[0] for before, now in itertools.pairwise(actual)]
    assert changed == [False, True] * 5 + [False]
    assert all("similarity" in record for record in records)
    state, _ = tiny.restored(config(), uninterrupted)
    np.testing.assert_array_equal(np.float32(actual[-1]), state.opt_state.factors)


@pytest.mark.long
def test_resumed_bit_for_bit(
    uninterrupted: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last start resumes from the checkpoint of update 8.
    train_in_segments(monkeypatch, config(), tmp_path, [(4, 3), (4, 6)], fails_at=11)
    same_end(tmp_path, uninterrupted, config())


def test_a_batch_that_changes_is_pairs_of_microbatches(tmp_path: pathlib.Path) -> None:
    rule = ConfigDict({"name": "ramp", "points": ((0, 32), (128, 96))})
    train(config(batch_rule=rule, duration="6 steps"), tmp_path, quiet=True)
    records = read_records(tmp_path / "metrics.jsonl", "train")
    assert {record["batch_size"] for record in records} >= {32, 96}
    assert records[-1]["agvm/head"] != 1.0


def test_batch_norm_over_devices() -> None:
    """The halves that AGVM gets may share BatchNorm groups; devices that a statistic compares may not."""
    model = ConfigDict({**BATCH_NORM, "group_size": 16})
    fields = {"modules": (("body", "^hidden|^norm"), ("head", ""))}
    prepare(config(fields, model=model, parallel__backend="shard_map"), None)
    with rejected("config.statistics.noise_scale", True, "compares devices"):
        prepare(
            config(
                fields,
                model=model,
                parallel__backend="shard_map",
                accumulation_steps=1,
                statistics__noise_scale=True,
            ),
            None,
        )


def test_an_odd_number_of_microbatches_has_no_halves() -> None:
    run = prepare(config(), None, jax.devices()[:1])
    size = granularity(run.spec)
    step = ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        run.abstract_rows(size, run.train_set.element_spec),
        parts=run.parts,
        statistics=statistics_of(run.spec),
    )
    with pytest.raises(
        ValueError, match="^the number of microbatches, 3, is odd, but .*; use an even"
    ):
        step(run.first_state(), [{}] * 3)


@pytest.mark.parametrize(
    "devices, agvm, changes, message",
    [
        (
            1,
            {},
            {"accumulation_steps": 1},
            "optimizer.agvm compares even and odd microbatches, but config.accumulation_steps is 1; "
            "use an even number, such as 2$",
        ),
        (
            3,
            {},
            {"batch_size": 60, "accumulation_steps": 1, "parallel__backend": "shard_map"},
            "optimizer.agvm compares even and odd devices, but 3 devices share the batch; use",
        ),
        (
            1,
            {},
            {"accumulation_steps": 1, "parallel__backend": "shard_map"},
            ".*; use an even number, such as 2$",
        ),
        (
            1,
            {"anchor": "neck"},
            {},
            "optimizer: agvm.anchor='neck' must be one of first, head, rest$",
        ),
        (
            1,
            {"modules": MODULES[:2], "anchor": "head"},
            {},
            "optimizer: agvm: no module matches the parameter 'hidden1/bias'",
        ),
        (1, {"start": -1}, {}, "optimizer: agvm: start=-1 must be a whole number of at least 0"),
        (
            1,
            {},
            {
                "accumulation_steps": 2,
                "batch_size": 32,
                "batch_rule": {"name": "ramp", "points": ((0, 16), (64, 32))},
            },
            r"batch_rule.points\[0\]\[1\]=16 must be a multiple of the batch granularity 32; use 32 .the "
            r"granularity is two microbatches, 2 \* config",
        ),
        (
            1,
            {},
            {
                "parallel__backend": "shard_map",
                "batch_rule": {"name": "ramp", "points": ((0, 32),)},
            },
            "parallel.backend='shard_map' compares devices for config.optimizer.agvm, but there is only",
        ),
    ],
)
def test_errors(devices: int, agvm: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^config.{message}") as error:
        prepare(config({**AGVM, **agvm}, **changes), None, jax.devices()[:devices])
    assert "\n" not in str(error.value)

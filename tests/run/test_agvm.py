"""AGVM in a run: its updates, factors in the records, resumes, and what is refused."""

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
from lamb_tpu.run.batches import quantum
from lamb_tpu.run.build import make_optimizer, prepare
from lamb_tpu.run.statistics import statistics_of
from lamb_tpu.run.updating import make_updating
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some
from tests.parallel.nets import BATCH_NORM, DROPOUT, difference
from tests.parallel.test_changing import PLACES
from tests.parallel.test_gradient_statistics import contributions, part_means
from tests.test_train import train_in_pieces, without_seconds

# The second hidden layer is the anchor.
MODULES = (("first", "^hidden_0|^hidden0"), ("head", "^output"), ("rest", ""))
AGVM = {"modules": MODULES, "anchor": "rest", "interval": 2, "start": 1, "momentum": 0.5}


def config(agvm: Any = AGVM, **changes: Any) -> ConfigDict:
    """12 updates of 4 microbatches."""
    changes = {"accumulation_steps": 4, "model": DROPOUT, **changes}
    found = tiny.digits(**changes)
    return found if agvm is None else tiny.change(found, {"optimizer.agvm": agvm})


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
        def take(self, *args: Any) -> Any:
            taken.append(super().take(*args))
            return taken[-1]

    update = make_updating(run, Loader(run.train_set, 64, 0, run.local_rows()), compiles=False)
    state = run.first_state()
    one = prepare(config(None), None, jax.devices()[:1])
    inner = make_optimizer(one.config, run.recipe, one.abstract_state.params, one.layout)
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
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("agvm")
    train(config(), workdir, quiet=True)
    return workdir


@pytest.mark.long
def test_factors_are_in_the_records(whole: pathlib.Path) -> None:
    records = read_records(whole / "metrics.jsonl", "train")
    found = [[record[f"agvm/{name}"] for name, _ in MODULES] for record in records]
    # Measured in the updates that follow 2, 4, ... completed ones.
    assert found[:2] == [[1.0] * 3] * 2
    assert [row[2] for row in found] == [1.0] * 12
    changed = [now[0] != before[0] for before, now in itertools.pairwise(found)]
    assert changed == [False, True] * 5 + [False]
    assert all("similarity" in record for record in records)
    state, _ = tiny.restored(config(), whole)
    np.testing.assert_array_equal(np.float32(found[-1]), state.opt_state.factors)


@pytest.mark.long
def test_resumed_bit_for_bit(
    whole: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one goes back to the checkpoint of update 8.
    train_in_pieces(monkeypatch, config(), tmp_path, [(4, 3), (4, 6)], fails_at=11)
    tiny.assert_equal(tiny.restored(config(), tmp_path)[0], tiny.restored(config(), whole)[0])
    assert without_seconds(tmp_path) == without_seconds(whole)


def test_a_batch_that_changes_is_pairs_of_microbatches(tmp_path: pathlib.Path) -> None:
    rule = ConfigDict({"name": "ramp", "points": ((0, 32), (128, 96))})
    train(config(batch_rule=rule, duration="6 steps"), tmp_path, quiet=True)
    records = read_records(tmp_path / "metrics.jsonl", "train")
    assert {record["batch_size"] for record in records} >= {32, 96}
    assert records[-1]["agvm/head"] != 1.0


def test_batch_norm_over_devices() -> None:
    """Halves are what their examples add, also where they share the statistics of BatchNorm."""
    model = ConfigDict({**BATCH_NORM, "group_size": 16})
    fields = {"modules": (("body", "^hidden|^norm"), ("head", ""))}
    prepare(config(fields, model=model, parallel__backend="shard_map"), None)
    with pytest.raises(UserError, match=r"^config\.statistics\.noise_scale is True, which comp"):
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
    size = quantum(run.config)
    step = ChangingStep(
        run.task,
        run.tx,
        run.layout,
        run.abstract_state,
        run.abstract_rows(size, run.train_set.element_spec),
        parts=run.parts,
        statistics=statistics_of(run.config),
    )
    with pytest.raises(ValueError, match="^there are 3 microbatches, .*; their number must"):
        step(run.first_state(), [{}] * 3)


@pytest.mark.parametrize(
    "devices, agvm, changes, message",
    [
        (
            1,
            {},
            {"accumulation_steps": 1},
            r"^config\.optimizer\.agvm is given, which compares even and odd microbatches, and config\.a"
            r"ccumulation_steps is 1; it must be an even number, such as 2$",
        ),
        (
            3,
            {},
            {"batch_size": 60, "accumulation_steps": 1, "parallel__backend": "shard_map"},
            r"^config\.optimizer\.agvm is given, which compares devices of even and of odd index under "
            ".* over 3; it must be an even number",
        ),
        (
            1,
            {},
            {"accumulation_steps": 1, "parallel__backend": "shard_map"},
            "must be an even number",
        ),
        (
            1,
            {"anchor": "neck"},
            {},
            r"^config\.optimizer: agvm\.anchor is 'neck'; the modules are: first, head, rest$",
        ),
        (
            1,
            {"modules": MODULES[:2], "anchor": "head"},
            {},
            r"^config\.optimizer: agvm: no module matches the parameter 'hidden1/bias'",
        ),
        (
            1,
            {"start": -1},
            {},
            r"^config\.optimizer: agvm: start must be a whole number of at least 0",
        ),
        (
            1,
            {},
            {
                "accumulation_steps": 2,
                "batch_size": 32,
                "batch_rule": ConfigDict({"name": "ramp", "points": ((0, 16), (64, 32))}),
            },
            r"^config\.batch_rule: the batch at 0 examples must be a whole number of quanta of 32 examples"
            ".* a quantum is two microbatches of",
        ),
        (
            1,
            {},
            {
                "parallel__backend": "shard_map",
                "batch_rule": ConfigDict({"name": "ramp", "points": ((0, 32),)}),
            },
            r"^config\.optimizer\.agvm compares the devices under .*, and there is one; take 'jit'",
        ),
    ],
)
def test_mistakes(
    devices: int, agvm: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        prepare(config({**AGVM, **agvm}, **changes), None, jax.devices()[:devices])
    assert "\n" not in str(error.value)

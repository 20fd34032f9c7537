"""A training set on the devices gives the same updates as a training set that the host reads."""

import pathlib
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.run import holding
from lamb_tpu.run.build import prepare
from lamb_tpu.run.updating import stacked
from lamb_tpu.train import train
from tests import tiny
from tests.marks import some
from tests.raising import rejected
from tests.run import test_calls
from tests.run.test_calls import TIMES, same

# All modes use calls of up to 50 updates, except "one update".
MODES: dict[str, dict[str, Any]] = {
    "jit": {},
    "one update": {},
    "microbatches": {"accumulation_steps": 2},
    "zero1": test_calls.MODES["zero1"],
}


def on_devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes CPU devices hold the set too; returns a list to which each held set is added."""
    monkeypatch.setattr(holding, "is_held", lambda run: True)
    actual: list[Any] = []
    held_set = data.held_set

    def noted(source: Any) -> Any:
        actual.append(held_set(source))
        return actual[-1]

    monkeypatch.setattr(data, "held_set", noted)
    return actual


@pytest.mark.parametrize("mode", some(MODES, ("jit",)))
def test_a_run_is_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    config = tiny.digits(**TIMES, **MODES[mode])
    train(config, tmp_path / "host", quiet=True)
    actual = on_devices(monkeypatch)
    updates = 1 if mode == "one update" else 50
    several = tiny.digits(**TIMES, **MODES[mode], loop__updates_per_call=updates)
    train(several, tmp_path / "devices", quiet=True)
    assert len(actual) == 1 and actual[0] is not None
    same(tmp_path / "devices", tmp_path / "host", config)


def test_a_wrong_value_ends_the_run_before_its_first_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_devices(monkeypatch)
    run = prepare(tiny.digits(), None)
    run.train_set.arrays["label"][200] = 10
    with rejected("*", 10, "is not in the range 0 to 9"):
        holding.hold(run)


def test_devices_of_a_cpu_hold_no_training_set() -> None:
    assert holding.hold(prepare(tiny.digits(), None)) is None


def test_draws_have_the_declared_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    on_devices(monkeypatch)
    run = prepare(tiny.digits(), None)
    held = holding.hold(run)
    assert held is not None
    for updates, shape in ((1, (64,)), (3, (3, 64))):
        loader = data.TrainLoader(run.train_set, 64, 0, run.local_rows())
        actual = held.take(loader, updates, 64, run.local_rows())
        assert loader.examples == updates * 64
        for name, spec in stacked(run, held.shapes(), updates).items():
            assert actual[name].shape == spec.shape == shape and actual[name].dtype == spec.dtype
            assert actual[name].sharding == spec.sharding
    np.testing.assert_array_equal(held.arrays["label"], run.train_set.arrays["label"])
    assert held.arrays["image"].shape == (256, 64)

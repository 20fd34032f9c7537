"""Learning-rate decays, shipped and custom."""

import pathlib
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import overrides
from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.run import decays
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import Recipe, resolve
from tests import tiny
from tests.raising import rejected

DECAYS = '''
import jax.numpy as jnp


def inverse_root(decay_steps: float, shift: int = 1):
    """The inverse square root of the updates so far."""
    return lambda count: (shift / (count + shift)) ** 0.5


class Cliff:
    """1, then 0 in the last part of the run."""

    def __init__(self, decay_steps: float, share: float):
        self.edge = (1 - share) * decay_steps

    def __call__(self, count):
        return jnp.where(count < self.edge, 1.0, 0.0)


def number():
    return 3


def scalar():
    return lambda count: 0.5


def integers():
    return lambda count: count.astype(int)


def failing():
    return lambda count: {}["x"]
'''


@pytest.fixture
def module(custom_folder: pathlib.Path) -> None:
    (custom_folder / "my_decays.py").write_text(DECAYS)


def custom(name: str, **changes: Any) -> Any:
    options = changes.pop("options", {})
    return tiny.digits(
        schedule__decay=f"my_decays:{name}",
        schedule__warmup="2 steps",
        schedule__options=ConfigDict(options),
        **changes,
    )


def rates(config: ConfigDict) -> list[float]:
    recipe: Recipe = resolve(config, 256)
    return np.round(recipe.learning_rates / recipe.peak_learning_rate, 4).tolist()


def test_custom_decays(module: None) -> None:
    expected = [0, 0.5, *(np.sqrt(3 / (3 + np.arange(10))).round(4))]
    np.testing.assert_allclose(rates(custom("inverse_root", options={"shift": 3})), expected, 1e-3)
    # The decay covers 10 of 12 updates, after the warm-up; its last fifth is 2 updates.
    assert rates(custom("Cliff", options={"share": 0.2})) == [0, 0.5] + [1] * 8 + [0] * 2
    floor = custom("Cliff", options={"share": 0.2}, schedule__end_factor=0.25)
    assert rates(floor) == [0, 0.5] + [1] * 8 + [0.25] * 2


def test_a_run_with_a_custom_decay(module: None) -> None:
    run = prepare(custom("inverse_root"), None)
    assert run.recipe.learning_rates[-1] == pytest.approx(0.02 / 10**0.5)


def test_options_are_flags(module: None) -> None:
    config = custom("inverse_root")
    actual, rest = overrides.take(["--config.schedule.options.shift=3"])
    assert not rest
    overrides.apply(config, actual)
    assert flatten(config)["schedule.options.shift"] == 3
    assert "config.schedule.options.shift = 1  # default of my_decays:inverse_root" in (
        overrides.describe(custom("inverse_root")).splitlines()
    )
    # Shipped decays have their keys in config.schedule, and none in its options.
    assert not [key for key in flatten(tiny.digits()) if key.startswith("schedule.options")]
    with pytest.raises(
        UserError, match="options.shift is unknown; decay 'polynomial' has: no keys$"
    ):
        overrides.apply(tiny.digits(), actual)


def test_keys_of_shipped_decays() -> None:
    assert decays.KEYS == {
        "constant": (),
        "polynomial": ("power", "end_factor"),
        "cosine": ("end_factor",),
        "exponential": ("decay_factor", "decay_every", "staircase", "end_factor"),
        "step": ("decay_factor", "boundaries"),
    }


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("Cliff", {}, "options.share is missing; .* 'my_decays:Cliff' has no def"),
        ("Cliff", {"share": "x"}, "options.share='x' has the wrong type; use a number$"),
        ("Cliff", {"shore": 1}, "options.shore is unknown; decay .* has: share; did yo"),
        ("number", {}, "decay='my_decays:number' returns 3; return a function"),
        ("scalar", {}, "decay=.* a function that returns .* for 2 counts; return 2 floating-point"),
        ("integers", {}, "decay=.*; return 2 floating-point numbers$"),
        ("failing", {}, "decay=.* cannot be built at line 33 of .*my_decays.py: KeyError: 'x'"),
        ("absent", {}, "decay='my_decays:absent' does not exist; the module my_decays "),
    ],
)
def test_errors(module: None, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^config.schedule.{message}"):
        resolve(custom(name, options=options), 256)


def test_keys_of_shipped_decays_have_no_effect_on_others(module: None) -> None:
    with rejected("config.schedule.power", 2.0, "has no effect on"):
        resolve(custom("inverse_root", schedule__power=2.0), 256)

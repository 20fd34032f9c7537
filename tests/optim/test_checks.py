"""Tests that errors name an invalid argument and its value, even if Optax made the value an array."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import checks


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan"), "x", None, jnp.float32(1.5)])
def test_range(value):
    with pytest.raises(ValueError, match="^b1=.* must be at least 0 and below 1"):
        checks.check_range("b1", value, upper=1.0)
    for good in (0.0, 0.999, 0, jnp.float32(0.5)):
        checks.check_range("b1", good, upper=1.0)


def test_an_array_that_has_lost_digits_and_one_that_is_traced():
    with pytest.raises(ValueError, match="b1 is a bfloat16 array, which is too imprecise"):
        checks.check_range("b1", jnp.bfloat16(0.5))
    jax.jit(lambda value: checks.check_range("b1", value))(2.0)


@pytest.mark.parametrize("argument, value", [("learning_rate", -0.1), ("b1", 1.5), ("eps", -1.0)])
def test_injected_hyperparameters_are_checked(argument, value):
    tx = optax.inject_hyperparams(optim.lamb)(**{"learning_rate": 0.1, argument: value})
    with pytest.raises(ValueError, match=argument):
        tx.init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "check, good, bad, message",
    [
        (checks.check_flag, (True, False), (1, "yes", None), "flag=.* must be True or False"),
        (
            lambda name, value: checks.check_choices(**{name: (value, ("a", "b"))}),
            ("a", "b"),
            ("c", 1),
            "flag=.* must be one of a, b",
        ),
        (
            checks.check_bounds,
            ((0.0, 1.0), (1, 1)),
            ((2.0, 1.0), (-1.0, 1.0), 3.0, (1.0,)),
            r"flag=.* must be \(lower, upper\) with 0 <= lower <= upper and lower < inf",
        ),
        (
            checks.check_dtype,
            (None, "bfloat16", jnp.float16),
            ("int32", "bflt"),
            "flag=.* must be a floating-point dtype or None",
        ),
        (
            functools.partial(checks.check_dtype, squares=True),
            ("bfloat16", "float32", jnp.float64),
            ("float16", jnp.float8_e4m3fn),
            "flag=.* must have the range of float32, ",
        ),
    ],
)
def test_others(check, good, bad, message):
    for value in good:
        check("flag", value)
    for value in bad:
        with pytest.raises(ValueError, match=message):
            check("flag", value)


def test_above_zero():
    checks.check_above_zero(steps=1, power=0.5)
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="power=.* must be above 0"):
            checks.check_above_zero(steps=1, power=value)


def tuned(
    learning_rate: optax.ScalarOrSchedule = 0.1,
    b1: float = 0.9,
    momentum: float | None = None,
    eps: float = 1e-8,
    steps: int = 1,
    seed: int = 0,
    flag: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
    nu_dtype: object = None,
    axis_name: object = None,
    other: str = "",
) -> dict[str, object]:
    return checks.checked(tuned, locals())


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("learning_rate", (0, lambda count: 0.1), (-1, "x")),
        ("b1", (0.0, 0.5), (1.0, None)),
        ("momentum", (None, 0.5), (1.0, -1)),
        ("eps", (0.0, 2.0), (-1e-9, float("inf"))),
        ("steps", (1, 7), (0, 1.5, True)),
        ("seed", (0, 7), (-1,)),
        ("flag", (True,), (1, None)),
        ("bounds", ((0, 2),), ((2, 1), None)),
        ("nu_dtype", ("bfloat16",), ("float16", "int32")),
        ("axis_name", ("data",), (1,)),
        ("other", ("any", None, 3), ()),
    ],
)
def test_arguments_are_checked_by_annotation_and_name(name, good, bad):
    for value in good:
        assert tuned(**{name: value})[name] is value
    for value in bad:
        with pytest.raises(ValueError, match=name):
            tuned(**{name: value})


def test_a_choice_is_named():
    checks.check_choices(decay=("a", ("a", "b")), norm=("l2", ("l2",)))
    with pytest.raises(ValueError, match="norm='l3' must be one of l2"):
        checks.check_choices(decay=("a", ("a", "b")), norm=("l3", ("l2",)))

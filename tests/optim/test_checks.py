"""Wrong arguments are named with their values, also where Optax has made arrays of them."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import checks


@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, float("nan"), "x", None, jnp.float32(1.5)])
def test_range(value):
    with pytest.raises(ValueError, match="^b1 must be at least 0 and below 1, not "):
        checks.check_range("b1", value, upper=1.0)
    for good in (0.0, 0.999, 0, jnp.float32(0.5)):
        checks.check_range("b1", good, upper=1.0)


def test_an_array_that_has_lost_digits_and_one_that_is_traced():
    with pytest.raises(ValueError, match="b1 is a bfloat16 array and has lost digits"):
        checks.check_range("b1", jnp.bfloat16(0.5))
    jax.jit(lambda value: checks.check_range("b1", value))(2.0)


@pytest.mark.parametrize("argument, value", [("learning_rate", -0.1), ("b1", 1.5), ("eps", -1.0)])
def test_injected_hyperparameters_are_checked(argument, value):
    tx = optax.inject_hyperparams(optim.lamb)(**{"learning_rate": 0.1, argument: value})
    with pytest.raises(ValueError, match=argument):
        tx.init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "check, good, bad, said",
    [
        (checks.check_flag, (True, False), (1, "yes", None), "flag must be True or False, not "),
        (
            functools.partial(checks.check_choice, choices=("a", "b")),
            ("a", "b"),
            ("c", 1),
            "flag must be one of a, b, not ",
        ),
        (
            checks.check_bounds,
            ((0.0, 1.0), (1, 1)),
            ((2.0, 1.0), (-1.0, 1.0), 3.0, (1.0,)),
            r"flag must be \(lower, upper\), 0 <= lower <= upper, not ",
        ),
        (
            checks.check_dtype,
            (None, "bfloat16", jnp.float16),
            ("int32", "bflt"),
            "flag must be a floating-point dtype or None, not ",
        ),
        (
            functools.partial(checks.check_dtype, squares=True),
            ("bfloat16", "float32", jnp.float64),
            ("float16", jnp.float8_e4m3fn),
            "flag must have the range of float32, .* in ",
        ),
    ],
)
def test_others(check, good, bad, said):
    for value in good:
        check("flag", value)
    for value in bad:
        with pytest.raises(ValueError, match=said):
            check("flag", value)


def test_above_zero():
    checks.check_above_zero(steps=1, power=0.5)
    for value in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="power must be above 0, not "):
            checks.check_above_zero(steps=1, power=value)

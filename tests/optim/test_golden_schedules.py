"""Reproduces every recorded learning rate of other implementations with our schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.optim import golden_schedules, goldens


def _entry(implementation):
    entry = goldens.find(family="schedules", implementation=implementation)
    return entry, goldens.record(entry)


@pytest.mark.parametrize("implementation", golden_schedules.IMPLEMENTATIONS)
@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_every_point(implementation, x64):
    entry, record = _entry(implementation)
    in_float32 = implementation in golden_schedules.IN_FLOAT32
    relative = 1e-12 if x64 and not in_float32 else 1e-6
    # TensorFlow's 1 + cos(...) and 1 - step / total lose digits near the end: there the error is a
    # few float32 roundings of the peak, not of the value.
    of_the_peak = 3e-7 if implementation.startswith("tpu_") else 0.0
    with jax.enable_x64(x64):
        for curve in golden_schedules.curves_for(entry, record):
            values = np.asarray(jax.jit(jax.vmap(curve.schedule))(jnp.asarray(curve.steps)))
            assert values.dtype == (np.float64 if x64 else np.float32)
            np.testing.assert_allclose(
                values.astype(np.float64),
                record[curve.name],
                rtol=relative,
                atol=of_the_peak * curve.peak,
                err_msg=curve.name,
            )


@pytest.mark.parametrize("implementation", golden_schedules.IMPLEMENTATIONS)
def test_no_curve_is_left_out(implementation):
    entry, record = _entry(implementation)
    curves = golden_schedules.curves_for(entry, record)
    not_rates = ("step", "steps_per_epoch", "train_steps", "scalars")
    rates = {name for name in record if name.rpartition("/")[2] not in not_rates}
    assert {curve.name for curve in curves} == rates
    actual = FAMILIES["schedules"](entry, record, {})
    assert actual.keys() == rates
    assert all(actual[name].shape == record[name].shape for name in rates)


def test_all_implementations_are_here():
    entries = [entry for entry in goldens.entries() if entry["family"] == "schedules"]
    goldens.need(len(golden_schedules.IMPLEMENTATIONS), entries, "schedules")
    names = [entry["implementation"] for entry in entries]
    assert sorted(names) == sorted(golden_schedules.IMPLEMENTATIONS)


def test_a_setting_that_is_not_known_is_an_error():
    entry, record = _entry("init2winit_mlperf_poly")
    with pytest.raises(ValueError, match="warp_factor"):
        golden_schedules.curves_for(dict(entry, hyper=entry["hyper"] | {"warp_factor": 9}), record)


def test_a_frozen_clock():
    # The recorded run does not set init2winit's decay_end, after which the rate is constant.
    entry, record = _entry("init2winit_mlperf_poly")
    hyper = entry["hyper"] | {"decay_end": 60}
    (curve,) = golden_schedules.curves_for(dict(entry, hyper=hyper), record)
    values = np.asarray(jax.vmap(curve.schedule)(jnp.asarray(curve.steps)))
    np.testing.assert_allclose(values[:61], record["lr"][:61], rtol=1e-6)
    np.testing.assert_array_equal(values[60:], values[60])

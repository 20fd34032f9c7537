"""Recorded statistics, batch sizes and rates of other implementations, update for update."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.optim import goldens

# Recorded arrays that an implementation was given, and the true scale behind such gradients.
GIVEN = {
    "adadagrad": ("psg/", "x", "y"),
    "agvm": ("grad/",),
    "simigrad": (),
    "noise_scale": ("micro_gradients", "gradients", "b_simple_true"),
}
ENTRIES = [entry for entry in goldens.entries() if entry["family"] in GIVEN]
# Those that compile a program for every batch size take the longest.
SHORT = [
    entry
    for entry in ENTRIES
    if entry["family"] in ("noise_scale", "agvm")
    or entry["setting"] in ("w4_target09", "single_b8", "workers2_b8", "traj_norm_sgd")
]


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_entry(entry) -> None:
    recorded = goldens.record(entry)
    found = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    given = {key for key in recorded if key.startswith(GIVEN[entry["family"]])}
    assert found.keys() == recorded.keys() - given
    for key, values in found.items():
        expected = recorded[key]
        assert np.shape(values) == expected.shape, key
        if expected.dtype.kind in "ib":
            np.testing.assert_array_equal(values, expected, err_msg=key)
        else:
            # What varies between workers is recorded as a difference of squares in float32: in
            # float64 it is nearer to ours, 5e-8 of it off, than to the record.
            cancels = key == "whole_vector/var_inner_product" and entry["hyper"]["workers"] > 1
            np.testing.assert_allclose(
                values, expected, rtol=4e-6 if cancels else 1e-6, atol=1e-6, err_msg=key
            )


@pytest.mark.parametrize(
    "entry", {entry["family"]: entry for entry in ENTRIES}.values(), ids=goldens.label
)
def test_a_setting_that_is_not_known_is_an_error(entry) -> None:
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES[entry["family"]](
            dict(entry, hyper=dict(entry["hyper"], warp_factor=9)),
            goldens.record(entry),
            goldens.inputs(),
        )


def test_simigrads_microbatch_may_grow_with_the_batch() -> None:
    """Worked out by hand: 35 are wanted of 32, so 8 a worker; one step of 4 x 8 is no growth."""
    entry = goldens.find(family="simigrad", setting="w4_target09")
    hyper = dict(entry["hyper"], maxmicro=8, updates=1)
    found = FAMILIES["simigrad"](dict(entry, hyper=hyper), {}, goldens.inputs())
    after = {name: int(found[name][0]) for name in ("batch_after", "micro_after", "gas_after")}
    assert after == {"batch_after": 64, "micro_after": 8, "gas_after": 2}

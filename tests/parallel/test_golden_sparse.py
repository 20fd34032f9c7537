"""Recorded runs of DGC and of error feedback, update for update."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.optim import goldens

# Recorded arrays that a run was given.
GIVEN = {"dgc": (), "econtrol": ("A", "b", "x0", "noise")}
ENTRIES = [entry for entry in goldens.entries() if entry["family"] in GIVEN]
SHORT = [
    entry for entry in ENTRIES
    if entry["setting"] in ("sampled_noresample_w1", "topk3_w4", "eta01_noise_layerwise_w4")
]


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_entry(entry) -> None:
    recorded = goldens.record(entry)
    found = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    assert found.keys() == recorded.keys() - set(GIVEN[entry["family"]])
    # One run (eta03) is 3e-6 from its own in float64: there the order of a sum decides.
    rounding = max(1e-6, entry.get("max_abs_diff_f32_vs_f64", 0))
    for key, values in found.items():
        expected = recorded[key]
        assert values.shape == expected.shape, key
        if expected.dtype.kind in "iu":  # which values were sent
            np.testing.assert_array_equal(values, expected, err_msg=key)
        elif key in ("p64", "x", "loss", "grad_norm_squared"):
            np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-13, err_msg=key)
        else:
            # The error adds up what rounding leaves of every gradient.
            atol = {"error32": 20, "estimate32": 2}.get(key, 1) * rounding
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=atol, err_msg=key)


@pytest.mark.parametrize(
    "entry", {entry["implementation"]: entry for entry in ENTRIES}.values(), ids=goldens.label)
def test_a_setting_that_is_not_known_is_an_error(entry) -> None:
    hyper = dict(entry["hyper"], iterations=1, warp_factor=9)
    if entry["family"] == "dgc":
        hyper.pop("iterations")
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES[entry["family"]](
            dict(entry, hyper=hyper), goldens.record(entry), goldens.inputs())

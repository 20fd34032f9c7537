"""Recorded statistics and batch sizes of other implementations, repeated update for update."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.optim import goldens

# Recorded arrays that an implementation was given, and the true scale behind such gradients.
GIVEN = {
    "noise_scale": ("micro_gradients", "gradients", "b_simple_true"),
}
ENTRIES = [entry for entry in goldens.entries() if entry["family"] in GIVEN]


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
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
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_a_setting_that_is_not_known_is_an_error(entry) -> None:
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES[entry["family"]](
            dict(entry, hyper=dict(entry["hyper"], warp_factor=9)),
            goldens.record(entry), goldens.inputs(),
        )

"""Compares casts, products and sums with recorded results of the emulator CPD, bit for bit."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.optim import goldens
from tests.parallel.golden_cpd import GIVEN

ENTRIES = [entry for entry in goldens.entries() if entry["family"] in ("aps", "cpd_quant")]


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_entry(entry) -> None:
    recorded = goldens.record(entry)
    actual = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    assert actual.keys() == recorded.keys() - set(GIVEN)
    for key, values in actual.items():
        expected = recorded[key]
        assert (values.shape, values.dtype) == (expected.shape, expected.dtype), key
        if expected.dtype == np.float64:  # a matrix product; its order of additions is unknown
            np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12)
        else:
            np.testing.assert_array_equal(values, expected, err_msg=key)


def of(family: str, **changes) -> tuple[dict, dict]:
    """Returns the first entry of a family with changed settings, and its record."""
    entry = goldens.find(family=family)
    return dict(entry, hyper=entry["hyper"] | changes), goldens.record(entry)


@pytest.mark.parametrize("family", ["aps", "cpd_quant"])
def test_unknown_settings_are_errors(family: str) -> None:
    entry, recorded = of(family, warp_factor=9)
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES[family](entry, recorded, goldens.inputs())


def test_settings_are_read() -> None:
    exact = goldens.inputs()["wgrad/dense/bias"][:, 3:6]
    actual = []
    for world, kahan, shift in (
        (2, False, True),
        (3, False, True),
        (3, True, True),
        (3, False, False),
        (3, True, False),
    ):
        entry, _ = of(
            "aps",
            world=world,
            kahan=kahan,
            use_APS=shift,
            exp=4,
            man=1,
            gradients="wgrad/<name>[rank, t], t = 3..5",
        )
        key = "sum/dense/bias"
        actual.append(FAMILIES["aps"](entry, {key: None}, goldens.inputs())[key])
        assert actual[-1].shape == (3, 16)
        assert np.abs(actual[-1] - exact[:world].sum(0)).max() < 0.5
    assert len({sums.tobytes() for sums in actual}) == 5  # all differ


def test_formats_whose_shift_overflows_there_are_not_repeated() -> None:
    entry, _ = of("aps", world=2, exp=8, man=7)
    with pytest.raises(NotImplementedError, match="overflows"):
        FAMILIES["aps"](entry, {"sum/LayerNorm/scale": None}, goldens.inputs())

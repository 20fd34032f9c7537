"""Compares low-rank exchanges and L-GreCo's choices with recorded runs, update by update."""

import functools

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.optim import goldens
from tests.parallel import powersgd_numpy

ENTRIES = [entry for entry in goldens.entries() if entry["family"] in ("powersgd", "lgreco")]
# Short test runs leave out two runs of L-GreCo's hook, which compile a measurement for each choice.
SHORT = [entry for entry in ENTRIES if entry["setting"] not in ("svd_rank4", "power_rank2")]
# Absolute tolerances of settings. L-GreCo's hook uses power iterations like PowerSGD: if gradients
# differ by half a unit in the last place, results in float32 differ by up to 1e-4.
ROUNDING = {"svd_rank4": 1e-3, "power_rank2": 1e-3}


@functools.cache
def tolerances(setting: str) -> dict[str, np.ndarray]:
    """Returns the tolerances of a setting of PowerSGD, computed once for all tests."""
    entry = goldens.find(family="powersgd", setting=setting)
    return powersgd_numpy.tolerances(entry, goldens.record(entry), goldens.inputs())


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_entry(entry) -> None:
    recorded = goldens.record(entry)
    actual = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    assert actual.keys() == recorded.keys()
    allowed = {}
    if entry["family"] == "powersgd":
        allowed = tolerances(entry["setting"])
        assert powersgd_numpy.excess(actual, recorded, allowed) <= 1
        # The record also agrees with `powersgd_numpy` in float64.
        exact = powersgd_numpy.run(entry, recorded, goldens.inputs(), np.float64)
        assert powersgd_numpy.excess(exact, recorded, allowed) <= 1
    atol = ROUNDING.get(entry["setting"], 1e-6)
    for key, values in actual.items():
        expected = recorded[key]
        assert np.shape(values) == expected.shape, key
        if expected.dtype.kind in "iU":
            np.testing.assert_array_equal(values, expected, err_msg=key)
        elif key.endswith("size"):
            np.testing.assert_array_equal(values, expected, err_msg=key)
        elif key in allowed:
            continue
        elif key.startswith(("agg/", "err", "output")):
            np.testing.assert_allclose(values, expected, rtol=0, atol=atol, err_msg=key)
            # In the first two rows, rounding errors are not yet amplified.
            np.testing.assert_allclose(values[:2], expected[:2], rtol=0, atol=3e-7, err_msg=key)
        else:
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=2e-8, err_msg=key)


@pytest.mark.parametrize(
    "setting, changes",
    [
        ("r2_nowarm", {"use_error_feedback": False}),
        ("r2_nowarm", {"start_powerSGD_iter": 3}),
        ("r1_noef", {"use_error_feedback": True}),
        ("wrapper_r2_start5_w2", {"start_compressing_after_num_steps": 6}),
        ("basic_r2_w1", {"num_iters_per_step": 2}),
        ("rankk_r2_fresh_w2", {"reuse_query": True}),
    ],
    ids=str,
)
def test_the_tolerance_rejects_another_setting(setting: str, changes: dict) -> None:
    entry = goldens.find(family="powersgd", setting=setting)
    recorded, inputs = goldens.record(entry), goldens.inputs()
    allowed = tolerances(setting)
    actual = FAMILIES["powersgd"](
        dict(entry, hyper=dict(entry["hyper"], **changes)), recorded, inputs
    )
    assert powersgd_numpy.excess({**recorded, **actual}, recorded, allowed) > 100


def test_the_tolerance_rejects_another_start() -> None:
    entry = goldens.find(family="powersgd", setting="basic_r2_w1")
    recorded, inputs = goldens.record(entry), goldens.inputs()
    allowed = tolerances("basic_r2_w1")
    # A start with the same span of columns leads to the same results.
    mixed = recorded["p0/1"] + np.float32(1e-3) * recorded["p0/1"][..., ::-1]
    actual = FAMILIES["powersgd"](entry, dict(recorded, **{"p0/1": mixed}), inputs)
    assert powersgd_numpy.excess(actual, recorded, allowed) <= 1
    shifted = recorded["p0/1"] + np.float32(1e-3)
    actual = FAMILIES["powersgd"](entry, dict(recorded, **{"p0/1": shifted}), inputs)
    assert powersgd_numpy.excess(actual, recorded, allowed) > 100


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_unknown_settings_are_errors(entry) -> None:
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES[entry["family"]](
            dict(entry, hyper=dict(entry["hyper"], warp_factor=9)),
            goldens.record(entry),
            goldens.inputs(),
        )


def test_a_hook_whose_smallest_rank_is_zero_is_not_repeated() -> None:
    entry = goldens.find(family="lgreco", setting="power_rank2")
    hyper = dict(entry["hyper"], matrix_approximation_rank=1)
    with pytest.raises(NotImplementedError, match="drops a layer"):
        FAMILIES["lgreco"](dict(entry, hyper=hyper), goldens.record(entry), {})

"""Recorded runs of low-rank exchanges and of L-GreCo's choices, update for update."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.optim import goldens
from tests.parallel import powersgd_numpy

ENTRIES = [entry for entry in goldens.entries() if entry["family"] in ("powersgd", "lgreco")]
# Of the hook's runs, which compile a measurement for each choice, one.
SHORT = [entry for entry in ENTRIES if entry["setting"] not in ("svd_rank4", "power_rank2")]
# L-GreCo's hook iterates as PowerSGD does: float32 programs whose gradients are half a unit in the
# last place off are up to 1e-4 from each other.
ROUNDING = {"svd_rank4": 1e-3, "power_rank2": 1e-3}


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_entry(entry) -> None:
    recorded = goldens.record(entry)
    found = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    assert found.keys() == recorded.keys()
    allowed = {}
    if entry["family"] == "powersgd":
        allowed = powersgd_numpy.tolerances(entry, recorded, goldens.inputs())
        assert powersgd_numpy.excess(found, recorded, allowed) <= 1
        # In float64 the algorithm of `powersgd_numpy` is the recorded one.
        exact = powersgd_numpy.run(entry, recorded, goldens.inputs(), np.float64)
        assert powersgd_numpy.excess(exact, recorded, allowed) <= 1
    atol = ROUNDING.get(entry["setting"], 1e-6)
    for key, values in found.items():
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
            # Before rounding is amplified.
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
    allowed = powersgd_numpy.tolerances(entry, recorded, inputs)
    found = FAMILIES["powersgd"](
        dict(entry, hyper=dict(entry["hyper"], **changes)), recorded, inputs
    )
    assert powersgd_numpy.excess({**recorded, **found}, recorded, allowed) > 100


def test_the_tolerance_rejects_another_start() -> None:
    entry = goldens.find(family="powersgd", setting="basic_r2_w1")
    recorded, inputs = goldens.record(entry), goldens.inputs()
    allowed = powersgd_numpy.tolerances(entry, recorded, inputs)
    # Columns that span the same start the same run.
    mixed = recorded["p0/1"] + np.float32(1e-3) * recorded["p0/1"][..., ::-1]
    found = FAMILIES["powersgd"](entry, dict(recorded, **{"p0/1": mixed}), inputs)
    assert powersgd_numpy.excess(found, recorded, allowed) <= 1
    shifted = recorded["p0/1"] + np.float32(1e-3)
    found = FAMILIES["powersgd"](entry, dict(recorded, **{"p0/1": shifted}), inputs)
    assert powersgd_numpy.excess(found, recorded, allowed) > 100


@pytest.mark.parametrize("entry", some(ENTRIES, SHORT), ids=goldens.label)
def test_a_setting_that_is_not_known_is_an_error(entry) -> None:
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

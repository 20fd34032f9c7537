"""Reproduces every recorded run of DeepSpeed's 1-bit optimizers at every update."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.optim import goldens

ENTRIES = [entry for entry in goldens.entries() if entry["family"] == "onebit"]
# One entry per implementation with several workers, and the only entry with one worker.
MAIN = [
    entry
    for entry in ENTRIES
    if entry["setting"] in ("w2", "warm_w2", "mask_w2", "single_w1", "dense_w2")
]


@pytest.mark.parametrize("entry", some(ENTRIES, MAIN), ids=goldens.label)
def test_every_array_of_a_record(entry):
    recorded = goldens.record(entry)
    actual = FAMILIES["onebit"](entry, recorded, goldens.inputs())
    assert actual.keys() == recorded.keys()
    for key, expected in recorded.items():
        assert actual[key].shape == expected.shape, key
        np.testing.assert_allclose(actual[key], expected, rtol=1e-7, atol=1e-6, err_msg=key)


def test_all_categories_are_recorded():
    goldens.need(15, ENTRIES, "the 1-bit optimizers")
    types = {(e["implementation"], e["hyper"]["world"]) for e in ENTRIES}
    assert len(ENTRIES) == 15 and {("onebit_lamb", 1), ("onebit_lamb", 4)} <= types


def test_excluded_runs_have_a_reason():
    entry = {"implementation": "zero_one_adam", "hyper": {"world": 1, "tensors": []}}
    with pytest.raises(NotImplementedError, match="discards every gradient between"):
        FAMILIES["onebit"](entry, {}, {})

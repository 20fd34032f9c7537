"""GNMT's logits, gradients and searches, and label smoothing, against the published code."""

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.marks import some
from tests.models.golden_gnmt import REPEATS
from tests.optim import goldens

ENTRIES = [
    entry
    for entry in goldens.entries()
    if entry["family"] == "legw_lstm" and entry["implementation"] in REPEATS
]
# `make test` leaves out the entry with the long sentences.
QUICK = [entry for entry in ENTRIES if not goldens.label(entry).endswith("_long")]


@pytest.mark.parametrize("entry", some(ENTRIES, QUICK), ids=goldens.label)
def test_as_published(entry: dict) -> None:
    recorded = goldens.record(entry)
    actual = FAMILIES["legw_lstm"](entry, recorded, {})
    given = (
        ("param/", "source", "target", "logits")
        if "gnmt/loss" in recorded
        else ("param/", "source", "target")
    )
    assert set(actual) == {key for key in recorded if not key.startswith(given)}
    for key, value in actual.items():
        assert value.shape == recorded[key].shape, key
        if recorded[key].dtype.kind == "i":
            np.testing.assert_array_equal(value, recorded[key], err_msg=key)
        else:
            np.testing.assert_allclose(value, recorded[key], atol=1e-5, rtol=1e-6, err_msg=key)


def test_there_are_entries() -> None:
    for name in REPEATS:
        goldens.find(family="legw_lstm", implementation=name)
    assert {entry["implementation"] for entry in ENTRIES} == set(REPEATS)


def test_another_implementation_is_rejected() -> None:
    with pytest.raises(ValueError, match="'mosesdecoder' is unknown; use one of mlperf_gnmt"):
        FAMILIES["legw_lstm"]({"implementation": "mosesdecoder"}, {}, {})


@pytest.mark.parametrize(
    "name", ["label_smoothing", "mlperf_gnmt", "ptb_batching", "torch_lstm_lm"]
)
def test_a_setting_that_is_not_known_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="warp_factor"):
        FAMILIES["legw_lstm"]({"implementation": name, "hyper": {"warp_factor": 9}}, {}, {})

"""Tests that the recorded layouts, perplexities and gradients of language models are reproduced."""

from typing import Any

import numpy as np
import pytest

from tests.golden_families import FAMILIES
from tests.models import golden_lstm
from tests.optim import goldens

LAYOUTS = [f"ptb_batching__{setting}" for setting in ("b3_t5", "b4_t5", "b7_t5")]
TRAININGS = [
    f"torch_lstm_lm__{setting}"
    for setting in ("h6_b7_t5_sum_clip5_bigw", "h8_b3_t5_mean_clip025", "h8_b4_t5_sum_clip5")
]


def repeated(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    entry = goldens.find(file=f"legw_lstm/{name}.npz")
    recorded = goldens.record(entry)
    return entry, recorded, FAMILIES["legw_lstm"](entry, recorded, {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_equal(name: str) -> None:
    _, recorded, actual = repeated(name)
    assert recorded.keys() - actual.keys() == {"text"}
    for key, value in actual.items():
        np.testing.assert_array_equal(value, recorded[key], err_msg=key)


@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_are_equal(name: str) -> None:
    entry, recorded, actual = repeated(name)
    assert recorded.keys() - actual.keys() == {"x", "y"}
    # Differences between the recorded run and a rerun in float64 NumPy; one entry has large weights.
    noise = max(entry["rederived_gradients_max_abs_diff"], entry["rederived_by_numpy_max_abs_diff"])
    for key, value in actual.items():
        scale = max(1.0, float(np.abs(recorded[key]).max()))
        within = max(3 * noise, 5e-6 * scale)
        np.testing.assert_allclose(value, recorded[key], rtol=0, atol=within, err_msg=key)


def test_the_entry_selects_another_rate_rule() -> None:
    hyper = {"lr": 2.0, "lr_decay": 0.5, "max_epoch": 0}
    rate = golden_lstm._rate(hyper, 3, 2)
    assert [float(rate(step)) for step in range(6)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    rate = golden_lstm._rate(hyper | {"max_epoch": 5}, 3, 2)
    assert float(rate(5)) == 2.0

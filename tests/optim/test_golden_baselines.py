"""Reproduces recorded runs of Lion, Muon and schedule-free AdamW with Optax's optimizers and our rules."""

import re

import numpy as np
import pytest

from tests.optim import golden_baselines, goldens

ENTRIES = [entry for entry in goldens.entries() if entry["family"] in golden_baselines.FAMILIES]


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_trajectory(entry):
    if golden_baselines.transform(entry, goldens.params()) is None:
        with pytest.raises(NotImplementedError, match=re.escape(golden_baselines.why_not(entry))):
            goldens.largest_differences(entry)
        return
    for key, difference in goldens.largest_differences(entry).items():
        assert difference <= (1e-12 if key.startswith("p64/") else 4e-6), key


def test_counts():
    goldens.need(18, ENTRIES, "Lion, Muon and schedule-free AdamW")
    repeated = [golden_baselines.transform(e, goldens.params()) is not None for e in ENTRIES]
    assert (sum(repeated), len(repeated) - sum(repeated)) == (11, 7)


def test_averages_are_compared_where_an_optimizer_is_evaluated_at_them():
    averaged = [
        e
        for e in ENTRIES
        if e["family"] == "schedule_free"
        and golden_baselines.transform(e, goldens.params()) is not None
    ]
    goldens.need(1, averaged, "schedule-free AdamW")
    for entry in averaged:
        recorded = goldens.record(entry)
        for name in goldens.params():
            moved = np.abs(recorded[f"eval32/{name}"] - recorded[f"p32/{name}"]).max()
            assert moved > 1e-3 or name == "no_grad/kernel"

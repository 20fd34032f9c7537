"""Recorded runs of Lion, Muon and schedule-free AdamW, repeated by Optax's under our rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from tests.optim import golden_baselines, goldens
from tests.shared import shared

FAMILIES = ("lion", "muon", "schedule_free")
ENTRIES = [entry for entry in goldens.entries() if entry["family"] in FAMILIES]


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_trajectory(entry):
    tx = golden_baselines.transform(entry, goldens.params())
    if tx is None:
        return
    assert max(goldens.largest_difference(tx, entry).values()) <= 4e-6
    with jax.enable_x64(True):
        tx = golden_baselines.transform(entry, goldens.params("float64"))
    assert max(goldens.largest_difference(tx, entry, "float64").values()) <= 1e-12


def test_counts():
    shared("golden", "index.json")
    repeated = [golden_baselines.transform(e, goldens.params()) is not None for e in ENTRIES]
    assert (sum(repeated), len(repeated) - sum(repeated)) == (10, 8)


@pytest.mark.parametrize("implementation", [
    "author_adamw_schedulefree", "author_adamw_schedulefree_reference"])
def test_evaluation_params_are_those_of_the_authors(implementation):
    entry = next((e for e in ENTRIES if e["implementation"] == implementation
                  and e["setting"] == "wd_warmup5"), None)
    recorded = goldens.record(entry) if entry else shared("golden", "index.json")
    params = goldens.params()
    tx = golden_baselines.transform(entry, params)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(1, 21):
        grads = {name: goldens.inputs()["wgrad/" + name][0, step - 1] for name in params}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found = optim.evaluation_params(state, params)
        for name, value in found.items():
            np.testing.assert_allclose(value, recorded["eval32/" + name][step], atol=2e-6)
    moved = max(float(jnp.abs(found[name] - params[name]).max()) for name in found)
    assert moved > 1e-3

"""Tests that each optimizer accepts its presets, and that LAMB's first steps are as published.

test_golden shows that the presets reproduce the implementations: its mappings start from presets.
"""

import inspect
import math

import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.factory import OPTIMIZERS
from lamb_tpu.optim.presets import PRESETS, preset
from tests.optim import golden_lamb

ALL = [(optimizer, name) for optimizer, table in PRESETS.items() for name in table]

# First update with learning rate 0.1, eps and weight decay 0 and a gradient of ones in four
# elements: from weights of 0, where the ratio is 1, and from weights of norm 20.
ROOT = math.sqrt(0.001)
FIRST_UPDATES = {
    "paper": (0.1, 1.0),
    "author": (0.1 * 0.1 / ROOT, 1.0),
    "tfa": (0.1, 1.0),
    "nvlamb": (0.1, 1.0),
    "apex": (0.1, 1.0),
    # The ratio 20 / (0.2 / ROOT) is 3.2, within bounds, and the step is corrected afterwards.
    "deepspeed": (0.1, ROOT / 0.1),
    "timm": (0.1, 1.0),
    "transformer_xl": (0.1 * 0.1 / ROOT, 0.5),  # the norm counts as 10
    "keras": (0.1, 1.0),
    "mlperf": (0.1, 1.0),
    "n_lamb": (0.1 * (0.9 * 0.1 / 0.19 + 1) / math.sqrt(0.999), 1.0),
    "nn_lamb": (0.1 * (0.9 * 0.1 / 0.19 + 1) / math.sqrt(0.999 * 0.001 / 0.001999 + 1), 1.0),
}


@pytest.mark.parametrize("optimizer, name", ALL)
def test_every_preset_is_accepted(optimizer, name):
    arguments = preset(optimizer, name)
    known = inspect.signature(OPTIMIZERS[optimizer]).parameters
    assert set(arguments) <= set(known) - {"learning_rate", "rules"}
    params = {"kernel": jnp.ones((4, 4))}
    tx = OPTIMIZERS[optimizer](0.1, **arguments)
    updates, _ = tx.update(params, tx.init(params), params)
    assert np.isfinite(updates["kernel"]).all()


@pytest.mark.parametrize("name", PRESETS["lamb"])
def test_first_updates_of_lamb(name):
    tx = optim.lamb(0.1, **preset("lamb", name) | {"weight_decay": 0.0, "eps": 0.0})
    params = {"zero": jnp.zeros(4), "ten": jnp.full(4, 10.0)}
    grads = {"zero": jnp.ones(4), "ten": jnp.ones(4)}
    updates, _ = tx.update(grads, tx.init(params), params)
    zero, ten = FIRST_UPDATES[name]
    np.testing.assert_allclose(updates["zero"], -zero, rtol=2e-5)
    np.testing.assert_allclose(updates["ten"], -ten, rtol=2e-5)


def test_limits_of_the_ratio_and_of_the_norm():
    grads = {"w": jnp.ones(4)}
    for name, expected in (("deepspeed", 10.0 * 0.1), ("transformer_xl", 0.5), ("paper", 10.0)):
        tx = optim.lamb(0.1, **preset("lamb", name) | {"weight_decay": 0.0, "eps": 0.0})
        params = {"w": jnp.full(4, 100.0)}
        updates, _ = tx.update(grads, tx.init(params), params)
        np.testing.assert_allclose(updates["w"], -expected, rtol=2e-5)


def test_decay_of_keras_is_beside_the_ratio():
    tx = optim.lamb(0.1, **preset("lamb", "keras") | {"weight_decay": 0.5})
    params = {"w": jnp.full(4, 10.0)}
    updates, _ = tx.update({"w": jnp.zeros(4)}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.1 * 0.5 * 10.0, rtol=1e-6)


def test_clipping_belongs_to_the_presets_that_have_it():
    clipping = {name for name, table in PRESETS["lamb"].items() if "clip_global_norm" in table}
    assert clipping == {"author", "nvlamb", "apex", "timm"}


def test_the_trajectories_are_repeated_by_way_of_presets(monkeypatch):
    used = []
    monkeypatch.setattr(golden_lamb, "preset", lambda *key: used.append(key) or preset(*key))
    hyper = {"lr": 0.1, "lr_schedule": "const", "weight_decay": 0.01}
    for implementation in golden_lamb.IMPLEMENTATIONS:
        used.clear()
        golden_lamb.transform(
            implementation, golden_lamb.Settings(hyper), {"kernel": jnp.ones((2, 2))}
        )
        assert used, implementation


def test_a_preset_is_a_copy():
    preset("lamb", "timm")["weight_decay"] = 9.0
    assert preset("lamb", "timm")["weight_decay"] == 0.01


@pytest.mark.parametrize(
    "optimizer, name, message",
    [
        ("lamb", "torch", "preset name='torch' is unknown; for lamb use one of paper"),
        ("adam", "paper", "'adam' has no presets, unlike .*lamb, lars"),
    ],
)
def test_unknown_presets(optimizer, name, message):
    with pytest.raises(ValueError, match=message):
        preset(optimizer, name)

"""LSTM layers against recorded PyTorch layers and against Flax."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.models.lstm import LSTM
from tests.golden_families import FAMILIES
from tests.optim import goldens

STEPS, BATCH, INPUTS, FEATURES = 6, 3, 5, 4
ENTRIES = [e for e in goldens.entries() if e["implementation"] == "torch_lstm_classifier"]


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (STEPS, BATCH, INPUTS))


@pytest.mark.parametrize("entry", ENTRIES, ids=goldens.label)
def test_rows_of_an_image_as_torch(entry: dict[str, Any]) -> None:
    recorded = goldens.record(entry)
    actual = FAMILIES[entry["family"]](entry, recorded, goldens.inputs())
    compared = {key for key in recorded if key.startswith(("grad32/", "logits", "loss"))}
    assert actual.keys() == compared and len(compared) >= 8
    for key, value in actual.items():
        assert value.shape == recorded[key].shape
        np.testing.assert_allclose(value, recorded[key], atol=1e-6, err_msg=key)


def test_an_unknown_setting_is_rejected() -> None:
    entry = goldens.find(implementation="torch_lstm_classifier")
    entry["hyper"]["bidirectional"] = True
    with pytest.raises(ValueError, match="bidirectional"):
        FAMILIES[entry["family"]](entry, goldens.record(entry), goldens.inputs())


@pytest.mark.parametrize("reverse", [False, True])
def test_as_flax(reverse: bool) -> None:
    lengths = jnp.array([6, 4, 1])
    layer = LSTM(FEATURES, reverse=reverse)
    params = layer.init(jax.random.key(1), inputs())["params"]
    valid = jnp.arange(STEPS)[:, None] < lengths
    outputs, last = layer.apply({"params": params}, inputs(), valid=valid)
    kernels = np.split(np.asarray(params["input_kernel"]), 4, -1)
    hiddens = np.split(np.asarray(params["hidden_kernel"]), 4, -1)
    biases = np.split(np.asarray(params["bias"]), 4)
    cell = {
        **{f"i{gate}": {"kernel": kernel} for gate, kernel in zip("ifgo", kernels, strict=True)},
        **{
            f"h{gate}": {"kernel": kernel, "bias": bias}
            for gate, kernel, bias in zip("ifgo", hiddens, biases, strict=True)
        },
    }
    peer = nn.RNN(
        nn.OptimizedLSTMCell(FEATURES),
        reverse=reverse,
        keep_order=True,
        return_carry=True,
        time_major=True,
    )
    (carried, _), expected = peer.apply({"params": {"cell": cell}}, inputs(), seq_lengths=lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(outputs[:length, row], expected[:length, row], atol=1e-6)
    np.testing.assert_allclose(last.cell, carried, atol=1e-6)


def test_a_sequence_in_two_segments() -> None:
    layer = LSTM(FEATURES)
    variables = layer.init(jax.random.key(1), inputs())
    full, last = layer.apply(variables, inputs())
    first, carry = layer.apply(variables, inputs()[:4])
    second, end = layer.apply(variables, inputs()[4:], carry)
    np.testing.assert_array_equal(np.concatenate([first, second]), full)
    np.testing.assert_array_equal(end.cell, last.cell)


def test_initial_values() -> None:
    layer = LSTM(FEATURES, init_scale=0.05, forget_bias=1.0)
    params = layer.init(jax.random.key(1), inputs())["params"]
    assert {name: value.shape for name, value in params.items()} == {
        "input_kernel": (INPUTS, 16),
        "hidden_kernel": (FEATURES, 16),
        "bias": (16,),
    }
    assert 0.03 < np.abs(params["hidden_kernel"]).max() <= 0.05
    bias = params["bias"] - np.repeat([0, 1, 0, 0], FEATURES)
    assert np.abs(bias).max() <= 0.05
    wide = LSTM(FEATURES).init(jax.random.key(1), inputs())["params"]["hidden_kernel"]
    assert 0.3 < np.abs(wide).max() <= 0.5

"""Reproduces recorded PyTorch LSTMs that read images row by row: logits, loss and gradients."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.models.lstm import RowLSTM
from tests.models.lstm_layouts import from_torch, to_torch
from tests.optim.golden_common import Settings

# PyTorch's names of an LSTM layer's weights -> the recorded names.
_LAYER = {
    "weight_ih_l0": "w_ih",
    "weight_hh_l0": "w_hh",
    "bias_ih_l0": "b_ih",
    "bias_hh_l0": "b_hh",
}
# Our dense layers -> prefixes of the recorded names.
_DENSE = {"output": "out", "transform": "tr"}


def repeat(
    entry: Mapping[str, Any], recorded: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the logits, loss and gradients of an entry's network, see `tests.golden_families`."""
    settings = Settings(entry["hyper"])
    shape = tuple(settings.take(name) for name in ("batch", "rows", "columns"))
    network = RowLSTM(
        num_classes=settings.take("classes"),
        features=settings.take("hidden"),
        transform=settings.take("transform_layer") or 0,
    )
    settings.legend("arrays")
    settings.check_empty(entry["implementation"])
    images = jnp.asarray(recorded["x"]).reshape(*shape, 1)

    @jax.jit
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = network.apply({"params": params}, images, train=True)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, recorded["y"])
        return each.mean(), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(_params(recorded))
    actual = {"logits": logits, "loss": value}
    layer = to_torch(grads["lstm"])
    # The gradient of each of PyTorch's two biases equals the gradient of their sum.
    layer["bias_hh_l0"] = layer["bias_ih_l0"]
    actual |= {f"grad32/{short}": layer[name] for name, short in _LAYER.items()}
    for name, short in _DENSE.items():
        if name in grads:
            actual[f"grad32/{short}_w"] = grads[name]["kernel"].T
            actual[f"grad32/{short}_b"] = grads[name]["bias"]
    return {key: np.asarray(value) for key, value in actual.items()}


def _params(recorded: Mapping[str, np.ndarray]) -> dict[str, Any]:
    params: dict[str, Any] = {
        "lstm": from_torch({name: recorded[f"param/{short}"] for name, short in _LAYER.items()})
    }
    for name, short in _DENSE.items():
        if f"param/{short}_w" in recorded:
            params[name] = {
                "kernel": recorded[f"param/{short}_w"].T,
                "bias": recorded[f"param/{short}_b"],
            }
    return params

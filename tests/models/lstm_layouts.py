"""Converts parameters of an LSTM layer from and to the layouts of PyTorch and TensorFlow."""

from collections.abc import Mapping

import numpy as np

from lamb_tpu.kernels.recurrence import GATES


def from_torch(weights: Mapping[str, np.ndarray], suffix: str = "_l0") -> dict[str, np.ndarray]:
    """Converts a layer of PyTorch's nn.LSTM to the parameters of `LSTM`.

    Args:
      weights: `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`, each with the suffix.
      suffix: the suffix of the layer, such as '_l1' or '_l0_reverse'.
    """
    return {
        "input_kernel": np.transpose(weights["weight_ih" + suffix]),
        "hidden_kernel": np.transpose(weights["weight_hh" + suffix]),
        "bias": weights["bias_ih" + suffix] + weights["bias_hh" + suffix],
    }


def to_tensorflow(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns `kernel` and `bias` of TensorFlow's BasicLSTMCell with forget_bias=0."""

    def reordered(array: np.ndarray) -> np.ndarray:
        i, f, g, o = np.split(np.asarray(array), GATES, axis=-1)
        return np.concatenate([i, g, f, o], axis=-1)

    kernel = np.concatenate([params["input_kernel"], params["hidden_kernel"]])
    return {"kernel": reordered(kernel), "bias": reordered(params["bias"])}


def to_torch(params: Mapping[str, np.ndarray], suffix: str = "_l0") -> dict[str, np.ndarray]:
    """Returns the weights of a layer of PyTorch's nn.LSTM; its second bias is zero."""
    return {
        "weight_ih" + suffix: np.transpose(params["input_kernel"]),
        "weight_hh" + suffix: np.transpose(params["hidden_kernel"]),
        "bias_ih" + suffix: np.asarray(params["bias"]),
        "bias_hh" + suffix: np.zeros_like(params["bias"]),
    }

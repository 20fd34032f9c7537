"""Layers in float64 NumPy, and random variables for tests of networks."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def conv(
    x: np.ndarray, kernel: np.ndarray, stride: int = 1, pads: tuple[Any, Any] = ((0, 0), (0, 0))
) -> np.ndarray:
    """Convolves (n, h, w, c) by (y, x, c, outputs), or depthwise by (y, x, 1, c) if c is not 1."""
    x = np.pad(x.astype(np.float64), ((0, 0), *pads, (0, 0)))
    size = kernel.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(x, size, (1, 2))[:, ::stride, ::stride]
    if kernel.shape[2] != x.shape[3]:
        return np.einsum("nhwcyx,yxc->nhwc", windows, kernel[:, :, 0])
    return np.tensordot(windows, kernel.astype(np.float64).transpose(2, 0, 1, 3), 3)


def max_pool(x: np.ndarray, size: int, stride: int, pad: int = 0) -> np.ndarray:
    """Returns the maximum over windows, without pixels outside the image."""
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return windows[:, ::stride, ::stride].max((-1, -2))


def norm(x: np.ndarray, params: Any, stats: Any, epsilon: float) -> np.ndarray:
    """Normalises by running averages."""
    return params["scale"] * (x - stats["mean"]) / np.sqrt(stats["var"] + epsilon) + params["bias"]


def variables(module: nn.Module, images: np.ndarray, gain: float = 1.0) -> Any:
    """Returns random variables without zeros and ones that could hide an error.

    `gain` scales the kernels, so that activations have a similar size in all layers.
    """
    shapes = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), images)
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        kind = path[-1].key
        if kind == "kernel":
            value = gain * rng.normal(size=leaf.shape) * np.sqrt(2 / np.prod(leaf.shape[:-1]))
        elif kind in ("scale", "var"):
            value = rng.uniform(0.5, 1.5, leaf.shape)
        else:
            value = rng.normal(size=leaf.shape) * 0.3
        return value.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def dense(params: Any, x: np.ndarray) -> np.ndarray:
    return x @ params["kernel"] + params["bias"]


def layer_norm(params: Any, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return centred / deviation * params["scale"] + params["bias"]


def gelu(x: np.ndarray, form: str = "erf") -> np.ndarray:
    if form == "erf":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def normal_variables(module: nn.Module, *inputs: Any) -> Any:
    """Returns random normal variables, so that biases and LayerNorm do not have their initial values."""
    init = functools.partial(module.init, train=False)
    shapes = jax.eval_shape(init, jax.random.key(0), *inputs)
    rng = np.random.default_rng(7)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = float("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def check_forward(module: nn.Module, variables: Any, images: np.ndarray, expected: Any) -> None:
    """Compares an image network's logits with those of a NumPy forward pass."""
    actual = jax.jit(lambda v, x: module.apply(v, x, train=False))(variables, images)
    assert np.std(expected[0] - expected[1]) > 0.1
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)

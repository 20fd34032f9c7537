"""Layers of image networks in NumPy and float64, and variables to try them with."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np


def conv(
    x: np.ndarray, kernel: np.ndarray, stride: int = 1, pads: tuple[Any, Any] = ((0, 0), (0, 0))
) -> np.ndarray:
    """(n, h, w, c) by (y, x, c, outputs), or depthwise by (y, x, 1, c) where c is not 1."""
    x = np.pad(x.astype(np.float64), ((0, 0), *pads, (0, 0)))
    size = kernel.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(x, size, (1, 2))[:, ::stride, ::stride]
    if kernel.shape[2] != x.shape[3]:
        return np.einsum("nhwcyx,yxc->nhwc", windows, kernel[:, :, 0])
    return np.tensordot(windows, kernel.astype(np.float64).transpose(2, 0, 1, 3), 3)


def max_pool(x: np.ndarray, size: int, stride: int, pad: int = 0) -> np.ndarray:
    """Maximum over windows; outside the image there is nothing."""
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (1, 2))
    return windows[:, ::stride, ::stride].max((-1, -2))


def norm(x: np.ndarray, params: Any, stats: Any, epsilon: float) -> np.ndarray:
    """By running averages."""
    return params["scale"] * (x - stats["mean"]) / np.sqrt(stats["var"] + epsilon) + params["bias"]


def variables(module: nn.Module, images: np.ndarray, gain: float = 1.0) -> Any:
    """Random ones: nothing is 0 or 1 that could hide a mistake.

    With the right gain of kernels activations neither grow nor vanish from layer to layer.
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

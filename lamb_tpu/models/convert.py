"""Converts weights of image networks from and to the layout of timm and torchvision."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from lamb_tpu import models
from lamb_tpu.errors import UserError, listed
from lamb_tpu.files import tensors as tensors_lib

# timm's names -> ours. The tensors of timm's efficientnet_b*, without the prefix tf_, have the same
# names and shapes, but these networks pad equally on both sides and have another BatchNorm epsilon.
NETWORKS = {f"tf_efficientnet_b{index}": f"efficientnet_b{index}" for index in range(8)} | {
    f"resnet{layers}": f"resnet{layers}" for layers in (18, 34, 50, 101, 152)
}

_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}
_RESNET = {
    "stem_conv": "conv1",
    "stem_norm": "bn1",
    "output": "fc",
    "projection": "downsample.0",
    "projection_norm": "downsample.1",
}
_EFFICIENTNET = {
    "stem_conv": "conv_stem",
    "stem_norm": "bn1",
    "head_conv": "conv_head",
    "head_norm": "bn2",
    "output": "classifier",
    "squeeze_excite/reduce": "se.conv_reduce",
    "squeeze_excite/expand": "se.conv_expand",
}
# Names within blocks with and without an expanding convolution. timm numbers the norms in the order
# of the convolutions, so blocks without expansion have other numbers.
_EXPANDING = {
    "expand": "conv_pw",
    "expand_norm": "bn1",
    "depthwise": "conv_dw",
    "depthwise_norm": "bn2",
    "project": "conv_pwl",
    "project_norm": "bn3",
}
_PLAIN = {
    "depthwise": "conv_dw",
    "depthwise_norm": "bn1",
    "project": "conv_pw",
    "project_norm": "bn2",
}


def from_timm(
    name: str, tensors: Mapping[str, Any] | str | os.PathLike[str]
) -> dict[str, dict[str, Any]]:
    """Converts weights from timm or torchvision to the variables of our network.

    Args:
      name: the network's name in timm or torchvision, a key of `NETWORKS`. A tag after a dot, which
        describes the training ('resnet50.a1_in1k'), is ignored.
      tensors: the state dict, with any arrays that `np.asarray` accepts, such as PyTorch tensors on
        the CPU; or the path of a .safetensors file or of an index of shards. The pixels must be
        normalised as in training: timm's `pretrained_cfg` has the mean and standard deviation.

    Returns:
      'params' and 'batch_stats' of `models.build(NETWORKS[name], num_classes=...)`, as float32
      NumPy arrays. The shape of the output layer determines the number of classes.

    Raises:
      UserError: the name is unknown, the file cannot be read, or a tensor is missing, unexpected,
        not finite or has the wrong shape.
    """
    known = _known(name)
    where = "the state dict"
    if isinstance(tensors, str | os.PathLike):
        where, tensors = str(tensors), tensors_lib.load(pathlib.Path(tensors))
    else:
        tensors_lib.check_finite(tensors, where)
    # Infer the number of classes from the tensors, so that fine-tuned heads work too.
    output = "fc.bias" if known.startswith("resnet") else "classifier.bias"
    # A missing or scalar tensor is reported below.
    num_classes = (*np.shape(tensors.get(output, ())), 0)[0] or 1000
    shapes, names = _layout(NETWORKS[known], num_classes)
    missing = [item for item in names.values() if item not in tensors]
    if missing:
        raise tensors_lib.differ(where, "lacks", missing)
    # PyTorch's BatchNorm also stores the number of batches, which our BatchNorm does not need.
    ours = {*names.values()}
    extra = [
        item for item in tensors if item not in ours and not item.endswith(".num_batches_tracked")
    ]
    if extra:
        raise tensors_lib.differ(where, "also has", extra)
    leaves = {}
    for path, shape in shapes.items():
        item = names[path]
        tensor, expected = np.asarray(tensors[item]), _their_shape(item, shape)
        if tensor.shape != expected:
            problem = f"has {item} of shape {tensor.shape}"
            raise UserError(where, ..., problem, f"use shape {expected}, as in {known}")
        leaves[path] = _ours(tensor.astype(np.float32), shape)
    return unflatten_dict(leaves, sep="/")


def _known(name: str) -> str:
    """Returns timm's name without its tag; rejects networks that are not in `NETWORKS`."""
    known = name.partition(".")[0]
    if known not in NETWORKS:
        # Without tf_, the name is that of another timm network, with different padding.
        near = f"; did you mean tf_{known}, which is padded differently?"
        remedy = f"use {listed(NETWORKS)}{near if f'tf_{known}' in NETWORKS else ''}"
        raise UserError(f"timm's network {name!r}", ..., "cannot be read", remedy)
    return known


def to_timm(name: str, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Converts a network's variables to timm's state dict; the inverse of `from_timm`.

    Args:
      name: as in `from_timm`.
      variables: 'params' and 'batch_stats' of `models.build(NETWORKS[name], num_classes=...)`.

    Returns:
      float32 NumPy arrays by timm's names, without `num_batches_tracked` of BatchNorm, which timm and
      torchvision do not need.

    Raises:
      UserError: the name is unknown; or a leaf is missing, unexpected or has the wrong shape, for
        example because the network's fields are not those of timm's network.
    """
    known = _known(name)
    actual = flatten_dict({key: variables[key] for key in ("params", "batch_stats")}, sep="/")
    num_classes = np.shape(actual.get("params/output/bias", np.empty(1)))[0]
    expected, names = _layout(NETWORKS[known], num_classes)
    shapes = {path: np.shape(leaf) for path, leaf in actual.items()}
    different = [
        f"{path} is {_describe(shapes.get(path))}, but {_describe(expected.get(path))} in {known}"
        for path in sorted(shapes.keys() | expected.keys())
        if shapes.get(path) != expected.get(path)
    ]
    if different:
        problem = f"are not those of {known}: {'; '.join(different[:4])}"
        raise UserError("these variables", ..., problem, "use a network with timm's fields")
    return {
        names[path]: _theirs(names[path], np.asarray(leaf, np.float32))
        for path, leaf in actual.items()
    }


def _describe(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {shape}"


def _layout(network: str, num_classes: int) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Returns the shape and timm's name of each of our variables, as two dicts by '/'-joined path."""
    model = models.build(network, num_classes=num_classes)
    # Shapes do not depend on the size of the image or the batch.
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    variables = flatten_dict(jax.eval_shape(model.init, jax.random.key(0), image), sep="/")
    expanding = {path.split("/")[1] for path in variables if "/expand_norm/" in path}
    names = {path: _name(path, network, expanding) for path in variables}
    return {path: leaf.shape for path, leaf in variables.items()}, names


def _name(path: str, network: str, expanding: set[str]) -> str:
    """Converts our path to timm's name; `expanding` names the blocks that expand channels."""
    _, *modules, leaf = path.split("/")
    block = re.fullmatch(r"stage(\d+)_block(\d+)", modules[0])
    inner = "/".join(modules[1:] if block else modules)
    resnet = network.startswith("resnet")
    if resnet:
        theirs = _RESNET.get(inner) or inner.replace("norm", "bn")
    elif block:
        block_names = _EXPANDING if modules[0] in expanding else _PLAIN
        theirs = {**_EFFICIENTNET, **block_names}[inner]
    else:
        theirs = _EFFICIENTNET[inner]
    if block:
        # Our stages and blocks count from 1. timm's and torchvision's blocks count from 0; their
        # stages count from 1 in a ResNet and from 0 in an EfficientNet.
        stage, index = int(block[1]), int(block[2]) - 1
        outer = f"layer{stage}" if resnet else f"blocks.{stage - 1}"
        theirs = f"{outer}.{index}.{theirs}"
    return f"{theirs}.{_LEAVES[leaf]}"


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns timm's shape: outputs come first, and squeeze-excite has 1x1 convolutions."""
    if len(shape) == 4:
        height, width, inputs, outputs = shape
        return outputs, inputs, height, width
    if len(shape) == 2:
        return (*shape[::-1], 1, 1) if ".se." in name else shape[::-1]
    return shape


def _ours(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    # PyTorch's kernels are (outputs, inputs, height, width). The reshape removes the two axes of
    # squeeze-excite's 1x1 convolutions.
    axes = (2, 3, 1, 0) if tensor.ndim == 4 else range(tensor.ndim)[::-1]
    return np.ascontiguousarray(tensor.transpose(axes)).reshape(shape)


def _theirs(name: str, leaf: np.ndarray) -> np.ndarray:
    axes = (3, 2, 0, 1) if leaf.ndim == 4 else range(leaf.ndim)[::-1]
    return np.ascontiguousarray(leaf.transpose(axes)).reshape(_their_shape(name, leaf.shape))

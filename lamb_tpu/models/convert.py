"""Weights of image networks in the layout of timm and torchvision."""

import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from lamb_tpu import models
from lamb_tpu.errors import UserError
from lamb_tpu.files import tensors as tensors_lib

# timm's names -> ours. timm's efficientnet_b* without tf_ have tensors of the same names and
# shapes, but pad equally on both sides and have another epsilon of BatchNorm.
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
# Names within blocks with and without a convolution that expands.
# timm numbers the norms in the order of the convolutions, so a block without expansion has other
# numbers.
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
    """Returns the variables of a network from weights of timm or torchvision.

    Args:
      name: name of timm or torchvision, one of `NETWORKS`. A tag after a dot, as in
        'resnet50.a1_in1k', says how the network was trained and is ignored.
      tensors: the state dict, with anything that `np.asarray` takes, such as PyTorch's tensors on
        the CPU; or the path of a .safetensors file or of an index of shards. Weights differ in the
        pixels they expect: timm's `pretrained_cfg` has their mean and standard deviation.

    Returns:
      'params' and 'batch_stats' of `models.build(NETWORKS[name], num_classes=...)`, as float32
      NumPy arrays; the output's shape gives the number of classes.

    Raises:
      UserError: the name is unknown, the file cannot be read, or a tensor is missing, superfluous,
        not finite or of another shape than the network's.
    """
    known = _known(name)
    where = "the state dict"
    if isinstance(tensors, str | os.PathLike):
        where, tensors = str(tensors), tensors_lib.load(pathlib.Path(tensors))
    else:
        tensors_lib.check_finite(tensors, where)
    # The number of classes is read from the tensors, so that fine-tuned heads fit too.
    output = "fc.bias" if known.startswith("resnet") else "classifier.bias"
    # A tensor that is missing or has no axis is reported below.
    num_classes = (*np.shape(tensors.get(output, ())), 0)[0] or 1000
    shapes, treedef = _expected(NETWORKS[known], num_classes)
    missing = [item for item in shapes if item not in tensors]
    if missing:
        raise UserError(f"{where} lacks {len(missing)} tensor(s): {', '.join(missing[:4])}")
    extra = [
        item
        for item in tensors
        # PyTorch's BatchNorm counts its batches; the running averages here need no count.
        if item not in shapes and not item.endswith(".num_batches_tracked")
    ]
    if extra:
        raise UserError(f"{where} has {len(extra)} tensor(s) too many: {', '.join(extra[:4])}")
    leaves = []
    for item, shape in shapes.items():
        tensor, expected = np.asarray(tensors[item]), _their_shape(item, shape)
        if tensor.shape != expected:
            raise UserError(
                f"{where} has {item} of shape {tensor.shape}; of {known} it must be {expected}"
            )
        leaves.append(_ours(tensor.astype(np.float32), shape))
    return jax.tree.unflatten(treedef, leaves)


def _known(name: str) -> str:
    """Returns timm's name without its tag; refuses networks that are not in `NETWORKS`."""
    known = name.partition(".")[0]
    if known not in NETWORKS:
        # timm has the name without tf_ too, for a network that is padded differently.
        near = f"; did you mean tf_{known}, which is padded differently?"
        raise UserError(
            f"weights of {name!r} cannot be read; those of timm that can: {', '.join(NETWORKS)}"
            f"{near if f'tf_{known}' in NETWORKS else ''}"
        )
    return known


def to_timm(name: str, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns timm's state dict of a network from its variables; the inverse of `from_timm`.

    Args:
      name: timm's name, one of `NETWORKS`.
      variables: 'params' and 'batch_stats' of `models.build(NETWORKS[name], num_classes=...)`.

    Returns:
      float32 NumPy arrays by timm's names, without the counts of batches, which timm and
      torchvision do not need.

    Raises:
      UserError: the name is unknown; or a leaf is missing, superfluous or of another shape, such as
        in a network with other fields than timm's.
    """
    known = _known(name)
    found = _flat({key: variables[key] for key in ("params", "batch_stats")})
    num_classes = np.shape(found.get("params/output/bias", np.empty(1)))[0]
    network = NETWORKS[known]
    expected = _flat(_variables(network, num_classes))
    # Both trees are flattened to paths, so that missing, superfluous and misshapen leaves are found
    # by one comparison.
    names = _names(expected, network)
    different = [
        f"{path} is {_describe(found.get(path))}, there {_describe(expected.get(path))}"
        for path in sorted(found.keys() | expected.keys())
        if _describe(found.get(path)) != _describe(expected.get(path))
    ]
    if different:
        raise UserError(f"these variables are not those of {known}: {'; '.join(different[:4])}")
    return {
        names[path]: _theirs(names[path], np.asarray(leaf, np.float32))
        for path, leaf in found.items()
    }


def _describe(leaf: Any) -> str:
    return "missing" if leaf is None else f"of shape {tuple(np.shape(leaf))}"


def _expected(network: str, num_classes: int) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Returns their name -> our shape of every leaf, and our tree."""
    tree = _variables(network, num_classes)
    flat = _flat(tree)
    names = _names(flat, network)
    # Both follow the order of the leaves, so that `tree.unflatten` restores the tree.
    return {names[path]: leaf.shape for path, leaf in flat.items()}, jax.tree.structure(tree)


def _variables(network: str, num_classes: int) -> Any:
    """Returns the shapes of the network's variables."""
    model = models.build(network, num_classes=num_classes)
    # No shape depends on the size of the image or of the batch.
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    return jax.eval_shape(model.init, jax.random.key(0), image)


def _flat(tree: Any) -> dict[str, Any]:
    """Returns leaves by '/'-joined paths, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _names(paths: Iterable[str], network: str) -> dict[str, str]:
    """Returns our path -> their name."""
    expanding = {path.split("/")[1] for path in paths if "/expand_norm/" in path}
    return {path: _name(path, network, expanding) for path in paths}


def _name(path: str, network: str, expanding: set[str]) -> str:
    """Returns their name of our 'collection/module/.../leaf'; `expanding` are blocks that expand."""
    _, *modules, leaf = path.split("/")
    block = re.fullmatch(r"stage(\d+)_block(\d+)", modules[0])
    inner = "/".join(modules[1:] if block else modules)
    resnet = network.startswith("resnet")
    if resnet:
        theirs = _RESNET.get(inner) or inner.replace("norm", "bn")
    elif block:
        of_block = _EXPANDING if modules[0] in expanding else _PLAIN
        theirs = {**_EFFICIENTNET, **of_block}[inner]
    else:
        theirs = _EFFICIENTNET[inner]
    if block:
        # Our stages and blocks count from 1. timm's and torchvision's blocks count from 0; stages
        # count from 1 in a ResNet and from 0 in an EfficientNet.
        stage, index = int(block[1]), int(block[2]) - 1
        theirs = (
            f"layer{stage}.{index}.{theirs}" if resnet else (f"blocks.{stage - 1}.{index}.{theirs}")
        )
    return f"{theirs}.{_LEAVES[leaf]}"


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns their shape: outputs first, and squeeze-excite's dense layers as 1x1 convolutions."""
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

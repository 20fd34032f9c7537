"""Tensors of published weights, in one .safetensors file or in several shards with an index."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # in transformers' format; maps each tensor to its shard
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".tar")
_OTHERS = {".h5": "Keras", ".msgpack": "Flax", ".onnx": "ONNX", ".gguf": "llama.cpp"}

_MIXED = "use an index and shards that were saved together"


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder's model.safetensors, else its index of shards; None if it has neither."""
    return next((folder / name for name in (WEIGHTS, INDEX) if (folder / name).exists()), None)


def load(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a .safetensors file, or of all shards that an index (.json) lists."""
    if not file.is_file():
        raise UserError(file, ..., "is missing", "give an existing file of weights")
    tensors = _load_shards(file) if file.suffix == ".json" else _load(file)
    check_finite(tensors, str(file))
    return tensors


def check_finite(tensors: Mapping[str, Any], where: str) -> None:
    """Raises a UserError that names the first tensors with NaN or infinity, if there are any."""
    wrong = [name for name, tensor in tensors.items() if not _is_finite(np.asarray(tensor))]
    if wrong:
        problem = f"has NaN or infinity in {len(wrong)} tensor(s): {', '.join(wrong[:4])}"
        raise UserError(where, ..., problem, "use weights from before the run diverged")


def differ(where: object, verb: str, names: Sequence[str]) -> UserError:
    """Returns the error for tensors that only one of the network and the file of weights has."""
    problem = f"{verb} {len(names)} tensor(s): {', '.join(names[:4])}"
    return UserError(where, ..., problem, "use the weights of this network")


def check_format(file: pathlib.Path, key: str) -> None:
    """Rejects weights that are not in safetensors, such as PyTorch's pickles, which may run code."""
    if file.suffix in _PICKLES:
        raise UserError(
            f"{key}: {file}",
            ...,
            "is a PyTorch pickle, which is not supported",
            "convert it where PyTorch is installed: safetensors.torch.save_file(torch.load("
            f"{file.name!r}, weights_only=True), {WEIGHTS!r})",
        )
    if file.suffix in _OTHERS:
        problem = f"is a {_OTHERS[file.suffix]} file, which is not supported"
        remedy = f"convert it to {WEIGHTS}"
        raise UserError(f"{key}: {file}", ..., problem, remedy)


def _is_finite(array: np.ndarray) -> bool:
    # Integers and Booleans are finite. Extension types such as bfloat16 have dtype.kind 'V'.
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _load(file: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:  # OSError: a folder, or no permission
        remedy = "copy or save it again"
        raise unreadable(file, error, remedy, "is not a complete safetensors file") from None


def _load_shards(index: pathlib.Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for shard, names in _shards(index).items():
        file = index.parent / shard
        if not file.is_file():
            problem = f"names the shard {shard}, which is missing"
            raise UserError(index, ..., problem, "copy the shard into the same folder")
        shard_tensors = _load(file)
        for name in names - shard_tensors.keys():
            problem = f"expects {shard} to contain the tensor {name}, which that file lacks"
            raise UserError(index, ..., problem, _MIXED)
        for name in shard_tensors.keys() - names:
            problem = f"has the tensor {name}, but {index.name} does not map it to this file"
            raise UserError(file, ..., problem, _MIXED)
        tensors |= shard_tensors
    return tensors


def _shards(index: pathlib.Path) -> dict[str, set[str]]:
    """Returns shard file name -> names of the shard's tensors, in the order of the index."""
    try:
        content = reading.read_json(index)
    except ValueError as error:
        raise unreadable(index, error, "copy or save it again", "is not JSON") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problem = "has no weight_map that maps tensor names to files"
        raise UserError(index, ..., problem, "copy or save it again")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        # The index may be untrusted, so a shard must be a file in the same folder.
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or any(character in shard for character in "/\\:\0")
        ):
            problem = f"maps the tensor {name} to {shard!r}, which is not a valid shard"
            raise UserError(index, ..., problem, "name a .safetensors file in the same folder")
        shards.setdefault(shard, set()).add(name)
    return shards

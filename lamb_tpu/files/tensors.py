"""Published tensors: a .safetensors file, or shards of them with an index."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # of transformers: tensor -> the shard that has it
_PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".tar")
_OTHERS = {".h5": "Keras", ".msgpack": "Flax", ".onnx": "ONNX", ".gguf": "llama.cpp"}


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder's model.safetensors, else its index of shards; None if it has neither."""
    return next((folder / name for name in (WEIGHTS, INDEX) if (folder / name).exists()), None)


def load(file: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a .safetensors file, or of all shards that an index names.

    Args:
      file: the file; one that ends in .json is an index.

    Raises:
      UserError: the file or a shard is missing or damaged, the index and its shards disagree, or a
        tensor has values that are not finite.
    """
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    tensors = _load_shards(file) if file.suffix == ".json" else _load(file)
    check_finite(tensors, str(file))
    return tensors


def check_finite(tensors: Mapping[str, Any], where: str) -> None:
    """Raises UserError with the names of the tensors that have a NaN or an infinity."""
    wrong = [name for name, tensor in tensors.items() if not _is_finite(np.asarray(tensor))]
    if wrong:
        raise UserError(
            f"{where} has values that are not finite (NaN or infinity) in {len(wrong)} tensor(s): "
            f"{', '.join(wrong[:4])}; use weights from before the run diverged"
        )


def check_format(file: pathlib.Path, key: str) -> None:
    """Rejects other formats of weights, such as PyTorch's pickles, which may run code.

    Raises:
      UserError: the file has another format; the message begins with `key`, which names the flag
        or config key.
    """
    if file.suffix in _PICKLES:
        raise UserError(
            f"{key}: {file} is a pickle of PyTorch's, which is not read here; where PyTorch is, "
            f"convert it: safetensors.torch.save_file(torch.load({file.name!r}, "
            f"weights_only=True), {WEIGHTS!r})"
        )
    if file.suffix in _OTHERS:
        raise UserError(
            f"{key}: {file} is a file of {_OTHERS[file.suffix]}, which is not read here; save the "
            f"network as {WEIGHTS} with the library that wrote it"
        )


def _is_finite(array: np.ndarray) -> bool:
    # Integers and Booleans are finite. Extension types such as bfloat16 have the kind 'V'.
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _load(file: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:  # a folder, no right to read it
        raise UserError(f"{file} is no complete safetensors file ({error})") from None


def _load_shards(index: pathlib.Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for shard, names in _shards(index).items():
        file = index.parent / shard
        if not file.is_file():
            raise UserError(f"{index} names the shard {shard}, which is missing; copy it there too")
        found = _load(file)
        for name in names - found.keys():
            raise UserError(f"{index} says that {shard} has the tensor {name}, which it lacks")
        for name in found.keys() - names:
            raise UserError(
                f"{file} has the tensor {name}, which {index.name} does not place there; the "
                "index and the shards belong to different checkpoints"
            )
        tensors |= found
    return tensors


def _shards(index: pathlib.Path) -> dict[str, set[str]]:
    """Returns shard -> names of its tensors, in the order of the index."""
    try:
        content = reading.read_json(index)
    except ValueError as error:
        raise UserError(f"{index} is not JSON ({error})") from None
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index} has no weight_map from the names of tensors to files")
    shards: dict[str, set[str]] = {}
    for name, shard in places.items():
        # An index may be untrusted, so a shard must be a file beside it.
        if (
            not isinstance(shard, str)
            or not shard.endswith(".safetensors")
            or any(character in shard for character in "/\\:\0")
        ):
            raise UserError(
                f"{index} places the tensor {name} in {shard!r}, which is not the name of a "
                ".safetensors file beside it"
            )
        shards.setdefault(shard, set()).add(name)
    return shards

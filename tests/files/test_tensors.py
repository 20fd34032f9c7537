"""Published tensors: shards, wrong index files, and values that are not finite."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lamb_tpu.files import tensors
from tests.raising import rejected

WEIGHT_MAP = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}
INDEX = "*/model.safetensors.index.json"  # key of the errors


@pytest.fixture
def index(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two shards and their index; a third file is outside their folder."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": np.zeros(2, np.float32), "c": np.ones(3, np.int32)}, folder / "1.safetensors")
    save_file({"b": np.ones(1, np.float16)}, folder / "2.safetensors")
    save_file({"b": np.ones(1, np.float16)}, tmp_path / "out.safetensors")
    return write(folder / tensors.INDEX, WEIGHT_MAP)


def write(index: pathlib.Path, weight_map: Any) -> pathlib.Path:
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


def test_shards_are_joined(index: pathlib.Path) -> None:
    assert tensors.find(index.parent) == index
    actual = tensors.load(index)
    assert {name: array.tolist() for name, array in actual.items()} == {
        "a": [0, 0],
        "b": [1],
        "c": [1, 1, 1],
    }
    # As in transformers, a single file is preferred to an index.
    save_file(actual, index.parent / tensors.WEIGHTS)
    assert tensors.find(index.parent) == index.parent / tensors.WEIGHTS
    assert tensors.find(index.parent.parent) is None


def test_shards_may_be_links(index: pathlib.Path) -> None:
    """The cache of the Hugging Face Hub contains symbolic links."""
    (index.parent / "1.safetensors").rename(index.parent.parent / "blob")
    (index.parent / "1.safetensors").symlink_to(index.parent.parent / "blob")
    assert set(tensors.load(index)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "weight_map, message",
    [
        (WEIGHT_MAP | {"b": "3.safetensors"}, (INDEX, ..., "names the shard")),
        (WEIGHT_MAP | {"d": "2.safetensors"}, (INDEX, ..., "expects 2.safetensors to")),
        ({"a": "1.safetensors"}, ("*/1.safetensors", ..., "has the tensor c, but")),
        (WEIGHT_MAP | {"b": "../out.safetensors"}, (INDEX, ..., "maps the tensor b to")),
        (WEIGHT_MAP | {"b": "{out}"}, (INDEX, ..., "maps the tensor b to '")),
        (WEIGHT_MAP | {"b": "..\\out.safetensors"}, (INDEX, ..., "maps the tensor b to")),
        (WEIGHT_MAP | {"b": "2.bin"}, (INDEX, ..., "maps the tensor b to")),
        (WEIGHT_MAP | {"b": None}, (INDEX, ..., "maps the tensor b to None")),
        ({}, (INDEX, ..., "has no weight_map that maps")),
        (["1.safetensors"], (INDEX, ..., "has no weight_map that maps")),
    ],
)
def test_wrong_index(index: pathlib.Path, weight_map: Any, message: tuple[Any, ...]) -> None:
    if isinstance(weight_map, dict) and weight_map.get("b") == "{out}":
        weight_map["b"] = str(index.parent.parent / "out.safetensors")
    with rejected(*message):
        tensors.load(write(index, weight_map))


def test_damaged_files(index: pathlib.Path) -> None:
    shard = index.parent / "1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with rejected("*/1.safetensors", ..., "is not a complete safetensors file"):
        tensors.load(index)
    index.write_text("{")
    with rejected(INDEX, ..., "is not JSON (Expecting property name"):
        tensors.load(index)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_values(index: pathlib.Path, dtype: type[np.generic], value: float) -> None:
    save_file({"b": np.array([value], dtype)}, index.parent / "2.safetensors")
    with rejected(INDEX, ..., "has NaN or infinity in 1 tensor(s): b"):
        tensors.load(index)

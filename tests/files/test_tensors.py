"""Published tensors: shards, indices that lie, values that are not finite."""

import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lamb_tpu.errors import UserError
from lamb_tpu.files import tensors

PLACES = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors"}


@pytest.fixture
def index(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two shards and their index; outside of their folder lies a third file."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"a": np.zeros(2, np.float32), "c": np.ones(3, np.int32)}, folder / "1.safetensors")
    save_file({"b": np.ones(1, np.float16)}, folder / "2.safetensors")
    save_file({"b": np.ones(1, np.float16)}, tmp_path / "out.safetensors")
    return write(folder / tensors.INDEX, PLACES)


def write(index: pathlib.Path, places: Any) -> pathlib.Path:
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def test_shards_are_joined(index: pathlib.Path) -> None:
    assert tensors.find(index.parent) == index
    found = tensors.load(index)
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [0, 0],
        "b": [1],
        "c": [1, 1, 1],
    }
    # As in transformers, one file comes before an index.
    save_file(found, index.parent / tensors.WEIGHTS)
    assert tensors.find(index.parent) == index.parent / tensors.WEIGHTS
    assert tensors.find(index.parent.parent) is None


def test_shards_may_be_links(index: pathlib.Path) -> None:
    """The cache of the Hugging Face Hub holds links."""
    (index.parent / "1.safetensors").rename(index.parent.parent / "blob")
    (index.parent / "1.safetensors").symlink_to(index.parent.parent / "blob")
    assert set(tensors.load(index)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "places, message",
    [
        (PLACES | {"b": "3.safetensors"}, "names the shard 3.safetensors, which is missing"),
        (
            PLACES | {"d": "2.safetensors"},
            "says that 2.safetensors has the tensor d, which it lacks",
        ),
        ({"a": "1.safetensors"}, "1.safetensors has the tensor c, which .* does not place there"),
        (
            PLACES | {"b": "../out.safetensors"},
            "places the tensor b in '../out.safetensors', which is",
        ),
        (PLACES | {"b": "{out}"}, "places the tensor b in '/.*', which is not the name of a"),
        (PLACES | {"b": "..\\out.safetensors"}, "which is not the name of a .safetensors file"),
        (PLACES | {"b": "2.bin"}, "which is not the name of a .safetensors file beside it"),
        (PLACES | {"b": None}, "places the tensor b in None, which is not"),
        ({}, "has no weight_map"),
        (["1.safetensors"], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit(index: pathlib.Path, places: Any, message: str) -> None:
    if isinstance(places, dict) and places.get("b") == "{out}":
        places["b"] = str(index.parent.parent / "out.safetensors")
    with pytest.raises(UserError, match=message):
        tensors.load(write(index, places))


def test_damaged_files(index: pathlib.Path) -> None:
    shard = index.parent / "1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match="1.safetensors is no complete safetensors file"):
        tensors.load(index)
    index.write_text("{")
    with pytest.raises(UserError, match="index.json is not JSON"):
        tensors.load(index)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(
    index: pathlib.Path, dtype: type[np.generic], value: float
) -> None:
    save_file({"b": np.array([value], dtype)}, index.parent / "2.safetensors")
    with pytest.raises(UserError, match=r"not finite \(NaN or infinity\) in 1 tensor\(s\): b"):
        tensors.load(index)

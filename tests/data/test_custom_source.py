"""Custom data sets: their arguments, attributes and batches, and errors."""

import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data import ArraySource, BaseSource, FieldSpec
from lamb_tpu.data.registry import DATASETS
from tests.raising import rejected

CALLS: list[dict[str, Any]] = []


def everything(
    split, seed, training, data_dir, source_dir, in_memory, size: int = 4, scale: float = 1.0
) -> ArraySource:
    CALLS.append(dict(locals()))
    return ArraySource(f"ones:{split}", {"image": np.ones((size, 2), np.float32)}, None)


def little(split, size: int = 4) -> ArraySource:
    return ArraySource(f"ones:{split}", {"image": np.ones((size, 2), np.float32)}, None)


class Lazy(BaseSource):
    """A source that defines only what `BaseSource` requires."""

    name = "lazy"
    element_spec = {"image": FieldSpec((2,), np.dtype(np.float32))}

    def __init__(self, split: str):
        self.split = split
        if split == "plain":
            self.element_spec = {"image": ((2,), np.float32)}

    def __len__(self) -> int:
        return 5

    def gather(self, indices, epochs=0):
        return {"image": np.float32(indices)[:, None] + np.zeros(2, np.float32)}


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = types.ModuleType("my_sets")
    actual.everything, actual.little, actual.Lazy, actual.Odd = everything, little, Lazy, Odd
    monkeypatch.setitem(sys.modules, "my_sets", actual)
    CALLS.clear()


def test_arguments_are_passed_on() -> None:
    options = {"size": 3, "scale": None}  # None leaves the default
    folders = {"data_dir": "prepared", "source_dir": "~"}
    source = data.load("my_sets:everything", "train[:3]", seed=7, options=options, **folders)
    evaluated = data.load("my_sets:everything", "test", seed=7, training=False)
    assert (len(source), len(evaluated)) == (3, 4) and source.name == "ones:train[:3]"
    first, second = CALLS
    assert first["source_dir"].startswith("/") and first["data_dir"] == "prepared"
    assert (first["split"], first["seed"], first["training"]) == ("train[:3]", 7, True)
    assert (first["size"], first["scale"]) == (3, 1.0)
    # Evaluation uses the same examples for any seed.
    assert (second["split"], second["seed"], second["training"]) == ("test", 0, False)
    assert second["source_dir"] is second["data_dir"] is second["in_memory"] is None


def test_options_are_the_other_arguments() -> None:
    actual = DATASETS.fields("my_sets:everything")
    assert {key: (f.type, f.default) for key, f in actual.items()} == {
        "size": (int, 4),
        "scale": (float, 1.0),
    }
    assert list(DATASETS.fields("my_sets:little")) == ["size"]
    assert not DATASETS.fields("my_sets:Lazy")
    with rejected("config.data.options.seed", ..., "is unknown"):
        data.load("my_sets:everything", "train", options={"seed": 3})
    with rejected("config.data.prepared_dir", "x", "is not used by 'my_sets:little', which has no"):
        data.load("my_sets:little", "train", data_dir="x")


def test_a_class_needs_four_members() -> None:
    source = data.load("my_sets:Lazy", "train")
    assert source.split == "train" and source.num_classes is source.vocabulary is source.tally
    loader = data.TrainLoader(source, 4, seed=0)
    seen = np.concatenate([next(loader)["image"][:, 0] for _ in range(5)])
    assert sorted(seen[:5]) == sorted(seen[5:10]) == list(range(5))
    masked = list(data.eval_batches(source, 3))
    assert [list(batch["mask"]) for batch in masked] == [[1, 1, 1], [1, 1, 0]]


def test_wrong_field_is_reported_with_shape_and_dtype() -> None:
    with rejected("config.data.name", "my_sets:Lazy", "declares the field 'image' in"):
        data.load("my_sets:Lazy", "plain")


class Odd(BaseSource):
    """A source with the attributes and examples of the case `ODD[split]`, which are not all valid."""

    name = "odd"

    def __init__(self, split: str):
        attributes, self.examples, _ = ODD[split]
        self.element_spec = FLOATS
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return 5

    def gather(self, indices, epochs=0):
        return self.examples


RECORD = np.dtype([("a", np.int32), ("b", np.float32)])
FLOATS = {"image": FieldSpec((2,), np.dtype(np.float32))}
RIGHT = {"image": np.ones((1, 2), np.float32)}


FIELD = "declares the field 'image' in element_spec"
Case = tuple[dict[str, Any], Any, str]  # attributes of a set, its examples, and part of the message


def of(shape: Any, dtype: Any, message: str = FIELD) -> Case:
    """Returns the case of a set with one field."""
    return {"element_spec": {"image": FieldSpec(shape, dtype)}}, RIGHT, message


ODD: dict[str, Case] = {
    "none": ({"element_spec": None}, RIGHT, "has an element_spec that is of type NoneType"),
    "list": ({"element_spec": [FLOATS["image"]]}, RIGHT, "has an element_spec that is of type"),
    "empty": ({"element_spec": {}}, RIGHT, "has an element_spec that is empty"),
    "number": ({"element_spec": {3: FLOATS["image"]}}, RIGHT, "the field 3 in element_spec"),
    "tuple": ({"element_spec": {"image": ((2,), np.dtype(np.float32))}}, RIGHT, FIELD),
    "type": of((2,), np.float32),
    "bfloat16": of((2,), np.dtype(jnp.bfloat16), f"{FIELD} with the dtype 'bfloat16'"),
    "object": of((2,), np.dtype(object)),
    "text": of((2,), np.dtype("U1")),
    "bytes": of((2,), np.dtype("S1")),
    "structured": of((2,), RECORD),
    "complex": of((2,), np.dtype(np.complex64)),
    "date": of((2,), np.dtype("M8[s]")),
    "negative": of((-1,), np.dtype(np.float32), f"{FIELD} with the shape (-1,)"),
    "fraction": of((2.0,), np.dtype(np.float32)),
    "size": of(2, np.dtype(np.float32)),
    "boolean": of((True, 2), np.dtype(np.float32)),
    "zero": of((0,), np.dtype(np.float32)),
    "title": ({"name": 5}, RIGHT, "has the name 5"),
    "classes": ({"num_classes": "ten"}, RIGHT, "has num_classes='ten'"),
    "no classes": ({"num_classes": 0}, RIGHT, "has num_classes=0"),
    "examples": ({}, [RIGHT["image"]], "has a method gather that returns list"),
    "scalar": (
        {"element_spec": {"image": FieldSpec((), np.dtype(np.float32))}},
        {"image": np.float32(1)},
        "gathers float32[] for field 'image' of one example in an array of shape []",
    ),
    "ragged": ({}, {"image": [[1.0], [1.0, 2.0]]}, "inhomogeneous shape"),
    "many": ({}, {"image": np.ones((3, 2), np.float32)}, "in an array of shape [3, 2]"),
    "other": ({}, {"label": np.ones(1, np.int32)}, "gathers nothing for field 'image' of"),
}


@pytest.mark.parametrize("split", ODD)
def test_odd_sources_are_rejected_in_a_sentence(split: str) -> None:
    with rejected("config.data.name", "my_sets:Odd", ODD[split][2]):
        data.load("my_sets:Odd", split)

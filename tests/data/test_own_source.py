"""Arguments of a user's own data set, and its batches."""

import sys
import types
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data import ArraySource, BaseSource, FieldSpec
from lamb_tpu.data.registry import option_fields
from lamb_tpu.errors import UserError

CALLS: list[dict[str, Any]] = []


def everything(
    split, seed, training, data_dir, source_dir, in_memory, size: int = 4, scale: float = 1.0
) -> ArraySource:
    CALLS.append(dict(locals()))
    return ArraySource(f"ones:{split}", {"image": np.ones((size, 2), np.float32)}, None)


def little(split, size: int = 4) -> ArraySource:
    return ArraySource(f"ones:{split}", {"image": np.ones((size, 2), np.float32)}, None)


class Lazy(BaseSource):
    """A class with as little as it may have."""

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
    found = types.ModuleType("my_sets")
    found.everything, found.little, found.Lazy = everything, little, Lazy
    monkeypatch.setitem(sys.modules, "my_sets", found)
    CALLS.clear()


def test_it_is_given_what_it_takes() -> None:
    options = {"size": 3, "scale": None}  # None leaves the default
    source = data.load(
        "my_sets:everything",
        "train[:3]",
        data_dir="prepared",
        source_dir="~",
        seed=7,
        options=options,
    )
    evaluated = data.load("my_sets:everything", "test", seed=7, training=False)
    assert (len(source), len(evaluated)) == (3, 4) and source.name == "ones:train[:3]"
    first, second = CALLS
    assert first["source_dir"].startswith("/") and first["data_dir"] == "prepared"
    assert (first["split"], first["seed"], first["training"]) == ("train[:3]", 7, True)
    assert (first["size"], first["scale"]) == (3, 1.0)
    # Runs of any seed are measured on the same examples.
    assert (second["split"], second["seed"], second["training"]) == ("test", 0, False)
    assert second["source_dir"] is second["data_dir"] is second["in_memory"] is None


def test_options_are_the_other_arguments() -> None:
    found = option_fields("my_sets:everything")
    assert {key: (f.type, f.default) for key, f in found.items()} == {
        "size": (int, 4),
        "scale": (float, 1.0),
    }
    assert list(option_fields("my_sets:little")) == ["size"] and not option_fields("my_sets:Lazy")
    with pytest.raises(UserError, match="config.data.options.seed is not a field of data set"):
        data.load("my_sets:everything", "train", options={"seed": 3})
    with pytest.raises(UserError, match="'x', and 'my_sets:little' has no argument 'data_dir'"):
        data.load("my_sets:little", "train", data_dir="x")


def test_a_class_needs_four_members() -> None:
    source = data.load("my_sets:Lazy", "train")
    assert source.split == "train" and source.num_classes is source.vocabulary is source.tally
    loader = data.TrainLoader(source, 4, seed=0)
    seen = np.concatenate([next(loader)["image"][:, 0] for _ in range(5)])
    assert sorted(seen[:5]) == sorted(seen[5:10]) == list(range(5))
    masked = list(data.eval_batches(source, 3))
    assert [list(batch["mask"]) for batch in masked] == [[1, 1, 1], [1, 1, 0]]


def test_a_field_is_told_by_its_shape_and_dtype() -> None:
    with pytest.raises(UserError, match="element_spec has 'image': .* it must be a lamb_tpu"):
        data.load("my_sets:Lazy", "plain")

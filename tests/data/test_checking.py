"""Checks of batches: ranges, finite numbers, shapes, dtypes and error messages."""

import pathlib
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data import ArraySource, BaseSource, Check, FieldSpec, Range
from tests import tiny
from tests.raising import rejected

INDICES = np.array([30, 10, 20])
RANGES = {
    "label": Range(0, 2, "the classes of the model"),
    "weight": Range(0, data.LARGEST, "the weights"),
    "here": data.ZERO_OR_ONE,
    "word": Range(0, 9, "the words", counted=lambda batch: batch["here"] > 0),
}
GOOD = {
    "label": np.array([0, 2, 1], np.int32),
    "weight": np.array([0.5, 0, 2], np.float32),
    "here": np.array([[1, 0], [0, 1], [1, 1]], np.float32),
    "word": np.array([[9, -100], [-1, 0], [3, 4]], np.int32),
    "image": np.array([[1, -1], [0, 2], [3e38, 0]], np.float32),
}


def source(**changes: Any) -> ArraySource:
    """Returns a set of 40 examples with the fields of `GOOD`, some of them replaced."""
    return ArraySource(
        "points:train,40:0123456789ab",
        {field: np.repeat(values[:1], 40, 0) for field, values in {**GOOD, **changes}.items()},
        3,
    )


def check(finite: bool = True) -> Check:
    return Check(source(), "train[:40]", RANGES, finite)


def test_good_batch_passes() -> None:
    check()(GOOD, INDICES)
    check().examine({**GOOD, "image": np.ones_like(GOOD["image"])}, INDICES)
    empty = {field: values[:0] for field, values in GOOD.items()}
    check()(empty, INDICES[:0])


# Field, index of the wrong value in the field, the value, the message's subject, and part of its
# problem.
WRONG: dict[str, tuple[str, Any, Any, str, str]] = {
    "one too many": ("label", 1, 3, "label of example 10", "range 0 to 2, the classes of the mod"),
    "ignored": ("label", 2, -1, "label of example 20", "is not in the range 0 to 2"),
    "nan weight": (
        "weight",
        0,
        np.nan,
        "weight of example 30",
        "is not at least 0 and finite, the",
    ),
    "infinite weight": ("weight", 0, np.inf, "weight of example 30", "at least 0 and finite"),
    "negative weight": ("weight", 0, -0.5, "weight of example 30", "is not at least 0 and finite"),
    "half a mask": ("here", (2, 1), 0.5, "here[1] of example 20", "an integer from 0 to 1, 0 for"),
    "word": ("word", (1, 1), 10, "word[1] of example 10", "is not in the range 0 to 9, the words"),
    "nan": ("image", (0, 1), np.nan, "image[1] of example 30", "is not finite as float32"),
    "infinity": ("image", (1, 0), -np.inf, "image[0] of example 10", "is not finite as float32"),
}


def changed(field: str, place: Any, value: Any) -> dict[str, np.ndarray]:
    values = GOOD[field].copy()
    values[place] = value
    return {**GOOD, field: values}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_value(name: str) -> None:
    *change, where, problem = WRONG[name]
    # NaN is not compared, because it differs from itself.
    value = ... if name.startswith("nan") else change[-1]
    key = f"{where} of points:train,40 (split 'train[:40]')"
    with rejected(key, value, problem, "correct the data set"):
        check()(changed(*change), INDICES)


def test_number_that_float32_cannot_hold() -> None:
    wide = GOOD["image"].astype(np.float64)
    wide[2, 1] = 1e300
    of_wide = Check(source(image=wide), "train", {})
    with rejected("*20 of points:train,40 (split 'train')", 1e300, "is not finite as float32"):
        of_wide({**GOOD, "image": wide}, INDICES)


def test_masked_examples_may_hold_anything() -> None:
    masked = {**changed("label", 1, 7), "mask": np.array([1, 0, 1], bool)}
    check()(masked, INDICES)
    with rejected("*of points:train,40 (split 'train[:40]')", 7, "in the range 0 to 2, the class"):
        check()({**masked, "mask": np.ones(3, np.float32)}, INDICES)
    with rejected("*of points:train,40 (split 'train[:40]')", ..., "is not an integer from 0 to 1"):
        check()({**masked, "mask": np.array([1, 0, np.nan], np.float32)}, INDICES)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"label": GOOD["label"].astype(np.int64)},
            ("label", "is int64[3] for the examples 30, 10, 20", "return int32[3], as element"),
        ),
        ({"image": GOOD["image"][:, :1]}, ("image", "is float32[3, 1]", "return float32[3, 2]")),
        ({"weight": GOOD["weight"][:2]}, ("weight", "is float32[2]", "return float32[3]")),
        ({"other": GOOD["weight"]}, ("other", "is float32[3]", "return no field of this name")),
        ({"image": None}, ("image", "is missing for the", "return float32[3, 2]")),
    ],
)
def test_batch_of_another_form(change: dict[str, Any], message: tuple[str, str, str]) -> None:
    batch = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    field, *texts = message
    with rejected(f"field {field!r} of points:train,40 (split 'train[:40]')", ..., *texts):
        check()(batch, INDICES)


def test_run_that_skips_updates_accepts_nonfinite_values() -> None:
    lenient, batch = check(finite=False), changed("image", (0, 1), np.nan)
    lenient(batch, INDICES)
    with rejected("*of points:train,40 (split 'train[:40]')", ..., "is not finite as float32"):
        lenient.examine(batch, INDICES)
    with rejected("*of points:train,40 (split 'train[:40]')", 3, "in the range 0 to 2, the class"):
        lenient(changed("label", 1, 3), INDICES)


def test_examined_batch_has_no_values_that_overflow() -> None:
    with rejected("*of points:train,40 (split 'train[:40]')", 3e38, "in the range -1.84467e+19 to"):
        check().examine(GOOD, INDICES)


def test_examined_batch_of_a_task_without_ranges_has_labels_of_the_set() -> None:
    """A task without ranges may ignore labels of -1, so only `examine` rejects them."""
    generic, batch = Check(source(), "train", {}), changed("label", 1, -1)
    generic(batch, INDICES)
    message = ("*(split 'train')", ..., "is not in the range 0 to 2, the classes")
    with rejected(*message):
        generic.examine(batch, INDICES)


class Later(BaseSource):
    """A source with int32 labels 0 to 2 in early batches, and labels 1 to 3 of `dtype` in late batches.

    A batch is late if its first index is at least 48, or if it reaches the second epoch.
    """

    name, num_classes = "later:train", 3
    element_spec = {"label": FieldSpec((), np.dtype(np.int32))}

    def __init__(self, in_memory: bool, dtype: type) -> None:
        self.in_memory, self.dtype = in_memory, dtype

    def __len__(self) -> int:
        return 64

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> data.Batch:
        late = np.asarray(epochs).max() > 0 or indices[0] >= 48
        labels = np.asarray(indices) % 3 + late
        return {"label": labels.astype(self.dtype if late else np.int32)}


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize(
    "dtype, message",
    [
        (np.int32, ("* of later:train (split 'train')", 3, "range 0 to 2, the classes")),
        (np.int64, ("field 'label' of later:train (split 'train')", ..., "is int64[16] for the")),
    ],
)
def test_later_batches_are_checked(in_memory: bool, dtype: type, message: tuple[Any, ...]) -> None:
    later = Later(in_memory, dtype)
    of_task = Check(later, "train", {"label": RANGES["label"]})
    loader = data.TrainLoader(later, 16, 0, check=of_task)
    with rejected(*message):
        for _ in range(5):
            next(loader)
    batches = data.eval_batches(later, 16, check=of_task)
    for _ in range(3):
        next(batches)
    with rejected(*message):
        next(batches)


def test_batch_that_is_no_dict() -> None:
    broken = source()
    broken.gather = lambda indices, epochs=0: [1, 2]  # type: ignore[assignment, method-assign]
    with rejected("gather of points:train,40 (split 'train')", ..., "returns list"):
        Check(broken, "train", {}).read(INDICES)


def test_streams_have_another_form_in_evaluation(tmp_path: pathlib.Path) -> None:
    folder = str(tiny.text(tmp_path / "ptb"))
    trained, evaluated = (
        data.load("ptb", split, source_dir=folder, training=split == "train", batch_size=4)
        for split in ("train", "valid")
    )
    assert trained.element_spec != evaluated.element_spec
    data.check_same_form(trained, evaluated)
    assert data.split_difference(trained, evaluated) is None

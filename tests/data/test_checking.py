"""Checks of batches: ranges, finite numbers, shapes and dtypes, and what the message names."""

import re
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data import ArraySource, BaseSource, Check, FieldSpec, Range
from lamb_tpu.errors import UserError

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
    """A set of the good batch's fields, which has it at 10, 20 and 30."""
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


# A field, where in it, its value, and the message from the field on.
WRONG = {
    "one too many": (
        "label",
        1,
        3,
        "label of example 10 of points:train,40 (split 'train[:40]') "
        "is 3; it must be 0 to 2, the classes of the model; correct the data set",
    ),
    "ignored": (
        "label",
        2,
        -1,
        "label of example 20 of points:train,40 (split 'train[:40]') is -1; it must be 0 to 2",
    ),
    "nan weight": (
        "weight",
        0,
        np.nan,
        "weight of example 30 of points:train,40 (split "
        "'train[:40]') is nan; it must be at least 0 and finite, the weights",
    ),
    "infinite weight": ("weight", 0, np.inf, "is inf; it must be at least 0 and finite"),
    "negative weight": ("weight", 0, -0.5, "is -0.5; it must be at least 0 and finite"),
    "half a mask": (
        "here",
        (2, 1),
        0.5,
        "here[1] of example 20 of points:train,40 (split "
        "'train[:40]') is 0.5; it must be 0 to 1, 0 where something does not count",
    ),
    "word": (
        "word",
        (1, 1),
        10,
        "word[1] of example 10 of points:train,40 (split 'train[:40]') "
        "is 10; it must be 0 to 9, the words",
    ),
    "nan": (
        "image",
        (0, 1),
        np.nan,
        "image[1] of example 30 of points:train,40 (split "
        "'train[:40]') is nan; it must be finite as float32",
    ),
    "infinity": ("image", (1, 0), -np.inf, "image[0] of example 10 of"),
}


def changed(field: str, place: Any, value: Any) -> dict[str, np.ndarray]:
    values = GOOD[field].copy()
    values[place] = value
    return {**GOOD, field: values}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_value(name: str) -> None:
    *change, message = WRONG[name]
    with pytest.raises(UserError, match=re.escape(message)):
        check()(changed(*change), INDICES)


def test_number_that_float32_cannot_hold() -> None:
    wide = GOOD["image"].astype(np.float64)
    wide[2, 1] = 1e300
    of_wide = Check(source(image=wide), "train", {})
    with pytest.raises(UserError, match=r"image\[1\] of example 20 .* is 1e\+300; it must be fin"):
        of_wide({**GOOD, "image": wide}, INDICES)


def test_masked_examples_may_hold_anything() -> None:
    masked = {**changed("label", 1, 7), "mask": np.array([1, 0, 1], bool)}
    check()(masked, INDICES)
    with pytest.raises(UserError, match="^label of example 10 "):
        check()({**masked, "mask": np.ones(3, np.float32)}, INDICES)
    with pytest.raises(UserError, match="^mask of example 20 .* is nan; it must be 0 to 1, 0 wher"):
        check()({**masked, "mask": np.array([1, 0, np.nan], np.float32)}, INDICES)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"label": GOOD["label"].astype(np.int64)},
            "'label' .* is int64[3] in the batch of examples 30"
            ", 10, 20, and element_spec declares int32[3]; gather must return what",
        ),
        ({"image": GOOD["image"][:, :1]}, "'image' .* is float32[3, 1] .* declares float32[3, 2]"),
        ({"weight": GOOD["weight"][:2]}, "'weight' .* is float32[2] .* declares float32[3]"),
        ({"other": GOOD["weight"]}, "'other' .* is float32[3] .* declares no such field"),
        ({"image": None}, "'image' .* is missing in the batch .* declares float32[3, 2]"),
    ],
)
def test_batch_of_another_form(change: dict[str, Any], message: str) -> None:
    batch = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    pattern = "^field " + message.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UserError, match=pattern):
        check()(batch, INDICES)


def test_run_that_skips_updates_keeps_what_is_not_finite() -> None:
    lenient, batch = check(finite=False), changed("image", (0, 1), np.nan)
    lenient(batch, INDICES)
    with pytest.raises(UserError, match=r"^image\[1\] of example 30 "):
        lenient.examine(batch, INDICES)
    with pytest.raises(UserError, match="^label of example 10 "):
        lenient(changed("label", 1, 3), INDICES)


def test_examined_batch_has_no_values_that_overflow() -> None:
    """They are finite, but their square is not."""
    with pytest.raises(
        UserError,
        match=r"^image\[0\] of example 20 .* is 3e\+38; it must be .*, "
        "numbers whose square is finite in float32",
    ):
        check().examine(GOOD, INDICES)


def test_examined_batch_of_a_task_without_ranges_has_labels_of_the_set() -> None:
    """Another task may ignore labels of -1, so a new batch may have them."""
    generic, batch = Check(source(), "train", {}), changed("label", 1, -1)
    generic(batch, INDICES)
    message = "^label of example 10 .* is -1; .* the classes of the data set"
    with pytest.raises(UserError, match=message):
        generic.examine(batch, INDICES)


class Later(BaseSource):
    """Labels from 1 on, and another dtype after the first batches."""

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
        (np.int32, "^label of example .* of later:train .* is 3; it must be 0 to 2"),
        (np.int64, "^field 'label' of later:train .* is int64.16. .* element_spec declares int32"),
    ],
)
def test_later_batches_are_checked_too(in_memory: bool, dtype: type, message: str) -> None:
    later = Later(in_memory, dtype)
    of_task = Check(later, "train", {"label": RANGES["label"]})
    loader = data.TrainLoader(later, 16, 0, check=of_task)
    with pytest.raises(UserError, match=message):
        for _ in range(5):
            next(loader)
    batches = data.eval_batches(later, 16, check=of_task)
    for _ in range(3):
        next(batches)
    with pytest.raises(UserError, match=message):
        next(batches)


def test_batch_that_is_no_dict() -> None:
    broken = source()
    broken.gather = lambda indices, epochs=0: [1, 2]  # type: ignore[assignment, method-assign]
    with pytest.raises(UserError, match="^gather of points.* returns list; it must return a dict"):
        Check(broken, "train", {}).read(INDICES)

"""Checks of a run's data: before anything compiles, in later batches, and by the guards."""

import pathlib
import re
import textwrap
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, evaluate
from lamb_tpu.errors import UserError
from lamb_tpu.run import preflight
from lamb_tpu.run.build import prepare
from lamb_tpu.run.evaluator import make_evaluator, metric_names
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected

# A custom set with a wrong value in example `at` of one split; the set is in arrays or read in parts.
POINTS = """
    import numpy as np

    from lamb_tpu.data import ArraySource, BaseSource

    def points(
        split, size: int = 256, label: int = -9, pixel: float = 0.0, at: int = 7,
        of: str = "train", classes: int = 3, parts: bool = False, dtype: str = "int32",
        form: str = "",
    ):
        rng = np.random.default_rng({"train": 0, "test": 1}[split])
        labels = rng.integers(3, size=size).astype(dtype)
        image = rng.normal(size=(size, 2)).astype(np.float32) + labels[:, None]
        if split == of:
            labels[at] = labels[at] if label == -9 else label
            image[at, 1] += np.float32(pixel)
        arrays = {"image": image, "label": labels}
        if split == "test":  # a field of this split can have another form
            arrays |= {
                "": {}, "columns": {"image": np.ones((size, 3), np.float32)},
                "axes": {"label": labels[:, None]}, "type": {"image": np.ones((size, 2), np.uint8)},
                "name": {"images": image}, "width": {"label": labels.astype(np.int64)},
            }[form]
            if form == "name":
                del arrays["image"]
        found = ArraySource(f"points:{split}", arrays, classes)
        return Parts(found) if parts else found

    class Parts(BaseSource):
        def __init__(self, all):
            self.all, self.name, self.num_classes = all, all.name, all.num_classes
            self.element_spec = all.element_spec

        def __len__(self):
            return len(self.all)

        def gather(self, indices, epochs=0):
            return self.all.gather(indices)
"""


@pytest.fixture
def points(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Writes the module `my_points` into a folder on Python's path."""
    (tmp_path / "my_points.py").write_text(textwrap.dedent(POINTS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_points", raising=False)
    return tmp_path


def config(options: dict[str, Any], **changes: Any) -> ConfigDict:
    return tiny.digits(
        **{
            "data__name": "my_points:points",
            "data__train_split": "train",
            "data__options": options,
            "model": ConfigDict({"name": "mlp", "hidden_sizes": (4,), "num_classes": 3}),
            "task__input_std": 1.0,
            "duration": "8 steps",
            "checkpoint__every": "1 steps",
        }
        | changes
    )


# Options of the set, and the message after the example.
WRONG = {
    "one too many": (
        {"label": 3},
        "3, which is not in the range 0 to 2, the classes of the model, counted from 0; correct the",
    ),
    "ignore": ({"label": -1}, "-1, which is not"),
    "far": ({"label": -5}, "-5, which is not in the range 0"),
    "nan": ({"pixel": np.nan}, "nan, which"),
    "late": ({"label": 3, "at": 255}, "3"),
    "evaluation": ({"label": 3, "of": "test"}, "3"),
    "number of classes": ({"label": 3, "classes": None}, "3"),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_is_rejected_before_anything_compiles(
    points: pathlib.Path, name: str, smoothing: float
) -> None:
    options, message = WRONG[name]
    field, of = "image[1]" if "pixel" in options else "label", options.get("of", "train")
    example = f"{field} of example {options.get('at', 7)} of points:{of} (split '{of}') is "
    with pytest.raises(UserError, match="^" + re.escape(example + message)):
        train(config(options, task__label_smoothing=smoothing), points / "run", quiet=True)
    assert not (points / "run" / "metrics.jsonl").exists()


def test_more_classes_in_evaluation(points: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(config({}), None)
    monkeypatch.setattr(run.eval_set, "num_classes", 4)
    with rejected("config.data.eval_split", "test", "has 4 classes, but the training set has 3"):
        preflight.check_data(run)


@pytest.mark.parametrize(
    "form, difference",
    [
        ("columns", ("image", "is float32[3]", "float64[2]")),
        ("axes", ("label", "is int32[1]", "int32[]")),
        ("type", ("image", "is uint8[2]", "float64[2]")),
        ("name", ("image", "is missing", "float64[2]")),
    ],
)
def test_splits_of_different_form(
    points: pathlib.Path, form: str, difference: tuple[str, str, str]
) -> None:
    field, there, here = difference
    message = (
        f"^field '{field}' {re.escape(there)} in config.data.eval_split .points:test. and "
        f"{re.escape(here)} in config.data.train_split .points:train.; use splits with the same "
        "fields, "
    )
    with pytest.raises(UserError, match=message):
        train(config({"form": form}), points / "run", quiet=True)
    if form in ("columns", "name"):  # the other forms are rejected earlier
        with pytest.raises(UserError, match=message):
            make_evaluator(prepare(config({"form": form}), None))
    assert not (points / "run" / "metrics.jsonl").exists()


def test_splits_may_differ_in_bits(points: pathlib.Path) -> None:
    run = prepare(config({"form": "width"}), None)
    assert "accuracy" in metric_names(run)


def test_right_data_passes_and_small_sets_are_checked_in_full(points: pathlib.Path) -> None:
    run, read = prepare(config({}), None), []
    run.train_set.gather = lambda indices, epochs=0: (  # type: ignore[method-assign]
        read.append(indices),
        data.ArraySource.gather(run.train_set, indices),
    )[1]
    preflight.check_data(run)
    np.testing.assert_array_equal(read, [np.arange(256)])
    preflight.check_data(prepare(config({"parts": True}), None))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_later_batch_with_a_value_that_is_not_finite(points: pathlib.Path, value: float) -> None:
    """A set that is read from files is checked only in part before the run."""
    order = data.global_indices(0, 0, 64 * 4, 256)
    at = int(order[64 * 3 + 5])  # in update 4
    settings = config({"pixel": value, "at": at, "parts": True})
    message = f"^image.1. of example {at} of points:train .* is {value}, which is not finite"
    with pytest.raises(UserError, match=message):
        train(settings, points / "run", quiet=True)


def test_batch_of_a_diverged_update_is_examined(points: pathlib.Path) -> None:
    """The value 1e38 is finite, so no check rejects its batch, but the loss of the batch is not finite."""
    order = data.global_indices(0, 0, 64 * 4, 256)
    at = int(order[64 * 2 + 5])  # in update 3
    settings = config({"pixel": 1e38, "at": at}, optimizer__learning_rate=0.01)
    with pytest.raises(
        UserError,
        match="^.* at update 3, and its batch may be the cause: image.1. "
        f"of example {at} of points:train .* is 1e.38, which is not .*finite in float"
        ".*the last checkpoint is .*/2",
    ):
        train(settings, points / "run", quiet=True)


@pytest.mark.long
def test_evaluate_checks_its_split(points: pathlib.Path) -> None:
    settings = config({"label": 3, "of": "train"}, data__train_split="test", duration="2 steps")
    train(settings, points / "run", quiet=True)
    evaluate.evaluate_checkpoint(None, points / "run")
    with rejected("label of example 7 of points:train (split 'train')", 3):
        evaluate.evaluate_checkpoint(None, points / "run", split="train")


@pytest.mark.long
@pytest.mark.parametrize("of", ["train", "test"])
def test_error_of_one_process_ends_both(
    points: pathlib.Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Only the second process reads the example with the invalid label, but both processes must end."""
    order = data.global_indices(0, 0, 64 * 8, 512)
    at = int(order[64 * 3 + 60]) if of == "train" else 500
    (points / "recipe.py").write_text(
        textwrap.dedent(f"""
        import json
        from ml_collections import ConfigDict
        from tests.run.test_preflight import config

        def get_config():
            options = dict(label=3, at={at}, of={of!r}, size=512, parts=True)
            return config(options, duration="4000 steps", checkpoint__every="4000 steps")
    """)
    )
    monkeypatch.setenv("PYTHONPATH", f"{points}:{tiny.ROOT}")
    ended = tiny.command(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        "--",
        f"--config={points / 'recipe.py'}",
        f"--workdir={points / 'run'}",
    )
    actual = tiny.unbroken(ended.stderr)
    message = f"label of example {at} of points:{of} (split '{of}') is 3, which is not in the range 0 to 2"
    assert ended.returncode == 2 and message in actual, actual
    assert not list((points / "run" / "checkpoints").iterdir())

"""Checks of a run's data before anything compiles, later, and by the guards."""

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
from lamb_tpu.train import train
from tests import tiny

# A set of points with one wrong value in the example `at` of one split, in arrays or read by parts.
POINTS = """
    import numpy as np

    from lamb_tpu.data import ArraySource, BaseSource

    def points(
        split, size: int = 256, label: int = -9, pixel: float = 0.0, at: int = 7,
        of: str = "train", classes: int = 3, parts: bool = False, dtype: str = "int32",
    ):
        rng = np.random.default_rng({"train": 0, "test": 1}[split])
        labels = rng.integers(3, size=size).astype(dtype)
        image = rng.normal(size=(size, 2)).astype(np.float32) + labels[:, None]
        if split == of:
            labels[at] = labels[at] if label == -9 else label
            image[at, 1] += np.float32(pixel)
        arrays = {"image": image, "label": labels}
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
    """The folder of the module `my_points`, where Python finds it."""
    (tmp_path / "my_points.py").write_text(textwrap.dedent(POINTS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_points", raising=False)
    return tmp_path


def config(options: dict[str, Any], **changes: Any) -> ConfigDict:
    """A small run on the points."""
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


# Options of the set, and the message: the field, the value, the range, the example and the set.
WRONG = {
    "one too many": (
        {"label": 3},
        "label of example 7 of points:train (split 'train') is 3; it "
        "must be 0 to 2, the classes of the model, counted from 0; correct the data",
    ),
    "ignore": ({"label": -1}, "label of example 7 of points:train (split 'train') is -1; it must"),
    "far": ({"label": -5}, "label of example 7 of points:train (split 'train') is -5; it must be"),
    "nan": ({"pixel": np.nan}, "image[1] of example 7 of points:train (split 'train') is nan; it"),
    "late": ({"label": 3, "at": 255}, "label of example 255 of points:train (split 'train') is 3"),
    "evaluation": ({"label": 3, "of": "test"}, "label of example 7 of points:test (split 'test')"),
    "number of classes": ({"label": 3, "classes": 0}, "label of example 7 of points:train (split"),
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_is_rejected_before_anything_compiles(
    points: pathlib.Path, name: str, smoothing: float
) -> None:
    options, message = WRONG[name]
    if options.get("classes") == 0:  # a set that does not say it: the model does
        options = {**options, "classes": None}
    with pytest.raises(UserError, match="^" + re.escape(message)):
        train(config(options, task__label_smoothing=smoothing), points / "run", quiet=True)
    assert not (points / "run" / "metrics.jsonl").exists()


def test_more_classes_in_evaluation(points: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(config({}), None)
    monkeypatch.setattr(run.eval_set, "num_classes", 4)
    with pytest.raises(UserError, match="^config.data.eval_split is 'test', which has 4 classes"):
        preflight.check_data(run)


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
    """The first examples of a set that is read from files are right."""
    order = data.global_indices(0, 0, 64 * 4, 256)
    at = int(order[64 * 3 + 5])  # in update 4
    settings = config({"pixel": value, "at": at, "parts": True})
    message = f"^image.1. of example {at} of points:train .* is {value}; it must be finite"
    with pytest.raises(UserError, match=message):
        train(settings, points / "run", quiet=True)


def test_batch_of_a_diverged_update_is_examined(points: pathlib.Path) -> None:
    """1e38 is finite, and no batch's check rejects it; its loss is not."""
    order = data.global_indices(0, 0, 64 * 4, 256)
    at = int(order[64 * 2 + 5])  # in update 3
    settings = config({"pixel": 1e38, "at": at}, optimizer__learning_rate=0.01)
    with pytest.raises(
        UserError,
        match="^.* at update 3, and its batch may be the cause: image.1. "
        f"of example {at} of points:train .* is 1e.38; it must be .*finite in float"
        ".*the last checkpoint is .*/2",
    ):
        train(settings, points / "run", quiet=True)


@pytest.mark.long
def test_evaluate_checks_its_split(points: pathlib.Path) -> None:
    settings = config({"label": 3, "of": "train"}, data__train_split="test", duration="2 steps")
    train(settings, points / "run", quiet=True)
    evaluate.evaluate_checkpoint(None, points / "run")
    with pytest.raises(UserError, match="^label of example 7 of points:train .split 'train'. is 3"):
        evaluate.evaluate_checkpoint(None, points / "run", split="train")


@pytest.mark.long
@pytest.mark.parametrize("of", ["train", "test"])
def test_error_of_one_process_ends_both(
    points: pathlib.Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """The second process reads the wrong example in a later batch; the first one would wait."""
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
    found = tiny.unbroken(ended.stderr)
    message = f"label of example {at} of points:{of} (split '{of}') is 3; it must be 0 to 2"
    assert ended.returncode == 2 and message in found, found
    assert not list((points / "run" / "checkpoints").iterdir())

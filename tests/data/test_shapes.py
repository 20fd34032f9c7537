"""Shapes of data sets without files, and errors if files are needed."""

import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lamb_tpu import data
from tests.raising import rejected

WINDOWS = {"max_length": 96, "document_stride": 32, "max_query": 40}


@pytest.mark.parametrize(
    "name, split, options, length, classes, shape",
    [
        ("mnist", "train", {}, 60_000, 10, (28, 28, 1)),
        ("fashion_mnist", "test[:100]", {}, 100, 10, (28, 28, 1)),
        ("cifar10", "train", {"flip": True}, 50_000, 10, (32, 32, 3)),
        ("cifar10_jpeg", "test", {}, 10_000, 10, (32, 32, 3)),
        ("imagenet2012", "train", {"size": 260}, 1_281_167, 1000, (260, 260, 3)),
        ("imagenet2012", "validation", {"num_classes": 1001}, 50_000, 1001, (224, 224, 3)),
    ],
)
def test_images(
    name: str, split: str, options: dict, length: int, classes: int, shape: tuple[int, ...]
) -> None:
    source = data.load_shapes(name, split, options=options, data_dir="/nowhere")
    assert (len(source), source.num_classes) == (length, classes)
    assert source.element_spec == {"image": (shape, np.uint8), "label": ((), np.int32)}
    batch = source.gather(np.zeros(2, np.int64))
    assert {key: (value.shape[1:], value.dtype) for key, value in batch.items()} == (
        source.element_spec
    )


@pytest.mark.parametrize("training", [True, False])
def test_text_has_the_shapes_of_the_text_that_is_read(training: bool) -> None:
    options = {"sequence_length": 64, "max_predictions": 7, "next_sentence": training}
    real = data.load("python_docs", "test", options=options | {"vocab_size": 512})
    actual = data.load_shapes("masked_lm", "train", options=options, training=training)
    assert actual.element_spec == real.element_spec
    cloze = WINDOWS | {"vocab_size": 512}
    real = data.load("python_docs_cloze", "test", options=cloze, training=training)
    actual = data.load_shapes("squad", "train-v1.1.json", options=WINDOWS, training=training)
    assert actual.element_spec == real.element_spec
    assert len(actual) == 87_599


def test_sets_that_are_there_are_loaded(tmp_path: pathlib.Path) -> None:
    assert len(data.load_shapes("digits", "train[:5]")) == 5
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "cat" / "0.png")
    there = data.load_shapes("image_folder", "train", source_dir=str(tmp_path))
    assert len(there) == there.num_classes == 1
    known = data.load_shapes("image_folder", "train", options={"num_classes": 1})
    assert known.element_spec == there.element_spec
    assert known.num_classes == 1 and not known.counted


def test_the_number_of_examples() -> None:
    output = {"counted_by": "config.duration is '3 epochs'"}
    assert len(data.load_shapes("masked_lm", "train", examples=77, **output)) == 77
    assert not data.load_shapes("masked_lm", "validation", training=False, **output).counted
    assert not data.load_shapes("masked_lm", "train").counted
    with rejected("the number of examples of data set masked_lm", ..., "is not known without its"):
        data.load_shapes("masked_lm", "train", **output)


@pytest.mark.parametrize(
    "name, option, value, problem",
    [
        ("mnist", "size", ..., "is unknown"),
        ("masked_lm", "sequence_length", 2, "is out of range"),
        ("masked_lm", "seed", ..., "is unknown"),
    ],
)
def test_errors(name: str, option: str, value: Any, problem: str) -> None:
    with rejected(f"config.data.options.{option}", value, problem):
        data.load_shapes(name, "train", options={option: 2})
    with rejected("split 'trian' of data set mnist", ..., "is not valid (Unknown split"):
        data.load_shapes("mnist", "trian")
    with rejected("config.data.name", "nothing", "is unknown"):
        data.load_shapes("nothing", "train")


def test_pairs_have_the_width_of_the_longest() -> None:
    options = {"vocab_size": 8000, "max_length": 48, "widths": 4}
    actual = data.load_shapes("multi30k", "train", options=options)
    assert len(actual) == 29_000 and actual.buckets is None
    shapes = {name: spec.shape for name, spec in actual.element_spec.items()}
    assert shapes == {
        "source_ids": (48,),
        "source_length": (),
        "target_ids": (49,),
        "target_length": (),
    }
    assert len(data.load_shapes("wmt16", "train[:50%]", options=options)) == 2_274_442
    real = data.load("grammar_de_en", "train", options={**options, "vocab_size": 250})
    assert real.element_spec == actual.element_spec

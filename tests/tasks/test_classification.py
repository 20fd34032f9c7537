"""Classification: loss, sums and checks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import data, models
from lamb_tpu.tasks import build
from lamb_tpu.tasks.classification import Classification
from tests.raising import rejected

LOGITS = np.array([[2.0, 0.0, -1.0], [0.5, 1.5, 0.0], [0.0, 0.0, 3.0]], np.float32)
LABELS = np.array([0, 2, 2], np.int32)
KEY = jax.random.key(0)
# The model returns its inputs, so that the "images" are the logits.
IDENTITY = models.Model(lambda key, x: {"params": {}}, lambda v, x, **_: (x, {}))


def log_softmax() -> np.ndarray:
    return LOGITS - np.log(np.exp(LOGITS).sum(1, keepdims=True))


def task(**fields: Any) -> Classification:
    return build("classification", IDENTITY, **{"input_std": 1.0, **fields})


def test_loss_is_a_sum_and_a_weight() -> None:
    batch = {"image": LOGITS, "label": LABELS}
    terms, (state, sums) = task().loss({}, {}, batch, jax.random.key(0))
    (total,) = terms.values()
    np.testing.assert_allclose(total, -log_softmax()[range(3), LABELS].sum(), rtol=1e-6)
    weights = task().weights(batch)
    assert weights == dict.fromkeys(terms, 3) and state == {}
    assert [float(x) for x in sums["accuracy"]] == [2, 3]


def test_label_smoothing_spreads_over_all_classes() -> None:
    smoothed = task(label_smoothing=0.3)
    batch = {"image": LOGITS, "label": LABELS}
    (total,) = smoothed.loss({}, {}, batch, jax.random.key(0))[0].values()
    targets = 0.7 * np.eye(3)[LABELS] + 0.1
    np.testing.assert_allclose(total, -(targets * log_softmax()).sum(), rtol=1e-6)
    # Evaluation measures the plain cross entropy.
    sums = smoothed.evaluate({}, {}, batch | {"mask": np.ones(3, np.float32)})
    np.testing.assert_allclose(sums["loss"][0], -log_softmax()[range(3), LABELS].sum(), rtol=1e-6)


def test_mask_selects() -> None:
    mask = np.array([1, 0, 1], np.float32)
    sums = task().evaluate({}, {}, {"image": LOGITS, "label": LABELS, "mask": mask})
    np.testing.assert_allclose(sums["loss"][0], -log_softmax()[[0, 2], [0, 2]].sum(), rtol=1e-6)
    assert [float(x) for x in (sums["loss"][1], *sums["accuracy"])] == [2, 2, 2]


def test_pixels_are_normalised_on_the_device() -> None:
    seen = []
    spy = models.Model(IDENTITY.init, lambda v, x, **_: (seen.append(x) or x, {}))
    normalising = build("classification", spy, input_mean=100.0, input_std=50.0)
    image = np.array([[0, 100, 250]], np.uint8)
    batch = {"image": image, "label": LABELS[:1], "mask": np.ones(1)}
    normalising.evaluate({}, {}, batch)
    assert seen[0].dtype == jnp.float32 and seen[0].tolist() == [[-2.0, 0.0, 3.0]]


@pytest.mark.parametrize("kind", [tuple, list])
def test_channels_are_normalised_separately(kind: type) -> None:
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # ImageNet's
    spy = models.Model(IDENTITY.init, lambda v, x, **_: (x.sum((1, 2)), {}))
    normalising = build("classification", spy, input_mean=kind(mean), input_std=kind(std))
    image = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    (total,) = normalising.loss({}, {}, {"image": image, "label": LABELS}, KEY)[0].values()
    logits = ((image - np.array(mean)) / np.array(std)).sum((1, 2))
    expected = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    np.testing.assert_allclose(total, (expected - logits[range(3), LABELS]).sum(), rtol=1e-5)


def test_top5_of_more_than_ten_classes() -> None:
    logits = np.random.default_rng(0).permuted(np.arange(40 * 11.0).reshape(40, 11), axis=1)
    labels, mask = np.arange(40, dtype=np.int32) % 11, np.arange(40) % 3 > 0
    batch = {"image": np.float32(logits), "label": labels, "mask": np.float32(mask)}
    sums = task().evaluate({}, {}, batch)
    ranks = (logits > logits[range(40), labels][:, None]).sum(1)
    assert [float(x) for x in sums["accuracy"]] == [(ranks < 1)[mask].sum(), mask.sum()]
    assert [float(x) for x in sums["top5_accuracy"]] == [(ranks < 5)[mask].sum(), mask.sum()]
    assert 0 < (ranks < 1)[mask].sum() < (ranks < 5)[mask].sum() < mask.sum()
    assert task().evaluate({}, {}, batch | {"image": logits[:, :10]}).keys() == {"loss", "accuracy"}


def source(num_classes: int | None, field: str = "image") -> data.ArraySource:
    arrays = {field: np.zeros((4, 8, 8, 1), np.uint8), "label": np.zeros(4, np.int32)}
    return data.ArraySource("made", arrays, num_classes)


def test_data_that_does_not_fit() -> None:
    ten = build("classification", models.build("mlp"))
    ten.check(source(10))
    ten.check(source(None))
    with rejected("the model", ..., "has 10 classes, but made has 7", "num_classes=7"):
        ten.check(source(7))
    with rejected(
        "made", ..., "has the fields pixels, label", "use a data set with image and label"
    ):
        ten.check(source(10, "pixels"))
    coloured = build("classification", models.build("mlp"), input_std=(1.0, 2.0, 3.0))
    with rejected(
        "config.task.input_std", (1.0, 2.0, 3.0), "has 3 numbers, but the images of made"
    ):
        coloured.check(source(10))
    flat = data.ArraySource("flat", {"image": np.zeros((4, 64)), "label": np.zeros(4, int)}, 10)
    build("classification", models.build("mlp"), mixup_alpha=1.0).check(flat)
    with rejected(
        "config.task.cutmix_alpha", 1.0, "the examples of flat have shape (64,)", "use 0"
    ):
        build("classification", models.build("mlp"), cutmix_alpha=1.0).check(flat)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("label_smoothing", 1.0, ("is out of range", "use at least 0 and less than 1")),
        ("label_smoothing", -0.1, ("is out of range",)),
        ("input_std", 0.0, ("is out of range",)),
        ("label_smoothing", "x", ("has the wrong type",)),
        ("input_mean", "x", ("has the wrong type",)),
        ("input_mean", (), ("is not finite",)),
        ("input_mean", (1, "x", 2), ("has the wrong type",)),
        ("input_mean", math.nan, ("is not finite",)),
        ("input_std", (1.0, 0.0), ("is out of range",)),
        ("input_std", (1.0, True), ("has the wrong type",)),
        ("mixup_alpha", -1, ("is out of range", "use at least 0")),
        ("mixup_alpha", "x", ("has the wrong type",)),
        ("cutmix_alpha", math.inf, ("is out of range", "use at least 0")),
    ],
)
def test_errors(name: str, value: Any, message: tuple[str, ...]) -> None:
    with rejected(f"config.task.{name}", value, *message):
        task(**{name: value})


def test_unknown_field() -> None:
    with rejected("config.task.smoothing", ..., "is unknown"):
        task(smoothing=0.1)


def test_unknown_task() -> None:
    with rejected("config.task.name", "regress", "is unknown", "use classification, language_"):
        build("regress", IDENTITY)

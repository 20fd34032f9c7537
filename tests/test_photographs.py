"""Tests runs on photographs: each photograph counts once, and bad images are reported."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import prepare
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.data.images.photographs import encode, smooth
from tests.shared import shared

SIZE = 24
NUM_PHOTOGRAPHS = 400


def photographs(batch_size: int) -> ConfigDict:
    """Returns a config: two stages of an EfficientNet, evaluated in batches of `batch_size` images."""
    config = tiny.digits(
        batch_size=NUM_PHOTOGRAPHS,
        data__name="image_folder",
        data__train_split="train",
        data__eval_split="train",
        eval__batch_size=batch_size,
        data__dir=str(shared("data", "imagenet_sample")),
    )
    config.data.options = ConfigDict({"size": SIZE, "num_classes": 1000})
    config.model = ConfigDict(
        {"name": "efficientnet_b0", "stages": ((1, 3, 2, 1, 16), (1, 3, 2, 6, 24))}
    )
    config.task = ConfigDict(
        {"name": "classification", "input_mean": (124.0, 116.0, 104.0), "input_std": 58.0}
    )
    return config


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainState, int, int, float]:
    """The state of a network that has learned some photographs, and its expected metrics.

    The metrics are the numbers of correct answers and of labels among the top five, and the mean
    loss; NumPy computes them from the logits of all photographs. The network's output layer is a
    regression from random logits to the labels.
    """
    run = prepare(photographs(NUM_PHOTOGRAPHS), tmp_path_factory.mktemp("run"), jax.devices()[:1])
    images = run.eval_set.gather(np.arange(NUM_PHOTOGRAPHS))
    state, each = run.first_state(), np.arange(NUM_PHOTOGRAPHS)

    @jax.jit
    def logits_of(params: Any) -> jax.Array:
        inputs, variables = run.task._inputs(images), {"params": params, **state.model_state}
        return run.task.model.apply(variables, inputs, train=False)[0]

    lines = (shared("data", "imagenet_sample") / "labels.tsv").read_text().splitlines()[1:]
    labels = np.array([int(line.split("\t")[1]) for line in lines])
    first = np.asarray(logits_of(state.params), np.float64)
    products = first @ first.T
    wanted = np.eye(1000)[labels]
    ridge = np.trace(products) / NUM_PHOTOGRAPHS * np.eye(NUM_PHOTOGRAPHS)
    regression = first.T @ np.linalg.solve(products + ridge, 100 * wanted)
    output = state.params["output"]
    kernel = np.asarray(output["kernel"], np.float64) @ regression
    params = {**state.params, "output": {**output, "kernel": kernel.astype(np.float32)}}
    state = state.replace(params=params)
    logits = np.asarray(logits_of(params), np.float64)
    of_label = logits[each, labels]
    better = (logits > of_label[:, None]).sum(1)
    losses = np.log(np.exp(logits).sum(1)) - of_label
    return state, int((better < 1).sum()), int((better < 5).sum()), float(losses.mean())


@pytest.mark.long
@pytest.mark.parametrize(
    "num_devices, batch_size", [(1, 1), (1, 7), (1, 64), (1, 400), (3, 64), (8, 64)]
)
def test_each_photograph_counts_once(
    learned: tuple[TrainState, int, int, float], num_devices: int, batch_size: int
) -> None:
    state, right, in_five, loss = learned
    assert 40 < right < 360 and right + 20 < in_five  # otherwise an error might not show
    run = prepare(photographs(batch_size), None, jax.devices()[:num_devices], training=False)
    state = jax.device_put(jax.device_get(state), run.shardings)
    metrics = make_evaluator(run)(state)
    assert metrics["accuracy"] == right / NUM_PHOTOGRAPHS
    assert metrics["top5_accuracy"] == in_five / NUM_PHOTOGRAPHS
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)


GOOD = [
    encode(smooth(40, 50, seed), kind)
    for seed, kind in enumerate(("rgb", "grey", "cmyk", "png", "rgb", "rgb", "rgb", "rgb"))
]
BAD = {"truncated.JPEG": GOOD[0][:-40], "zero.JPEG": b"", "text.JPEG": b"<html>"}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two splits, each with two classes of four valid images; class "b" also has the bad images."""
    root = tmp_path_factory.mktemp("damaged")
    for split in ("train", "val"):
        for label, kind in enumerate("ab"):
            (root / split / kind).mkdir(parents=True)
            for number, content in enumerate(GOOD[label::2]):
                (root / split / kind / f"{number}.JPEG").write_bytes(content)
        for name, content in BAD.items():
            (root / split / "b" / name).write_bytes(content)
    return root


def damaged_run(root: pathlib.Path) -> ConfigDict:
    config = tiny.digits(
        batch_size=8,
        duration="3 epochs",
        data__name="image_folder",
        data__dir=str(root),
        data__train_split="train",
        data__eval_split="val",
        eval__every="100 percent",
        eval__batch_size=8,
    )
    config.data.options = ConfigDict({"size": 8, "on_bad_record": "skip"})
    config.task = ConfigDict({"name": "classification"})
    config.model = ConfigDict({"name": "mlp", "hidden_sizes": (16,), "num_classes": 2})
    return config


@pytest.mark.long
def test_bad_images_are_reported_at_the_end(
    damaged: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture
) -> None:
    config = damaged_run(damaged)
    metrics = train(config, tmp_path)
    types = "1 grey, 1 CMYK, 1 PNG, 3 bad, and the bad ones were left out"
    assert tiny.unbroken(capfd.readouterr().out).endswith(
        f"data set image_folder:train: images read in training include {types} "
        f"data set image_folder:val: images read in evaluation include {types}"
    )
    (record,) = read_records(tmp_path / "metrics.jsonl", "pictures")
    counts = {"grey": 1, "cmyk": 1, "png": 1, "bad": 3}
    assert record == {"step": 5, "kind": "pictures"} | {
        f"{part}_{kind}": count for part in ("train", "eval") for kind, count in counts.items()
    }

    again = evaluate_checkpoint(config, tmp_path)
    assert again == {"step": 5} | metrics
    printed = tiny.unbroken(capfd.readouterr().err)
    assert f"images read in evaluation include {types}" in printed
    # Only eight of the eleven files count.
    state, _ = tiny.restored(config, tmp_path)
    source = data.load(
        "image_folder", "val", source_dir=str(damaged), options={"size": 8}, training=False
    )
    good = [index for index in range(len(source)) if source.records.name(index)[-6] in "0123"]
    images = source.gather(np.array(good))
    hidden, output = state.params["hidden0"], state.params["output"]
    x = images["image"].reshape(8, -1) / 255.0
    x = np.maximum(x @ np.asarray(hidden["kernel"]) + hidden["bias"], 0)
    logits = np.asarray(x @ np.asarray(output["kernel"]) + output["bias"], np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(8), images["label"]]
    assert metrics["accuracy"] == np.mean(logits.argmax(1) == images["label"])
    assert metrics["loss"] == pytest.approx(losses.mean(), rel=1e-5)


def test_preempted_start_reports_bad_images(
    damaged: pathlib.Path, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture
) -> None:
    # Before the fifth update, a full epoch of eleven files has been read.
    with tiny.preempted_at(5, "^preempted at update 4, saved"):
        train(damaged_run(damaged), tmp_path)
    printed = tiny.unbroken(capfd.readouterr().out)
    assert "data set image_folder:train: images read in training include 1 grey" in printed
    assert printed.endswith("3 bad, and the bad ones were left out")
    assert not read_records(tmp_path / "metrics.jsonl", "pictures")


def test_first_bad_image_ends_the_run(damaged: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = damaged_run(damaged)
    config.data.options.on_bad_record = "error"
    with pytest.raises(
        UserError,
        match=r"/b/.*\.JPEG of data set image_folder:train is bad: .*on_bad_record='skip'",
    ):
        train(config, tmp_path, quiet=True)

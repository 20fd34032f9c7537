"""The study on 400 photographs: its recipes, which runs count, and the page."""

import json
import pathlib

import jax
import pytest

from experiments.vision import photographs, photographs_page
from experiments.vision.photographs import Cell
from lamb_tpu.run.build import prepare
from tests.data.images.pictures import encode, smooth

CELLS = [Cell(network, 72, 25, rate, 40, 0) for network, rate in photographs.RATES.items()]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """400 lines about one picture."""
    (tmp_path / "a.JPEG").write_bytes(encode(smooth(90, 80)))
    lines = ["file\tlabel", *(f"a.JPEG\t{label}" for label in range(0, 800, 2))]
    (tmp_path / "labels.tsv").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("cell", CELLS)
def test_recipes_are_of_their_networks_and_can_run(cell: Cell, folder: pathlib.Path) -> None:
    run = prepare(photographs.make_config(cell, str(folder)), None, jax.devices()[:1])
    assert (run.recipe.total_steps, run.recipe.warmup_steps) == (640, 32)
    assert run.recipe.peak_learning_rate == cell.rate
    assert run.recipe.eval_every == 64  # four epochs
    config = run.config
    assert config.model.name == cell.network
    optimizers = {"efficientnet_b0": "rmsprop_tf", "resnet50": "lamb"}
    assert config.optimizer.name == optimizers[cell.network]
    assert run.eval_set.element_spec["image"].shape == (72, 72, 3)
    options = config.data.options
    assert (options.crop, options.flip, options.central_fraction) == ("inception", True, 0.875)
    assert options.get("policy", "") == "" and config.task.label_smoothing == 0.0
    fields = config.model.to_dict()
    assert all(not fields.get(name, 0.0) for name in ("dropout_rate", "stochastic_depth_rate"))
    assert (config.target.metric, config.target.stop) == ("accuracy", True)
    assert 360 / 400 < config.target.value <= 361 / 400


def write_run(folder: pathlib.Path, accuracies: list[float], reached: bool) -> None:
    """A run with an evaluation every four epochs."""
    folder.mkdir(parents=True)
    lines = []
    for number, accuracy in enumerate(accuracies, start=1):
        at = {"step": 64 * number, "epoch": 4.0 * number, "loss": 0.4, "accuracy": accuracy}
        lines += [{**at, "kind": "train", "accuracy": accuracy / 2, "seconds": 60.0 * number},
                  {**at, "kind": "eval", "top5_accuracy": 0.99}]
    if reached:
        lines.append({"step": 64 * len(accuracies), "kind": "target", "value": accuracies[-1]})
    lines.append({"step": 64 * len(accuracies), "kind": "pictures", "train_grey": 8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    receipt = {"device": "cpu", "devices": 1, "cores": 2, "jax": "0.10", "commit": "abc"}
    (folder / "run.jsonl").write_text(json.dumps(receipt) + "\n")


def test_page_of_the_complete_runs(tmp_path: pathlib.Path) -> None:
    first, second = CELLS
    write_run(tmp_path / first.name, [0.1, 0.5, 0.92], reached=True)
    write_run(tmp_path / second.name, [0.1, 0.5, 0.6], reached=False)
    (record,) = photographs.collect(tmp_path, CELLS)  # the second one is not at its end
    assert (record["network"], record["accuracy"], record["ended_epoch"]) == (
        "efficientnet_b0", 0.92, 12
    )
    (tmp_path / second.name / "metrics.jsonl").unlink()
    (tmp_path / second.name / "run.jsonl").unlink()
    (tmp_path / second.name).rmdir()
    write_run(tmp_path / second.name, [0.1, *[0.5] * 9], reached=False)
    records = photographs.collect(tmp_path, CELLS)
    text = photographs_page.page(records)
    machine = "1 x cpu, 2 cores |"
    for row in (
        "EfficientNet-B0 | RMSProp, 0.0016 | 0.9200 | 0.9900 | 0.400 | 192 | 12 | 0.4600 | 3.0",
        "ResNet-50 | LAMB, 0.01 | 0.5000 | 0.9900 | 0.400 | 640 | 40 | 0.2500 | 10.0",
    ):
        assert f"| {row} | {machine}" in text
    assert "ResNet-50 did not get above 0.9 in its 40 epochs." in text
    assert "EfficientNet-B0 did not" not in text and "Of the 400 files 8 are grey" in text
    assert "--pixels=72 --batch=25 --epochs=40 --seed=0`" in text
    photographs_page.draw(records, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"

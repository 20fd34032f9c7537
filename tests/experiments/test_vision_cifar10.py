"""The table of CIFAR-10: which runs count, what the page says of them, and a run."""

import json
import pathlib
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from experiments.vision import cifar10
from experiments.vision.cifar10 import Cell
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records
from lamb_tpu.watch.guards import Diverged
from tests.data.images.pictures import encode, smooth
from tests.data.images.test_cifar10_jpeg import write


def write_run(folder: pathlib.Path, epochs: float, accuracy: float) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"step": 9, "kind": "train", "loss": 0.1, "seconds": 120.04},
        *({"step": 9, "kind": "eval", "accuracy": share * accuracy, "loss": 0.2,
           "epoch": share * epochs} for share in (0.5, 1.0)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    receipt = {"device": "cpu", "devices": 1, "cores": 2, "jax": "0.10.2", "commit": "abc"}
    (folder / "run.jsonl").write_text(json.dumps(receipt) + "\n")


def write_set(folder: pathlib.Path) -> str:
    """A set of 64 pictures to train on and 16 to test."""
    seeds = {"train": range(64), "test": range(64, 80)}
    return write(folder, {
        split: [encode(smooth(32, 32, seed), quality=75) for seed in found]
        for split, found in seeds.items()
    })


def test_only_complete_runs_count(tmp_path: pathlib.Path) -> None:
    whole, half, young, broken = (Cell("cifar10", "lamb", 24.0, seed) for seed in range(4))
    write_run(tmp_path / whole.name, 24.01, 0.94)
    write_run(tmp_path / half.name, 12.0, 0.9)
    write_run(tmp_path / broken.name, 6.0, 0.1)
    (tmp_path / broken.name / "diverged.txt").touch()
    first, last = cifar10.collect(tmp_path, [whole, half, young, broken])
    assert (first["seed"], first["accuracy"], first["seconds"]) == (0, 0.94, 120.0)
    assert first["curve"] == [[12.005, 0.47], [24.01, 0.94]]
    assert (last["seed"], last["accuracy"], last["updates"]) == (3, None, 9)


def test_page(tmp_path: pathlib.Path) -> None:
    jpeg = "cifar10_jpeg"
    found = {
        Cell("cifar10", "lamb", 24.0, 0): 0.94, Cell("cifar10", "lamb", 24.0, 1): 0.92,
        Cell(jpeg, "momentum", 3.0, 0): 0.75,
    }
    for cell, accuracy in found.items():
        write_run(tmp_path / cell.name, cell.epochs, accuracy)
    records = cifar10.collect(tmp_path, found)
    text = cifar10.page(records)
    measured = "0.9300 | 0.9200 to 0.9400 | 0: 0.9400, 1: 0.9200 | 2.0 | 1 x cpu, 2 cores |"
    assert f"| lamb | 0.01953 | 0.9408 | 24 | {measured}" in text
    assert "| momentum | 0.4 | 0.9372 | 24 | not run | - | - | - | - |" in text
    assert "| momentum | 0.4 | 0.9372 | 3, shorter | 0.7500 | - | 0: 0.7500 |" in text
    assert "| lars | 4 | - | 24 | not run" in text
    assert "JPEGs of quality 75, which costs accuracy" in text
    assert "Rows marked as shorter have fewer than 24 epochs" in text
    assert "--data=cifar10 --optimizers=lamb --epochs=24 --seeds=0,1`" in text
    assert "--data_dir=FOLDER --optimizers=momentum --epochs=3 --seeds=0`" in text
    text = cifar10.page(record for record in records if record["data"] != jpeg)
    assert "JPEG" not in text and "shorter" not in text


def test_missing_data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "FOLDER", tmp_path)
    cells = [Cell("cifar10_jpeg", "lamb", 24.0, 0)]
    with pytest.raises(UserError, match="--data_dir is missing; give the folder with cifar10_jp"):
        cifar10.study(cells, tmp_path, None)
    with pytest.raises(UserError, match="must be the folder that holds cifar10_jpeg_q75.npz"):
        cifar10.study(cells, tmp_path, str(tmp_path))
    with pytest.raises(UserError, match="holds no complete run, and there are no records yet"):
        cifar10.study(cells, tmp_path, None, training=False)


def test_a_run_that_diverges_is_a_result(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "FOLDER", tmp_path)

    def train(config: object, folder: pathlib.Path, label: str) -> None:
        write_run(folder, 1.0, 0.1)
        raise Diverged("loss became nan at update 9")

    monkeypatch.setattr(cifar10, "train", train)
    text = cifar10.study([Cell("cifar10", "lars", 24.0, 0)], tmp_path / "runs", None)
    assert "| lars | 4 | - | 24 | 1 of 1 diverged | - | 0: diverged |" in text


def test_cells_are_trained_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(cifar10, "FOLDER", tmp_path)
    make_config = cifar10.make_config

    def small(*arguments: Any) -> ConfigDict:  # DavidNet's compiling alone takes longer than all
        config = make_config(*arguments)
        config.model = ConfigDict({"name": "mlp", "hidden_sizes": (4,), "num_classes": 10})
        return config

    monkeypatch.setattr(cifar10, "make_config", small)
    data_dir, runs = write_set(tmp_path), tmp_path / "runs"
    cell = Cell("cifar10_jpeg", "lamb", 16.0, 0)
    text = cifar10.study([cell], runs, data_dir)
    (record,) = read_records(tmp_path / "cifar10.jsonl")
    assert record["updates"] == 2 and 0 <= record["accuracy"] <= 1
    assert f"| 16, shorter | {record['accuracy']:.4f} |" in text
    assert (tmp_path / "cifar10.md").read_text() == text

    def train(*args: object, **kwargs: object) -> None:
        raise AssertionError("it was complete")

    monkeypatch.setattr(cifar10, "train", train)
    assert cifar10.study([cell], tmp_path / "nothing", None) == text  # by its record
    (tmp_path / "cifar10.jsonl").unlink()
    assert cifar10.study([cell], runs, None, training=False) == text  # by its workdir

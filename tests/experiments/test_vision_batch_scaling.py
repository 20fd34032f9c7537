"""The batch-scaling study on CIFAR-10: its cells, their recipes, how rates are chosen, the page."""

import math
import pathlib
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from experiments.vision import batch_scaling, batch_scaling_page, cifar10
from experiments.vision.batch_scaling import Cell, Setting
from lamb_tpu import config as config_lib
from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import resolve
from lamb_tpu.store.metrics import read_records
from tests.experiments.test_vision_cifar10 import write_run, write_set

SETTING = Setting("cifar10_jpeg", "davidnet", 8, 12.0)
OPTIMIZERS = ("lamb", "lars", "momentum")


def test_a_rule_carries_each_rate() -> None:
    rates = {"lamb": 0.02, "lars": 4.0, "momentum": 0.4}
    cells = batch_scaling.cells(SETTING, rates, batch_scaling.BATCHES, [0, 1])
    assert len({cell.name for cell in cells}) == len(cells) == 36
    assert [cell.batch for cell in cells[:3]] == [16_384] * 3
    peaks = {}
    for cell in cells:
        config = batch_scaling.make_config(cell, None)
        config_lib.check_keys(config)
        config_lib.check_values(config)
        found = resolve(config, 50_000)
        peaks[cell.optimizer, cell.batch] = found.peak_learning_rate
        assert found.total_steps == math.ceil(12 * 50_000 / cell.batch)
        share = {"lamb": 6 / 24}.get(cell.optimizer, 5 / 24)
        assert found.warmup_steps == pytest.approx(share * 12 * 50_000 / cell.batch)
        assert config.batch_size == 512 * config.accumulation_steps
        assert (config.model.width, config.model.group_size) == (8, 512)
        assert (config.data.train_split, config.data.eval_split) == ("train", "test")
    assert peaks["lamb", 8192] == pytest.approx(4 * 0.02)
    assert peaks["lars", 2048] == pytest.approx(2 * 4.0)
    assert peaks["momentum", 16_384] == pytest.approx(32 * 0.4)


def test_rates_are_chosen_without_the_test_pictures() -> None:
    grid = batch_scaling.tuning_cells(SETTING, OPTIMIZERS)
    assert [cell.rate for cell in grid if cell.optimizer == "momentum"] == [0.2, 0.4, 0.8]
    for cell in grid:
        config = batch_scaling.make_config(cell, None)
        assert (cell.batch, cell.epochs, config.accumulation_steps) == (512, 3.0, 1)
        assert (config.data.train_split, config.data.eval_split) == ("train[:90%]", "train[90%:]")


def fake_runs(monkeypatch: pytest.MonkeyPatch) -> list[ConfigDict]:
    """Stands in for training: the rate 0.2 of momentum is best, 16,384 costs 0.25 or diverges."""
    seen = []

    def run(config: ConfigDict, folder: pathlib.Path) -> None:
        seen.append(config)
        rate, large = config.optimizer.learning_rate, config.batch_size > 512
        accuracy = 0.75 - 0.25 * large + 0.125 * (rate == 0.2)
        write_run(folder, float(config.duration.split()[0]), accuracy)
        if large and config.optimizer.name == "lars":
            (folder / "diverged.txt").touch()

    monkeypatch.setattr(cifar10, "run", run)
    return seen


def test_study(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_runs(monkeypatch)
    monkeypatch.setattr(batch_scaling, "FOLDER", tmp_path)

    def study(**changes: Any) -> str:
        arguments = {"optimizers": OPTIMIZERS, "batches": [512, 16_384], "seeds": [0],
                     "runs": tmp_path / "runs", "data_dir": "folder"}
        return batch_scaling.study(SETTING, **(arguments | changes))

    text = study()
    assert len(seen) == 9 + 6 and {config.data.dir for config in seen} == {"folder"}
    assert [(c.batch_size, c.optimizer.name) for c in seen[9:12]] == [
        (16_384, "lamb"), (16_384, "lars"), (16_384, "nesterov"),
    ]
    assert seen[11].optimizer.learning_rate == 0.2
    assert "DavidNet of width 8 (64 as published), float32, 12 epochs" in text
    assert "JPEGs of quality 75, which costs accuracy" in text
    assert "| batch | updates | LAMB, square root: rate | accuracy | LARS, square root:" in text
    # Of equals the smallest rate wins: half the recipe's for LAMB and LARS.
    rates = 10 / 1024 * 32**0.5, 2 * 32**0.5, 6.4
    assert (f"| 16,384 | 9 | {rates[0]:.3g} | 0.5000 | {rates[1]:.3g} | diverged | "
            f"{rates[2]:.3g} | 0.6250 |") in text
    assert "- momentum, linear: 0.8750 at 512, 0.6250 at 16,384, 25.00 points less." in text
    assert "- LARS, square root: 0.7500 at 512, diverged at 16,384." in text
    assert "- Highest at 16,384: momentum, linear, 0.6250." in text
    assert "momentum's is the smallest one that was tried" in text
    assert "Batch 512, 3 epochs of nine tenths" in text and "| momentum | 0.2 | 0.8750 |" in text
    assert "warm-up in shares of the run: LAMB 25%, LARS 21%, momentum 21%" in text
    assert "One seed: small differences may be chance." in text
    assert (tmp_path / "batch_scaling.png").read_bytes()[:4] == b"\x89PNG"

    assert study(runs=tmp_path / "nothing", training=False) == text and len(seen) == 15
    text = study(seeds=[0, 1], batches=[512, 1024])
    assert "0.8750 (0.8750 to 0.8750)" in text and "One seed" not in text
    assert len(seen) == 15 + 3 + 6
    rows = read_records(tmp_path / "batch_scaling.jsonl")
    assert len(rows) == len(seen)


def test_mistakes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_scaling, "FOLDER", tmp_path)

    def study(setting: Setting = SETTING, batch: int = 512, training: bool = True) -> None:
        batch_scaling.study(setting, OPTIMIZERS, [batch], [0], tmp_path, None, training)

    with pytest.raises(UserError, match="--batches has 768; each must be a multiple of 512"):
        study(batch=768)
    with pytest.raises(UserError, match="--width is 8, and only --model=davidnet has one"):
        study(SETTING._replace(model="resnet18"))
    with pytest.raises(UserError, match="--data_dir is missing"):
        study()
    with pytest.raises(UserError, match="9 of 9 runs that choose the rates are not there"):
        study(training=False)
    for cell in batch_scaling.tuning_cells(SETTING, OPTIMIZERS):
        write_run(tmp_path / cell.name, cell.epochs, 0.5)
    with pytest.raises(UserError, match="holds no complete run of the study"):
        study(training=False)


def test_one_seed_of_two_that_diverged() -> None:
    records = [{"accuracy": value} for value in (0.5, None)]
    assert batch_scaling_page._accuracy(records) == "1 of 2 diverged"


def test_every_cell_can_be_made(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    folder, setting = write_set(tmp_path), SETTING._replace(width=2)
    for cell, sizes in (
        (Cell(*setting, "lars", 16_384, 4.0, "test", 0), (64, 16)),
        (Cell(*setting, "lamb", 512, 0.02, "held_out", 0), (58, 6)),
        (Cell(*setting._replace(model="resnet18"), "momentum", 1024, 0.4, "test", 0), (64, 16)),
    ):
        run = prepare(batch_scaling.make_config(cell, folder), tmp_path / cell.name)
        assert (len(run.train_set), len(run.eval_set)) == sizes
        assert "groups of 512 examples, 1 in a forward pass" in run.batch_norm

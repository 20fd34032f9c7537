"""Tests translation runs with batches of several widths: resuming, devices and microbatches."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.run.build import prepare
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny


def recipe(**changes: Any) -> ConfigDict:
    config = tiny.recipe_file(tiny.ROOT / "configs" / "translation.py").get_config("smoke")
    values = {
        "batch_size": 32,
        "duration": "6 steps",
        "data.train_split": "train[:150]",
        "data.eval_split": "test[:16]",
        "data.options.widths": 3,
        "data.options.vocab_size": 250,
        "data.options.max_length": 20,
        "model.vocab_size": 250,
        "model.features": 8,
        "model.dropout_rate": 0.2,
        "task.beam": 2,
        "task.max_length": 8,
        "checkpoint.every": "2 steps",
        "checkpoint.keep": 10,
        "log.every": "1 steps",
        "log.tensorboard": False,
        "eval.batch_size": 16,
    }
    return tiny.change(config, values | {key.replace("__", "."): v for key, v in changes.items()})


def use(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Uses only the first `count` simulated devices, because each device adds compile time and run time."""
    devices = jax.local_devices()[:count]
    monkeypatch.setattr(jax, "devices", lambda: devices)


def last(workdir: pathlib.Path) -> dict[str, Any]:
    return tiny.untimed(read_records(workdir / "metrics.jsonl", "eval")[-1])


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 1)
    config = recipe()
    run = prepare(config, None)
    widths = [shapes["source_ids"].shape[1] for shapes in run.abstract_batches()]
    assert widths == [14, 20]
    full, cut = tmp_path / "full", tmp_path / "cut"
    metrics = train(config, full, quiet=True)
    assert set(metrics) == {"loss", "perplexity", "accuracy", "bleu"}
    assert (full / "bleu.json").exists()
    assert len((full / "translations.txt").read_text().splitlines()) == 16
    with tiny.preempted_at(4):
        train(config, cut, quiet=True)
    train(config, cut, quiet=True)
    tiny.same_state(config, cut, full)
    assert last(cut) == last(full)


@pytest.mark.long
def test_devices_and_microbatches_change_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, 2)
    split = recipe(accumulation_steps=2, parallel__backend="shard_map")
    train(split, tmp_path / "many", quiet=True)
    actual = tiny.arrays(tiny.restored(split, tmp_path / "many")[0].params)
    use(monkeypatch, 1)
    train(recipe(), tmp_path / "one", quiet=True)
    expected = tiny.arrays(tiny.restored(recipe(), tmp_path / "one")[0].params)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, atol=2e-5, err_msg=name)
    many, one = last(tmp_path / "many"), last(tmp_path / "one")
    assert many["bleu"] == pytest.approx(one["bleu"]) and many["step"] == 6
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5)

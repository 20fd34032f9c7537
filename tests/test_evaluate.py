"""Every example counts once, whatever the batch size and the number of devices."""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from lamb_tpu import data, models
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint, make_evaluator
from lamb_tpu.metrics import read_records
from lamb_tpu.parallel.step import TrainState
from lamb_tpu.run import Run, prepare
from lamb_tpu.tasks import build
from tests import tiny

NUM_EXAMPLES = 360


def model() -> models.Model:
    """Logits that favour class 0 by the one pixel's value; a blank image gives NaN."""

    def apply(variables: Any, inputs: jax.Array, *, train: bool, key: Any = None):
        value = inputs.reshape(inputs.shape[0])
        logits = jnp.stack([jnp.log(value * 1e3), jnp.zeros_like(value)], axis=1)
        return logits, {}

    return models.Model(lambda key, inputs: {"params": {}}, apply)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An evaluation whose every example matters: the right ones lie at the end."""
    # Example i has the pixel i % 251 + 1; the last 100 are right, and the first 260 wrong.
    image = (np.arange(NUM_EXAMPLES) % 251 + 1).astype(np.uint8).reshape(-1, 1, 1, 1)
    label = np.where(np.arange(NUM_EXAMPLES) >= 260, 0, 1).astype(np.int32)
    source = data.ArraySource("made", {"image": image, "label": label}, num_classes=2)
    prepared = prepare(tiny.digits(), tmp_path_factory.mktemp("run"))
    task = build("classification", model(), input_std=1.0)
    return dataclasses.replace(prepared, task=task, eval_set=source)


def expected() -> dict[str, float]:
    logit = np.log((np.arange(NUM_EXAMPLES) % 251 + 1) * 1e3)
    right = np.where(np.arange(NUM_EXAMPLES) >= 260, logit, 0.0)
    return {
        "loss": float(np.mean(np.logaddexp(logit, 0) - right)),
        "accuracy": 100 / NUM_EXAMPLES,
    }


@pytest.mark.parametrize(
    "batch_size, num_devices", [(8, 8), (64, 8), (1024, 8), (360, 8), (64, 1), (7, 1), (359, 1)]
)
def test_metrics_depend_on_nothing_else(run: Run, batch_size: int, num_devices: int) -> None:
    config = tiny.digits(eval__batch_size=batch_size)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))
    state = TrainState(jnp.int32(0), {}, {}, (), jax.random.key(0))
    metrics = make_evaluator(dataclasses.replace(run, config=config, mesh=mesh))(state)
    assert metrics["accuracy"] == expected()["accuracy"]  # sums of ones are exact
    assert metrics["loss"] == pytest.approx(expected()["loss"], rel=1e-6)


def test_padding_that_gives_nan_does_not_leak(run: Run) -> None:
    batch = {
        "image": np.array([3, 0, 0, 5], np.uint8).reshape(4, 1, 1, 1),
        "label": np.array([1, 0, 1, 0], np.int32), "mask": np.array([1, 0, 0, 1], np.float32),
    }
    logits, _ = run.task.model.apply({}, batch["image"].astype(np.float32), train=False)
    assert not np.isfinite(np.asarray(logits)[1]).all()
    sums = run.task.evaluate({}, {}, batch)
    losses = [np.logaddexp(np.log(3e3), 0), np.logaddexp(np.log(5e3), 0) - np.log(5e3)]
    assert float(sums["loss"][0]) == pytest.approx(sum(losses), rel=1e-6)
    assert [float(x) for x in (sums["loss"][1], *sums["accuracy"])] == [2, 1, 2]


def test_checkpoints_give_the_metrics_of_the_run(trained: pathlib.Path) -> None:
    config = tiny.digits()
    records = read_records(trained / "metrics.jsonl", "eval")
    newest = evaluate_checkpoint(config, trained)
    assert newest == {"step": 12, **{k: records[-1][k] for k in ("accuracy", "loss")}}
    before = evaluate_checkpoint(config, trained, step=8)
    assert before["step"] == 8 and before["loss"] > newest["loss"]


def test_what_is_not_there(trained: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="no checkpoint of update 9; it has: 4, 8, 12"):
        evaluate_checkpoint(tiny.digits(), trained, step=9)
    with pytest.raises(UserError, match="holds no run: config.json is missing"):
        evaluate_checkpoint(tiny.digits(), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="holds a run of another config .seed: 0 there, 1 now"):
        evaluate_checkpoint(tiny.digits(seed=1), trained)


def test_run_without_a_checkpoint_yet(copy: pathlib.Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UserError, match=f"--workdir {copy} has no checkpoint yet"):
        evaluate_checkpoint(tiny.digits(), copy)


def test_damaged_checkpoint(copy: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    (copy / "checkpoints" / "12" / "state" / "manifest.ocdbt").unlink()
    assert evaluate_checkpoint(tiny.digits(), copy)["step"] == 8
    captured = capsys.readouterr()
    assert "the checkpoint of update 12" in captured.err and not captured.out
    with pytest.raises(UserError, match="state/manifest.ocdbt is missing"):
        evaluate_checkpoint(tiny.digits(), copy, step=12)

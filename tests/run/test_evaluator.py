"""Evaluation counts each example once, for any batch size and number of devices."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, models
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.describe import describe
from lamb_tpu.run.evaluator import make_evaluator, metric_names
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records
from lamb_tpu.tasks import build
from lamb_tpu.tasks.classification import Classification
from lamb_tpu.train import train
from tests import tiny

NUM_EXAMPLES = 997  # a prime: only the batch sizes 1 and 997 divide it


def config(**changes: Any) -> ConfigDict:
    """Returns the config of a short run with averaged weights; 1, 2, 3, 4 or 8 devices can train it."""
    return tiny.digits(
        batch_size=96, data__eval_split=f"train[:{NUM_EXAMPLES}]", ema__decay=0.5, **changes
    )


class Listing(Classification):
    """A classification task for which the host scores all predictions and writes them to a file."""

    score_names = ("listed", "error")

    def predict(self, params: Any, model_state: Any, batch: Any) -> Any:
        outputs, _ = self.model.apply({"params": params}, self._inputs(batch), train=False)
        return {"image": batch["image"], "found": (outputs, batch["label"])}

    def score(self, source: Any, outputs: Any) -> tuple[dict[str, float], dict[str, str]]:
        images, (logits, labels) = outputs["image"], outputs["found"]
        assert {type(array) for array in jax.tree.leaves(outputs)} == {np.ndarray}
        in_order = np.array_equal(images, source.arrays["image"])
        in_order &= np.array_equal(labels, source.arrays["label"])
        scores = {"listed": in_order * len(logits), "error": np.mean(logits.argmax(1) != labels)}
        return scores, {"labels.txt": json.dumps(logits.argmax(1).tolist())}


def listing(run: Run, num_examples: int = NUM_EXAMPLES) -> Run:
    """Returns the run with the task `Listing` on `num_examples` examples."""
    task = Listing(**{f.name: getattr(run.task, f.name) for f in dataclasses.fields(run.task)})
    eval_set = data.load("digits", f"train[:{num_examples}]")
    return dataclasses.replace(run, task=task, eval_set=eval_set)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("averaged")
    train(config(), workdir, quiet=True)
    return workdir


def restored(run: Run) -> TrainState:
    """Returns the last state of `averaged` on the devices of the run."""
    with Checkpoints(run.folder.checkpoints, 1, writes=False) as checkpoints:
        return checkpoints.restore(12, run.abstract_state)[0]


def counted(params: Any, num_examples: int = NUM_EXAMPLES) -> tuple[int, float]:
    """Computes the number of correct predictions and the mean loss with NumPy in float64."""
    layers = {name: {k: np.float64(v) for k, v in layer.items()} for name, layer in params.items()}
    examples = data.load("digits", f"train[:{num_examples}]").arrays
    x = examples["image"].reshape(num_examples, -1) / 16.0
    x = np.maximum(x @ layers["hidden0"]["kernel"] + layers["hidden0"]["bias"], 0)
    logits = x @ layers["output"]["kernel"] + layers["output"]["bias"]
    chosen = logits[np.arange(num_examples), examples["label"]]
    losses = np.log(np.exp(logits).sum(axis=1)) - chosen
    return int((logits.argmax(axis=1) == examples["label"]).sum()), float(losses.mean())


def assert_counted(metrics: dict[str, float], state: TrainState, num_examples: int) -> None:
    metrics = dict(metrics)
    for prefix, params in (("", state.params), ("ema_", state.ema[0])):
        if f"{prefix}listed" in metrics:
            assert metrics.pop(f"{prefix}listed") == num_examples
            accuracy = metrics[f"{prefix}accuracy"]
            assert metrics.pop(f"{prefix}error") == pytest.approx(1 - accuracy)
        right, loss = counted(params, num_examples)
        assert metrics[f"{prefix}accuracy"] == right / num_examples
        assert metrics[f"{prefix}loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics.keys() == {"accuracy", "loss", "ema_accuracy", "ema_loss"}


def test_averages_differ_from_weights(averaged: pathlib.Path) -> None:
    """If averages and weights were equal, the tests below could not distinguish them."""
    state, _ = tiny.restored(config(), averaged)
    assert counted(state.params)[0] != counted(state.ema[0])[0]


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_every_example_counts_once_on_any_devices(averaged: pathlib.Path, num_devices: int) -> None:
    for batch_size in (7, 64, 360, 997, 1024, 4000):
        settings = config(eval__batch_size=batch_size)
        run = prepare(settings, averaged, jax.devices()[:num_devices])
        state = restored(run)
        assert_counted(make_evaluator(run)(state), state, NUM_EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("per_process", [1, 2])
def test_every_example_counts_once_on_two_processes(
    averaged: pathlib.Path, tmp_path: pathlib.Path, per_process: int
) -> None:
    """With 5 examples in batches of 4, the second process has none in the last batch."""
    state, _ = tiny.restored(config(), averaged)
    launched = tiny.command(
        "lamb_tpu.launch",
        "local",
        "--processes=2",
        f"--devices-per-process={per_process}",
        "--module=tests.job",
        "--",
        "evaluate",
        str(tmp_path),
        str(averaged),
    )
    assert launched.returncode == 0, launched.stderr
    one, two = (json.loads((tmp_path / f"{index}.json").read_text()) for index in (0, 1))
    assert one == two and len(one) == 7
    for num_examples, _, metrics in one:
        assert "listed" in metrics
        assert_counted(metrics, state, num_examples)


def test_averages_that_are_split(averaged: pathlib.Path) -> None:
    """Under ZeRO-1 no device has the complete averages."""
    run = prepare(config(parallel__optimizer_state="zero1"), averaged)
    state = restored(run)
    kernel = state.ema[0]["hidden0"]["kernel"]
    assert not kernel.is_fully_replicated
    assert_counted(make_evaluator(run)(state), state, NUM_EXAMPLES)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_the_host_scores_every_example_once_in_order(
    averaged: pathlib.Path, num_devices: int
) -> None:
    for batch_size in (96, 1024):
        settings = config(eval__batch_size=batch_size)
        run = prepare(settings, averaged, jax.devices()[:num_devices])
        state = restored(run)
        metrics = make_evaluator(listing(run))(state)
        assert metrics.keys() == set(metric_names(listing(run)))
        assert metrics["ema_listed"] and metrics["error"] != metrics["ema_error"]
        assert_counted(metrics, state, NUM_EXAMPLES)
    assert not list(averaged.glob("*labels.txt"))


def test_files_of_the_weights_and_of_their_averages(
    averaged: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    state, _ = tiny.restored(config(), averaged)
    run = listing(prepare(config(), tmp_path))
    make_evaluator(run, keep_file=run.folder.write_file)(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ema_labels.txt", "labels.txt"]
    for prefix, params in (("", state.params), ("ema_", state.ema[0])):
        actual = json.loads((tmp_path / f"{prefix}labels.txt").read_text())
        right = np.sum(np.array(actual) == run.eval_set.arrays["label"])
        assert len(actual) == NUM_EXAMPLES and right == counted(params)[0]


def test_batch_size_is_rounded_up_and_shown(averaged: pathlib.Path) -> None:
    run = prepare(config(eval__batch_size=100), averaged)
    assert run.eval_batch_size == 104
    assert "config.eval.batch_size is 100; batches of 104" in describe(run)
    assert "config.eval.batch_size" not in describe(prepare(config(), averaged))


def test_between_is_called_before_every_batch(averaged: pathlib.Path) -> None:
    class Stop(Exception):
        pass

    calls = []

    def between() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Stop

    run = prepare(config(eval__batch_size=400), averaged)
    state, _ = tiny.restored(config(), averaged)
    with pytest.raises(Stop):
        make_evaluator(run, between)(state)
    calls.clear()
    assert make_evaluator(run, lambda: calls.append(0))(state)["accuracy"]
    assert len(calls) == 3


@pytest.mark.parametrize("share, reads", [(0.02, 5), (0.0, 8)])
def test_a_set_that_fits_is_read_once(
    averaged: pathlib.Path, monkeypatch: pytest.MonkeyPatch, share: float, reads: int
) -> None:
    """After a complete evaluation the batches stay on the devices and give the same metrics."""
    run = prepare(config(eval__batch_size=400, loop__held_share=share), averaged)
    state, _ = tiny.restored(config(), averaged)
    actual, gather = [], run.eval_set.gather

    def counted(indices: np.ndarray) -> data.Batch:
        actual.append(len(indices))
        return gather(indices)

    monkeypatch.setattr(run.eval_set, "gather", counted)
    polls: list[int] = []

    def between() -> None:
        polls.append(0)
        if len(polls) == 2:
            raise KeyboardInterrupt

    evaluate = make_evaluator(run, between)
    with pytest.raises(KeyboardInterrupt):  # interrupts the second of three batches
        evaluate(state)
    metrics = evaluate(state)
    assert evaluate(state) == metrics and len(polls) == 2 + 3 + 3
    assert len(actual) == reads
    other = state.replace(params=jax.tree.map(lambda leaf: leaf * 0.5, state.params))
    assert evaluate(other)["loss"] != metrics["loss"]


def test_averages_are_evaluated_in_training_and_afterwards(averaged: pathlib.Path) -> None:
    records = read_records(averaged / "metrics.jsonl", "eval")
    newest = evaluate_checkpoint(config(eval__batch_size=50), averaged)
    assert records[-1]["step"] == newest["step"] == 12
    assert records[-1]["ema_accuracy"] == newest["ema_accuracy"]
    assert records[-1]["ema_loss"] == pytest.approx(newest["ema_loss"], rel=1e-6)
    assert records[0]["ema_loss"] != records[1]["ema_loss"]


def model() -> models.Model:
    """Returns a model whose logit of class 0 is log(1000 * pixel), so -infinity for a blank image."""

    def apply(variables: Any, inputs: jax.Array, *, train: bool, key: Any = None):
        value = inputs.reshape(inputs.shape[0])
        logits = jnp.stack([jnp.log(value * 1e3), jnp.zeros_like(value)], axis=1)
        return logits, {}

    return models.Model(lambda key, inputs: {"params": {}}, apply)


def test_padding_that_gives_nan_does_not_leak() -> None:
    task = build("classification", model(), input_std=1.0)
    batch = {
        "image": np.array([3, 0, 0, 5], np.uint8).reshape(4, 1, 1, 1),
        "label": np.array([1, 0, 1, 0], np.int32),
        "mask": np.array([1, 0, 0, 1], np.float32),
    }
    logits, _ = task.model.apply({}, batch["image"].astype(np.float32), train=False)
    assert not np.isfinite(np.asarray(logits)[1]).all()
    sums = task.evaluate({}, {}, batch)
    losses = [np.logaddexp(np.log(3e3), 0), np.logaddexp(np.log(5e3), 0) - np.log(5e3)]
    assert float(sums["loss"][0]) == pytest.approx(sum(losses), rel=1e-6)
    assert [float(x) for x in (sums["loss"][1], *sums["accuracy"])] == [2, 1, 2]

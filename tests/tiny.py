"""Small runs on the embedded digits, and what tests ask of a run's folder."""

import hashlib
import importlib.util
import itertools
import os
import pathlib
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.config import base_config
from lamb_tpu.models.bert_rules import PARAMETERS_SCANNED
from lamb_tpu.run.build import prepare
from lamb_tpu.store.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parent.parent


def recipe_file(path: pathlib.Path) -> ModuleType:
    """The module of a config file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def change(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """The config with keys such as 'eval.every' set, whatever their types; new keys are added."""
    with config.unlocked(), config.ignore_type():
        for key, value in changes.items():
            *path, last = key.split(".")
            node = config
            for part in path:
                node = node[part]
            node[last] = value
    return config


def digits(**changes: Any) -> ConfigDict:
    """12 updates at batch 64 of 256 examples, a checkpoint every 4, an evaluation every 6.

    A key of the keywords has '__' where the config has a dot.
    """
    config = base_config()
    config.model = ConfigDict({"name": "mlp", "hidden_sizes": (16,)})
    config.optimizer = ConfigDict(
        {"name": "lamb", "learning_rate": 0.02, "weight_decay": 0.01, "rules": "no_bias_no_norm"}
    )
    config.task = ConfigDict({"name": "classification", "input_std": 16.0})
    values = {
        "batch_size": 64,
        "duration": "12 steps",
        "data.train_split": "train[:256]",
        "schedule.warmup": "1 epochs",
        "schedule.decay": "polynomial",
        "checkpoint.every": "4 steps",
        "checkpoint.keep": 10,
        "eval.every": "6 steps",
        "eval.batch_size": 128,
        "log.every": "1 steps",
        "log.tensorboard": False,
    }
    return change(config, values | {key.replace("__", "."): v for key, v in changes.items()})


def unbroken(text: str) -> str:
    """Words of a text for the terminal with one space between, wherever its lines were broken."""
    return " ".join(text.split())


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record of metrics.jsonl without what was measured of time, in which no two runs agree."""
    measured = (
        "seconds",
        "seconds_with_startup",
        "examples_per_second",
        "tokens_per_second",
        "mfu",
    )
    return {key: value for key, value in record.items() if key not in measured}


def bert(**changes: Any) -> ConfigDict:
    """A BERT of two layers on text that comes with Python, without dropout."""
    config = digits(duration="2 steps", checkpoint__every="1 steps", eval__every="2 steps")
    config.batch_size = config.eval.batch_size = 8
    config.data.name, config.data.train_split = "python_docs", "train"
    config.data.options = ConfigDict(
        {"vocab_size": 512, "sequence_length": 32, "max_predictions": 5, "next_sentence": True}
    )
    config.task = ConfigDict({"name": "masked_lm"})
    config.model = ConfigDict(
        {
            "name": "bert",
            "num_layers": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "vocab_size": 512,
            "intermediate_size": 24,
            "max_positions": 32,
            "dtype": "float32",
            "dropout_rate": 0.0,
            "attention_dropout_rate": 0.0,
            "heads": ("mlm", "nsp"),
            "scan_layers": False,
        }
    )
    change(config, {key.replace("__", "."): value for key, value in changes.items()})
    if config.model.scan_layers:
        change(config, {"optimizer.rules": PARAMETERS_SCANNED})
    return config


def text(folder: pathlib.Path) -> pathlib.Path:
    """Writes a small text of 30 words in the form of the Penn Treebank; returns its folder."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in {"train": 90, "valid": 20, "test": 10}.items():
        words = rng.integers(29, size=(lines, 7)) * rng.integers(2, size=(lines, 1))
        rows = [" ".join(f"w{word}" for word in row) for row in words]
        # Every word stands in the training text, whatever is drawn.
        rows += [" ".join(f"w{word}" for word in range(29))]
        (folder / f"ptb.{split}.txt").write_text("".join(f" {row} \n" for row in rows))
    return folder


def words(folder: pathlib.Path | str, **changes: Any) -> ConfigDict:
    """12 updates of a language model on `text`, 11 of them in the first epoch, by plain SGD."""
    config = digits(eval__batch_size=4)
    config.batch_size = 8
    config.data.name, config.data.train_split, config.data.eval_split = "ptb", "train", "valid"
    config.data.dir = str(folder)
    config.data.options = ConfigDict({"steps": 8, "layout": "tensorflow", "eval_streams": 5})
    config.task = ConfigDict({"name": "language_model", "sum_over_time": True})
    config.model = ConfigDict(
        {
            "name": "lstm_lm",
            "features": 8,
            "num_layers": 2,
            "vocab_size": 30,
            "init_scale": 0.3,
            "dropout_rate": 0.2,
            "dropout": "variational",
        }
    )
    config.optimizer = ConfigDict(
        {"name": "sgd", "learning_rate": 0.5, "rules": "all", "clip_global_norm": 5.0}
    )
    return change(config, {key.replace("__", "."): value for key, value in changes.items()})


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Every leaf as a NumPy array by its path, random keys as their words."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in leaves
    }


def assert_equal(found: Any, expected: Any) -> None:
    """Both trees hold the same arrays, bit for bit."""
    found, expected = arrays(found), arrays(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def restored(config: ConfigDict, workdir: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """State and data position of the newest checkpoint."""
    run = prepare(config, workdir)
    with Checkpoints(run.folder.checkpoints, config.checkpoint.keep, writes=False) as checkpoints:
        return checkpoints.restore(checkpoints.steps()[-1], run.abstract_state)


def save(config: ConfigDict, workdir: pathlib.Path) -> None:
    """A run's folder without its training: two checkpoints, of random weights."""
    run, rng = prepare(config, workdir), np.random.default_rng(0)
    run.folder.write_receipt(config, run.leaves.table(), {}, run.train_set)
    state = run.first_state()
    with Checkpoints(run.folder.checkpoints, 2) as checkpoints:
        for step in (1, 2):
            params, model_state = jax.tree.map(
                lambda x: jax.device_put(rng.normal(0, 0.3, x.shape).astype(x.dtype), x.sharding),
                (state.params, state.model_state),
            )
            saved = {"step": state.step + step, "params": params, "model_state": model_state}
            checkpoints.save(step, state.replace(**saved), {})


def fingerprint(folder: pathlib.Path) -> dict[str, str]:
    """The SHA-256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def start(module: str, *arguments: str, devices: int = 1) -> subprocess.Popen:
    """A command line of the project, in a process of its own."""
    environment = {**os.environ, "NPROC": "32", "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def command(module: str, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess:
    """Runs a command line of the project to its end."""
    process = start(module, *arguments, devices=devices)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(code: str) -> subprocess.CompletedProcess:
    """Runs code as a user would: without the JAX and TPU settings of the tests."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))
    }
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def preempt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """SIGTERM comes just before the `number`th poll from now on."""
    poll, numbers = Preemption.poll, itertools.count(1)

    def signalled(self: Preemption) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        poll(self)

    monkeypatch.setattr(Preemption, "poll", signalled)

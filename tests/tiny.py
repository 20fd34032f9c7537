"""Small runs on the bundled digits data set, and helpers to examine a run's folder."""

import contextlib
import hashlib
import importlib.util
import io
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.cluster.preemption import Preemption
from lamb_tpu.config import base_config
from lamb_tpu.errors import Preempted
from lamb_tpu.models.bert_rules import PARAMETERS_SCANNED
from lamb_tpu.run.build import prepare
from lamb_tpu.store.checkpoint import Checkpoints
from tests import commands

ROOT = pathlib.Path(__file__).resolve().parent.parent


def recipe_file(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def change(config: ConfigDict, changes: dict[str, Any]) -> ConfigDict:
    """Sets keys such as 'eval.every' in a config, whatever their types; new keys are added."""
    with config.unlocked(), config.ignore_type():
        for key, value in changes.items():
            *path, last = key.split(".")
            node = config
            for part in path:
                node = node[part]
            node[last] = value
    return config


def digits(**changes: Any) -> ConfigDict:
    """Returns a config: 12 updates at batch 64, a checkpoint every 4 updates, an evaluation every 6 updates.

    The data has 256 examples. `changes` sets keys, with '__' in place of each dot.
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
    """Undoes line breaks: returns the words of a terminal text, separated by one space."""
    return " ".join(text.split())


def has_ended(process: int, within: float) -> bool:
    """Waits at most `within` seconds; returns whether the process has ended.

    The process need not be a child of this process. A zombie counts as ended.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # a zombie: the parent has not read its status
            return True
        time.sleep(0.05)
    return False


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """Removes measured times, which differ between runs, from a record of metrics.jsonl."""
    measured = (
        "seconds",
        "seconds_with_startup",
        "examples_per_second",
        "tokens_per_second",
        "mfu",
    )
    return {key: value for key, value in record.items() if key not in measured}


def bert(**changes: Any) -> ConfigDict:
    """Returns a config of a two-layer BERT on text that comes with Python, without dropout."""
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
    """Writes a text with a vocabulary of 30 words in the format of the Penn Treebank; returns `folder`."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in {"train": 90, "valid": 20, "test": 10}.items():
        words = rng.integers(29, size=(lines, 7)) * rng.integers(2, size=(lines, 1))
        rows = [" ".join(f"w{word}" for word in row) for row in words]
        # The training text has every word, whatever words are drawn.
        rows += [" ".join(f"w{word}" for word in range(29))]
        (folder / f"ptb.{split}.txt").write_text("".join(f" {row} \n" for row in rows))
    return folder


def words(folder: pathlib.Path | str, **changes: Any) -> ConfigDict:
    """Returns a config of a language model on `text`: 12 updates of plain SGD, 11 of them in epoch 1."""
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
    """Returns every leaf as a NumPy array by its path; random keys become their raw uint32 data."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        for path, leaf in leaves
    }


def assert_equal(actual: Any, expected: Any) -> None:
    actual, expected = arrays(actual), arrays(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def restored(config: ConfigDict, workdir: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    run = prepare(config, workdir)
    with Checkpoints(run.folder.checkpoints, config.checkpoint.keep, writes=False) as checkpoints:
        return checkpoints.restore(checkpoints.steps()[-1], run.abstract_state)


def save(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Makes a run's folder without training: two checkpoints of random weights."""
    run, rng = prepare(config, workdir), np.random.default_rng(0)
    run.folder.write_receipt(run.spec, run.leaves.table(), {}, run.train_set)
    state = run.first_state()
    with Checkpoints(run.folder.checkpoints, 2) as checkpoints:
        for step in (1, 2):
            params, model_state = jax.tree.map(
                lambda x: jax.device_put(rng.normal(0, 0.3, x.shape).astype(x.dtype), x.sharding),
                (state.params, state.model_state),
            )
            saved = {"step": state.step + step, "params": params, "model_state": model_state}
            checkpoints.save(step, state.replace(**saved), {})


def cut(workdir: pathlib.Path, folder: pathlib.Path, last: int) -> pathlib.Path:
    """Copies a run without the checkpoints after update `last`."""
    copy = pathlib.Path(shutil.copytree(workdir, folder))
    for path in (copy / "checkpoints").iterdir():
        if int(path.name) > last:
            shutil.rmtree(path)
    return copy


def same_state(config: ConfigDict, workdir: pathlib.Path, other: pathlib.Path) -> Any:
    """Compares the newest checkpoints of two runs bit for bit; returns the first run's state."""
    (actual, position), (expected, wanted) = (restored(config, each) for each in (workdir, other))
    assert_equal(actual, expected)
    assert position["loader"] == wanted["loader"]
    return actual


def fingerprint(folder: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _environment(devices: int) -> dict[str, str]:
    return {**os.environ, "NPROC": "32", "JAX_NUM_CPU_DEVICES": str(devices)}


def start(module: str, *arguments: str, devices: int = 1) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=_environment(devices),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def command(
    module: str, *arguments: str, devices: int = 1, fresh: bool = False
) -> subprocess.CompletedProcess:
    """Runs a command line of the project to its end.

    Args:
      module: module of the command.
      arguments: arguments of the command.
      devices: number of simulated CPU devices.
      fresh: use a new Python process, not a fork of a process that has imported the package.
    """
    line, seconds = [module, *arguments], 300
    done = None if fresh else commands.run(line, _environment(devices), seconds)
    if done is not None:
        out, err = (io.StringIO(done[name], None).read() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(line, done["status"], out, err)
    process = start(*line, devices=devices)
    out, err = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(line, process.returncode, out, err)


def succeed(module: str, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess:
    """Runs a command line that must succeed."""
    done = command(module, *arguments, devices=devices)
    assert done.returncode == 0, done.stderr
    return done


def launched(processes: int, devices: int, *arguments: str) -> subprocess.CompletedProcess:
    """Trains in several processes on this machine."""
    shape = (f"--processes={processes}", f"--devices-per-process={devices}")
    return succeed("lamb_tpu.launch", "local", *shape, "--", *arguments)


def recipe(folder: pathlib.Path, value: str = "tiny.digits()", module: str = "tests.tiny") -> str:
    """Writes a config file that returns `value`, code that may use `module`; returns the --config flag."""
    package, _, name = module.rpartition(".")
    (folder / "recipe.py").write_text(
        f"from {package} import {name}\ndef get_config(argument=None):\n    return {value}\n"
    )
    return f"--config={folder / 'recipe.py'}"


def python(code: str) -> subprocess.CompletedProcess:
    """Runs code as a user would, without the JAX and TPU settings of the tests."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def preempt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Sends SIGTERM just before the `number`th poll, counted from this call."""
    poll, numbers = Preemption.poll, itertools.count(1)

    def signalled(self: Preemption) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        poll(self)

    monkeypatch.setattr(Preemption, "poll", signalled)


@contextlib.contextmanager
def preempted_at(number: int, match: str = "") -> Iterator[None]:
    """Expects SIGTERM, just before the `number`th poll, to end the block."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted, match=match):
        preempt_at(patch, number)
        yield

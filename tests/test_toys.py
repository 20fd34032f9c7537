"""Tests a custom exchange, batch rule and optimizer, each in one file outside the package."""

import importlib
import os
import pathlib
import signal
import sys

import jax
import pytest

from lamb_tpu.run.build import prepare
from tests import tiny
from tests.raising import rejected
from tests.test_train import without_seconds

FILES = {
    "toy_exchange": '''
import dataclasses

import jax
import jax.numpy as jnp

from lamb_tpu.parallel.exchange import Exchange, Residual


@dataclasses.dataclass(frozen=True)
class Rounding(Exchange):
    """Sends multiples of 2**-bits, and keeps the rest for the next update."""

    axes: tuple[str, ...]
    num_devices: int
    bits: int = 6

    requires = {"ema.decay": (0.0, "whose errors an average would hide")}

    def init(self, params):
        return Residual(device=jax.tree.map(jnp.zeros_like, params))

    def reduce(self, grads, residual):
        wanted = jax.tree.map(jnp.add, grads, residual.device)
        sent = jax.tree.map(lambda g: jnp.round(g * 2**self.bits) / 2**self.bits, wanted)
        rest = jax.tree.map(jnp.subtract, wanted, sent)
        return jax.lax.psum(sent, self.axes), Residual(device=rest)
''',
    "toy_rule": '''
import dataclasses

from lamb_tpu.batching.rules import Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubling(Rule):
    """Doubles the batch after every `examples` examples."""

    examples: int

    requires = {"ema.decay": (0.0, "whose errors an average would hide")}

    def next_batch(self, batch, statistics, examples):
        return self.granularity * 2 ** (1 + examples // self.examples)
''',
    "toy_optimizer": """
import optax


def heavy_ball(learning_rate, momentum: float = 0.9):
    return optax.sgd(learning_rate, momentum)


heavy_ball.requires = {"ema.decay": (0.0, "whose errors an average would hide")}
""",
    # The config for each component, which `tests.killing` runs.
    "toy_configs": """
from ml_collections import ConfigDict

from tests import tiny

COMMON = {"duration": "24 steps", "checkpoint.every": "3 steps", "eval.every": "12 steps"}
CHANGES = {
    "toy_exchange": {
        "parallel.backend": "shard_map",
        "parallel.exchange": ConfigDict({"name": "toy_exchange:Rounding", "bits": 5}),
    },
    "toy_rule": {
        "batch_rule": ConfigDict({"name": "toy_rule:Doubling", "examples": 512}),
        "accumulation_steps": 2,
    },
    "toy_optimizer": {
        "optimizer": ConfigDict({"name": "toy_optimizer:heavy_ball", "learning_rate": 0.05}),
    },
}


def config(name):
    return tiny.change(tiny.digits(), COMMON | CHANGES[name])
""",
}
TOYS = ("toy_exchange", "toy_rule", "toy_optimizer")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    for name, code in FILES.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


@pytest.mark.parametrize("name", TOYS)
def test_one_line_declares_what_it_does_not_combine_with(name: str, folder: pathlib.Path) -> None:
    config = importlib.import_module("toy_configs").config(name)
    prepare(config, None, jax.devices()[:2])
    with rejected("config.ema.decay", 0.9, "whose errors an average would hide", "use 0.0"):
        prepare(tiny.change(config, {"ema.decay": 0.9}), None, jax.devices()[:2])


@pytest.mark.long
@pytest.mark.parametrize("name", TOYS)
def test_killed_and_resumed(name: str, folder: pathlib.Path) -> None:
    def start(workdir: str, *moment: str) -> int:
        arguments = ("toy_configs", name, str(folder / workdir), *moment)
        process = tiny.start("tests.killing", *arguments, devices=8)
        _, err = process.communicate(timeout=300)
        assert "Traceback" not in err, err
        return process.returncode

    assert start("full") == 0
    for update in (4, 11):
        assert start("killed", str(update), "0.002") == -signal.SIGKILL
    assert start("killed") == 0
    config = importlib.import_module("toy_configs").config(name)
    full, killed = folder / "full", folder / "killed"
    tiny.same_state(config, killed, full)
    assert without_seconds(killed) == without_seconds(full)
    # Each start has a receipt of the file that it used.
    assert (killed / "run.jsonl").read_text().count(f"{name}.py") == 3

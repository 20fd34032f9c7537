"""Tests that runs with schedule-free AdamW evaluate the averaged weights and pass them on to other runs."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import optim
from lamb_tpu.errors import UserError
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.run.build import prepare
from lamb_tpu.run.weights import open_weights
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.run.test_evaluator import counted

NUM_EXAMPLES = 100


def config(**changes: Any) -> ConfigDict:
    # Clipping puts the optimizer's state inside a chain.
    optimizer = ConfigDict(
        {
            "name": "schedule_free_adamw",
            "learning_rate": 0.05,
            "weight_decay": 0.01,
            "rules": "no_bias_no_norm",
            "clip_global_norm": 1.0,
        }
    )
    return tiny.digits(
        **{
            "optimizer": optimizer,
            "schedule__decay": "constant",
            "parallel__optimizer_state": "zero1",
            "data__eval_split": f"train[:{NUM_EXAMPLES}]",
            **changes,
        }
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("schedule_free")
    train(config(), workdir, quiet=True)
    return workdir


@pytest.mark.long
def test_it_is_evaluated_at_the_averages(workdir: pathlib.Path) -> None:
    state, _ = tiny.restored(config(), workdir)
    averages = optim.evaluation_params(state.opt_state, state.params)
    right, loss = counted(averages, NUM_EXAMPLES)
    assert loss != pytest.approx(counted(state.params, NUM_EXAMPLES)[1], rel=1e-3)
    during = read_records(workdir / "metrics.jsonl", "eval")[-1]
    afterwards = evaluate_checkpoint(None, workdir)
    for metrics in (during, afterwards):
        assert metrics["step"] == 12
        assert metrics["accuracy"] == right / NUM_EXAMPLES
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.long
def test_its_weights_are_the_averages(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    state, _ = tiny.restored(config(), workdir)
    averages = optim.evaluation_params(state.opt_state, state.params)

    def same(actual: Any, expected: Any) -> bool:
        return all(
            np.allclose(a, b, rtol=1e-6, atol=1e-7)
            for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
        )

    assert same(open_weights(str(workdir), "--checkpoint").params(), averages)
    assert not same(state.params, averages)
    for state_option, expected in (("reset", averages), ("keep", state.params)):
        changes = {"init_from": str(workdir), "init__optimizer_state": state_option}
        train(
            config(duration="1 steps", checkpoint__every="1 steps", **changes),
            tmp_path / state_option,
            quiet=True,
        )
        first = prepare(config(**changes), tmp_path / "other" / state_option)
        values = first.start.values(first.abstract_state)
        actual = {
            path.removeprefix("params/"): value
            for path, value in values.items()
            if path.startswith("params/")
        }
        wanted = dict(
            zip(optim.parameters.leaf_paths(expected), jax.tree.leaves(expected), strict=True)
        )
        assert actual.keys() == wanted.keys()
        assert all(np.allclose(actual[path], wanted[path], rtol=1e-6, atol=1e-7) for path in actual)


def test_a_second_average_is_rejected(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match="config.ema.decay=0.9 cannot be combined with schedule_fr"):
        prepare(config(ema__decay=0.9), tmp_path)


@pytest.mark.parametrize(
    "optimizer, message",
    [
        ({"name": "adafactor"}, "config.optimizer: adafactor needs full tensors"),
        ({"name": "muon"}, "config.optimizer: muon needs full matrices"),
    ],
)
def test_unsplittable_tensors_are_rejected_before_the_run(
    optimizer: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    changed = config(
        optimizer=ConfigDict({"learning_rate": 0.01, **optimizer}), parallel__backend="shard_map"
    )
    with pytest.raises(UserError, match=message):
        prepare(changed, tmp_path)

"""Tests that training runs with sparse exchanges learn, and resume bit for bit."""

import pathlib
import shutil

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.parallel.components import RESIDUAL
from lamb_tpu.run.build import prepare
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny

EXCHANGES = {
    "topk": {"name": "topk", "ratio": 0.05},
    "dgc": {"name": "dgc", "ratio": 0.05, "warmup_steps": 6, "warmup_stages": 2, "clip_norm": 5.0},
    "ef14": {"name": "ef14", "compressor": "sign"},
    "ef21": {"name": "ef21", "ratio": 0.1, "momentum": 0.5, "whole_start": True},
    "ef21 plus": {"name": "ef21", "ratio": 0.1, "plus": True},
    "econtrol": {"name": "econtrol", "ratio": 0.1, "layerwise": True},
}


def config(exchange: dict, **changes) -> ConfigDict:
    """Returns a config with 12 updates of plain SGD, so that DGC's momentum is the only one."""
    changes = {"optimizer": ConfigDict({"name": "sgd", "learning_rate": 0.3}), **changes}
    return tiny.digits(
        parallel__backend="shard_map", parallel__exchange=ConfigDict(exchange), **changes
    )


def resumed_at_4(config: ConfigDict, workdir: pathlib.Path) -> pathlib.Path:
    """Copies a run and resumes it from update 4."""
    copy = pathlib.Path(shutil.copytree(workdir, workdir.with_name(workdir.name + "-cut")))
    for step in (8, 12):
        shutil.rmtree(copy / "checkpoints" / str(step))
    train(config, copy, quiet=True)
    return copy


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "econtrol" else pytest.mark.long)
        for name in EXCHANGES
    ],
)
def test_learns_and_resumes_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
    made = config(EXCHANGES[name])
    train(made, tmp_path / "run", quiet=True)
    losses = [record["loss"] for record in read_records(tmp_path / "run/metrics.jsonl", "train")]
    assert len(losses) == 12 and np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
    (expected, _), (actual, _) = (
        tiny.restored(made, workdir)
        for workdir in (tmp_path / "run", resumed_at_4(made, tmp_path / "run"))
    )
    tiny.assert_equal(actual, expected)
    kept = expected.parts[RESIDUAL]["kept"]
    # Residuals differ between devices, so resuming must return each residual to its device.
    for leaf in jax.tree.leaves(kept.device):
        rows = np.asarray(leaf).reshape(8, -1)
        assert np.any(rows != rows[:1])


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__optimizer_state": "zero1"},
        {"mesh__data": 4, "mesh__fsdp": 2},
        {"accumulation_steps": 2},
    ],
    ids=str,
)
@pytest.mark.long
def test_with_zero1_hierarchy_and_accumulation(changes, tmp_path: pathlib.Path) -> None:
    made = config(EXCHANGES["dgc"], **changes)
    train(made, tmp_path / "run", quiet=True)
    (expected, _), (actual, _) = (
        tiny.restored(made, workdir)
        for workdir in (tmp_path / "run", resumed_at_4(made, tmp_path / "run"))
    )
    tiny.assert_equal(actual, expected)


def test_bad_option_is_one_sentence(tmp_path: pathlib.Path) -> None:
    for exchange, message in [
        ({"name": "dgc", "ratio": 1.5}, r"config.parallel.exchange.ratio=1.5 is out of range;"),
        ({"name": "topk", "ratio": 0.0}, r"config.parallel.exchange.ratio=0.0 is out of range;"),
        (
            {"name": "ef14", "compressor": "zip"},
            "exchange.compressor='zip' is unknown; use topk, sign",
        ),
        ({"name": "dgc", "sparsity": 0.1}, "sparsity"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(config(exchange), tmp_path)

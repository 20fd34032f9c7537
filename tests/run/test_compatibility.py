"""The table of components that cannot be combined; `test_statistics` and others test more rows."""

from typing import Any, ClassVar

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu.run import compatibility
from lamb_tpu.run.combination import Combination
from lamb_tpu.run.settings import settings
from lamb_tpu.spec import parse
from lamb_tpu.tasks.classification import Classification
from tests import tiny
from tests.raising import rejected


def test_the_table_on_the_page_is_made_from_the_rows() -> None:
    page = (tiny.ROOT / "lamb_tpu" / "run" / "README.md").read_text()
    assert f"\n{compatibility.page()}\n" in page, "python -m lamb_tpu.run.compatibility prints it"


DGC = ConfigDict({"name": "dgc", "ratio": 0.1})
RAMP = ConfigDict({"name": "ramp", "points": ((0, 64),)})


@pytest.mark.parametrize(
    "devices, changes, fields",
    [
        (
            2,
            {"mesh__model": 2, "parallel__backend": "shard_map"},
            ("parallel.backend", "shard_map", "axes that split the batch, not config.mesh.model"),
        ),
        (
            2,
            {"parallel__exchange": DGC},
            ("parallel.exchange.name", "dgc", "no effect under config.parallel.backend='jit'"),
        ),
        (
            1,
            {"parallel__exchange": DGC, "parallel__backend": "shard_map"},
            ("parallel.exchange.name", "dgc", "has nothing to exchange: config.mesh splits"),
        ),
        (
            1,
            {"schedule__weight_decay_scaling": "timescale"},
            ("schedule.weight_decay_scaling", "timescale", "needs AdamW with a weight decay"),
        ),
        (
            1,
            {"loop__updates_per_call": 8, "batch_rule": RAMP},
            ("loop.updates_per_call", 8, "under config.batch_rule.name='ramp' the host adds"),
        ),
        (
            1,
            {
                "optimizer__name": "schedule_free_adamw",
                "optimizer__rules": "all",
                "ema__decay": 0.9,
            },
            ("ema.decay", 0.9, "schedule_free_adamw, which averages the weights itself"),
        ),
        (
            1,
            {"batch_rule": {"name": "noise_scale", "upper": 32}, "accumulation_steps": 4},
            ("batch_size", 64, "is outside the bounds of config.batch_rule, "),
        ),
    ],
)
def test_rejected_before_the_data(
    devices: int, changes: dict[str, Any], fields: tuple[Any, ...]
) -> None:
    config = tiny.digits(**changes, data__train_split="no such split")
    key, *others = fields
    with rejected(f"config.{key}", *others):
        settings(config, jax.devices()[:devices])


def test_an_evaluation_exchanges_and_measures_nothing() -> None:
    changes = {"parallel__exchange": DGC, "statistics__noise_scale": True}
    settings(tiny.digits(**changes), jax.devices()[:1], training=False)
    changes = {"mesh__model": 2, "parallel__backend": "shard_map"}
    with rejected("config.parallel.backend", "shard_map"):
        settings(tiny.digits(**changes), jax.devices()[:2], training=False)


def test_runs_side_by_side_need_no_more_than_the_config() -> None:
    parts = Combination(parse(tiny.digits(seeds="0:2", batch_rule=RAMP)))
    error = compatibility.rejection(parts, "seeds")
    assert error is not None and (error.key, error.value) == ("config.seeds", "0:2")
    assert "under config.batch_rule.name='ramp' the host adds up" in error.problem
    assert not compatibility.rejection(Combination(parse(tiny.digits(seeds="0:2"))), "seeds")


class Averaging(Classification):
    """A custom task that declares one requirement."""

    requires: ClassVar[dict[str, Any]] = {"ema.decay": (0.0, "which averages the weights itself")}


def test_a_custom_component_declares_its_requirements() -> None:
    task = ConfigDict({"name": f"{__name__}:Averaging", "input_std": 16.0})
    problem = f"config.task.name='{__name__}:Averaging', which averages the weights itself"
    with rejected("config.ema.decay", 0.9, problem, "use 0.0"):
        settings(tiny.digits(task=task, ema__decay=0.9), jax.devices()[:1])
    settings(tiny.digits(task=task), jax.devices()[:1])

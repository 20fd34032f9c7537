"""Stages of an exchange: names, sums, and a plan that compiles each stage."""

import types

import optax
import pytest
from ml_collections import ConfigDict

from lamb_tpu.cost.hlo import Array
from lamb_tpu.cost.timeline import Event, Timeline
from lamb_tpu.cost.traffic import Collective
from lamb_tpu.parallel.exchange.cast import Cast
from lamb_tpu.parallel.exchange.dgc import DGC
from lamb_tpu.parallel.step import Stage
from lamb_tpu.plan import making, stages
from lamb_tpu.plan.stages import StageRow
from tests import tiny
from tests.plan.planned import config_of, needs_compiler

AXES = ("data",)


def times(compute: float, exposed: float, size: int) -> tuple[Timeline, ...]:
    one = Collective("all-gather", ((0, 1, 2),), (Array("u8", (size,)),), 1)
    event = Event("x", one, "", "", exposed, exposed)
    return tuple(Timeline(compute, factor * exposed, (event,)) for factor in (0.5, 1, 2))


def test_one_stage_of_many_updates_is_not_counted() -> None:
    run = types.SimpleNamespace(
        exchange=None,
        tx=optax.sgd(0.1),
        stage=lambda update: Stage(),
        recipe=types.SimpleNamespace(total_steps=10**15),
    )
    assert stages.stages_of(run) == {Stage(): (0, 10**15)}  # type: ignore[arg-type]


def test_names() -> None:
    sparse = [Stage(DGC(AXES, 8, ratio=ratio)) for ratio in (0.25, 1 / 3000)]
    assert stages.names(sparse) == ["DGC, ratio=0.25", "DGC, ratio=0.0003333"]
    assert stages.names([Stage(Cast(AXES, 8)), sparse[0]]) == ["Cast", "DGC"]
    assert stages.names([Stage(), Stage(None, "frozen")]) == [
        "by the compiler",
        "by the compiler, optimizer frozen",
    ]


def test_sums_over_stages() -> None:
    rows = [
        stages.row("dense", 10, times(1.0, 2.0, 100)),
        stages.row("packed", 90, times(3.0, 0.5, 10)),
    ]
    assert rows[1] == StageRow("packed", 90, (3.0,) * 3, (0.25, 0.5, 1.0), {"u8": 20})
    actual = stages.seconds(rows)
    assert actual is not None
    assert actual[0] == (280.0,) * 3
    assert actual[1] == pytest.approx((10 + 22.5, 20 + 45, 40 + 90))
    unknown = stages.row("other", 5, None)
    assert stages.seconds([*rows, unknown]) is None
    text = stages.describe([*rows, unknown])
    assert text[0].startswith("stages of the run")
    assert [line.split() for line in text[2:]] == [
        ["dense", "10", "3e+03", "0.0001907", "MiB", "30", "s"],
        ["packed", "90", "3.5e+03", "1.907e-05", "MiB", "5.2", "min"],
        ["other", "5", "?", "?", "?"],
    ]


@pytest.mark.long
@needs_compiler
def test_a_plan_of_several_stages() -> None:
    """Plans DGC, with a warm-up of one stage, for links of 10 Gb/s between hosts."""
    config = tiny.change(
        config_of("digits.py:batch=256"),
        {
            "parallel.backend": "shard_map",
            "optimizer.b1": 0.0,
            "duration": "20 steps",
            "parallel.exchange": ConfigDict(
                {"name": "dgc", "ratio": 0.01, "warmup_steps": 4, "warmup_stages": 1}
            ),
        },
    )
    output: list[str] = []

    def waiting(text: str):
        output.append(text)
        return making.contextlib.nullcontext()

    plan = making.make_plan(config, "v3-32", waiting, gbps=10.0)
    assert len(output) == 2
    assert [row.updates for row in plan.stages] == [4, 16]
    assert [row.name for row in plan.stages] == ["DGC, ratio=0.1", "DGC, ratio=0.01"]
    sent = [sum(row.sent.values()) for row in plan.stages if row.sent]
    assert sent[0] > sent[1]
    # The plan describes the last stage; the totals cover all stages.
    assert plan.times is not None and plan.totals is not None and plan.step_seconds is not None
    assert plan.stages[1].compute == tuple(each.compute for each in plan.times)
    middle = [row.compute[1] + row.network[1] for row in plan.stages if row.compute and row.network]
    total = plan.totals.compute[1] + plan.totals.network[1]
    assert total == pytest.approx(4 * middle[0] + 16 * middle[1])
    assert plan.as_json()["run"]["stages"][0]["updates"] == 4
    assert "DGC, ratio=0.01" in plan.describe()

"""Plans of runs in which the batch size changes."""

import json
import pathlib
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.plan import changing, options, stages
from lamb_tpu.plan.changing import Stretch, at_microbatches, make_changing_plan, recorded
from lamb_tpu.plan.making import make_plan
from lamb_tpu.plan.stages import Along, BatchRow
from lamb_tpu.plan.totals import evaluations
from lamb_tpu.run.recipe import resolve
from lamb_tpu.spec import Spec, parse
from tests import tiny
from tests.plan.planned import needs_compiler
from tests.raising import rejected
from tests.run.test_batches import ramp

DECIDED = ConfigDict({"name": "norm_test", "eta": 0.5, "upper": 256})


def records(folder: pathlib.Path, values: list[dict[str, Any]]) -> pathlib.Path:
    lines = [json.dumps({"kind": "train", **value}) for value in values]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.mark.long
@needs_compiler
def test_the_time_along_a_ramp() -> None:
    """An update takes the time of a step with its batch size; the times of all updates add up."""
    config = parse(ramp(((0, 16), (64, 48), (256, 256)), duration="24 steps"))
    plan = make_changing_plan(config, "v5e-4", cache=None)
    assert plan.along is not None and plan.work is not None and plan.totals is not None
    actual = [(row.updates, row.examples) for row in plan.along.rows]
    # 1, 3 and 16 microbatches of 16 examples; the last batch is not truncated.
    assert actual == [(4, 64), (4, 192), (5, 1280)]
    recipe, exact = resolve(config, 256), list[tuple[float, float]]()
    for row, count in zip(plan.along.rows, (1, 3, 16), strict=True):
        direct = make_plan(at_microbatches(config, count, recipe), "v5e-4")
        assert direct.times is not None and row.compute is not None and row.network is not None
        assert row.compute == pytest.approx([each.compute for each in direct.times], rel=1e-4)
        assert row.network == pytest.approx([each.exposed for each in direct.times], rel=0.01)
        exact.append((row.updates * direct.times[1].compute, row.updates * direct.times[1].exposed))
    assert plan.totals.compute[1] == pytest.approx(sum(each for each, _ in exact), rel=1e-4)
    assert plan.totals.network[1] == pytest.approx(sum(each for _, each in exact), rel=0.01)
    due = sum(recipe.is_due(recipe.eval_every, step) for step in range(1, 14))
    assert plan.work.updates == plan.totals.updates == 13 and plan.work.evaluations == due
    output = plan.describe()
    assert (
        "updates by batch size, in microbatches of 16 examples:" in output
        and "fits" in output
        and "13 upd" in output
    )
    assert len(plan.as_json()["run"]["batches"]) == 3 and json.dumps(plan.as_json())


@needs_compiler
def test_recorded_batches_are_scaled_to_the_planned_examples(tmp_path: pathlib.Path) -> None:
    config = tiny.digits(batch_rule=DECIDED, accumulation_steps=4)
    with rejected(
        "config.batch_rule.name", "norm_test", "chooses its batches", "give --batches-of"
    ):
        make_changing_plan(config, "v5e-4")
    folder = records(tmp_path, [{"step": 4, "examples": 128}, {"step": 10, "examples": 384}])
    plan = make_changing_plan(config, "v5e-4", batches_of=str(folder))
    assert plan.along is not None and plan.work is not None
    assert [(row.updates, row.examples) for row in plan.along.rows] == [(8, 256), (12, 512)]
    assert plan.work.updates == 20
    with rejected("--batches-of", str(folder), "'ramp' fixes the batches", "leave --batches"):
        make_changing_plan(ramp(), "v5e-4", batches_of=str(folder))


def test_evaluations_are_counted_along_the_path() -> None:
    for every in ("20 examples", "1 steps", "100 examples", "7 steps", "768 examples"):
        recipe = resolve(ramp(eval__every=every), 256)
        assert recipe.path is not None
        path = changing._path(recipe, ramp(), None)
        due = [recipe.is_due(recipe.eval_every, step) for step in range(1, recipe.total_steps + 1)]
        assert evaluations(path, recipe.eval_every * recipe.batch_size) == sum(due)


def test_recorded(tmp_path: pathlib.Path) -> None:
    folder = records(tmp_path, [{"step": 2, "examples": 64}, {"step": 4, "examples": 256}])
    assert recorded(folder, 512) == [Stretch(4, 128), Stretch(4, 384)]
    records(tmp_path, [{"step": 2}])
    with rejected("--batches-of", str(folder), "has no records of a changing batch"):
        recorded(folder, 512)
    with pytest.raises(UserError, match="does not exist; give the workdir of a run"):
        recorded(tmp_path / "nothing", 512)


@pytest.mark.parametrize(
    "last",
    [
        {"step": 2, "examples": 256},
        {"step": 1, "examples": 256},
        {"step": 4, "examples": 64},
        {"step": 4, "examples": 0},
        {"step": 4, "examples": "256"},
        {"step": 4, "examples": None},
        {"step": 4, "examples": float("nan")},
        {"step": 4, "examples": 10**400},
    ],
)
def test_records_must_increase(tmp_path: pathlib.Path, last: dict[str, Any]) -> None:
    folder = records(tmp_path, [{"step": 2, "examples": 64}, last])
    with pytest.raises(UserError, match="--batches-of|metrics.jsonl"):
        recorded(folder, 512)


def test_at_microbatches() -> None:
    config = parse(
        tiny.digits(
            batch_rule=DECIDED, accumulation_steps=4, schedule__scaling="legw", duration="8 steps"
        )
    )
    at = at_microbatches(config, 8, resolve(config, 256))
    assert (at.batch_size, at.accumulation_steps, at.duration) == (128, 8, "512 examples")
    assert at.batch_rule == Spec().batch_rule and resolve(at, 256).total_steps == 4


def test_batches_of_needs_a_changing_batch() -> None:
    options.check_batches_of(None, False)
    options.check_batches_of("run", True)
    with rejected("--batches-of", "run", "needs config.batch_rule", "set it, or"):
        options.check_batches_of("run", False)


def test_a_long_path_is_abbreviated() -> None:
    rows = tuple(BatchRow(10, 10.0 * 16 * n, (1e-3,) * 3, (1e-4,) * 3) for n in range(1, 21))
    head, names, *output = Along(16, rows).describe()
    assert head == "updates by batch size, in microbatches of 16 examples:"
    assert names.split() == ["batch", "updates", "examples", "ms", "time"]
    assert output[0].split() == ["16", "10", "160", "1.1", "0.011", "s"]
    assert (
        len(output) == 10
        and output[-2].split() == ["11", "more"]
        and output[-1].split()[0] == "320"
    )
    unknown = Along(16, (*rows, BatchRow(1, 16, None, None)))
    assert stages.seconds(unknown.rows) is None and "?" in unknown.describe()[-1]

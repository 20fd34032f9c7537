"""Plans of runs whose batch changes."""

import doctest
import importlib.util
import json
import pathlib
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.plan import changing, options
from lamb_tpu.plan.changing import Stretch, at_microbatches, make_changing_plan, recorded
from lamb_tpu.plan.making import make_plan
from lamb_tpu.plan.report import Along, Row
from lamb_tpu.run.recipe import resolve
from tests import tiny
from tests.run.test_batches import ramp

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here"
)
DECIDED = ConfigDict({"name": "norm_test", "eta": 0.5, "upper": 256})


def records(folder: pathlib.Path, values: list[dict[str, Any]]) -> pathlib.Path:
    lines = [json.dumps({"kind": "train", **value}) for value in values]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_examples_of_the_docstrings() -> None:
    result = doctest.testmod(changing)
    assert result.failed == 0 and result.attempted >= 1


@pytest.mark.long
@needs_compiler
def test_the_time_along_a_ramp() -> None:
    """Each batch takes the time of its own step, and the run the sum over its updates."""
    config = ramp(((0, 16), (64, 48), (256, 256)), duration="24 steps")
    plan = make_changing_plan(config, "v5e-4", cache=None)
    assert plan.along is not None and plan.work is not None and plan.totals is not None
    found = [(row.updates, row.examples) for row in plan.along.rows]
    # 1, 3 and 16 microbatches of 16; nothing is left over for a last batch that is cut.
    assert found == [(4, 64), (4, 192), (5, 1280)]
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
    told = plan.describe()
    assert "along the run, in microbatches of 16:" in told and "fits" in told and "13 upd" in told
    assert len(plan.as_json()["run"]["batches"]) == 3 and json.dumps(plan.as_json())


@needs_compiler
def test_batches_of_a_run_that_decided(tmp_path: pathlib.Path) -> None:
    """They are stretched to the examples of the run that is planned."""
    config = tiny.digits(batch_rule=DECIDED, accumulation_steps=4)
    with pytest.raises(UserError, match="^config.batch_rule.name is 'norm_test', which decides"):
        make_changing_plan(config, "v5e-4")
    folder = records(tmp_path, [{"step": 4, "examples": 128}, {"step": 10, "examples": 384}])
    plan = make_changing_plan(config, "v5e-4", batches_of=str(folder))
    assert plan.along is not None and plan.work is not None
    assert [(row.updates, row.examples) for row in plan.along.rows] == [(8, 256), (12, 512)]
    assert plan.work.updates == 20
    with pytest.raises(UserError, match=r"^--batches-of is .*'ramp', whose batches are known"):
        make_changing_plan(ramp(), "v5e-4", batches_of=str(folder))


def test_evaluations_are_counted_along_the_path() -> None:
    for every in ("20 examples", "1 steps", "100 examples", "7 steps", "768 examples"):
        recipe = resolve(ramp(eval__every=every), 256)
        assert recipe.path is not None
        path = changing._path(recipe, ramp(), None)
        due = [recipe.is_due(recipe.eval_every, step) for step in range(1, recipe.total_steps + 1)]
        assert changing._evaluations(path, recipe) == sum(due)


def test_what_a_run_has_recorded(tmp_path: pathlib.Path) -> None:
    folder = records(tmp_path, [{"step": 2, "examples": 64}, {"step": 4, "examples": 256}])
    assert recorded(folder, 512) == [Stretch(4, 128), Stretch(4, 384)]
    records(tmp_path, [{"step": 2}])
    with pytest.raises(UserError, match="a run whose batch did not change; give the folder of one"):
        recorded(folder, 512)
    with pytest.raises(UserError, match="is its folder the workdir of a run"):
        recorded(tmp_path / "nothing", 512)


def test_a_step_of_so_many_microbatches() -> None:
    config = tiny.digits(
        batch_rule=DECIDED, accumulation_steps=4, schedule__scaling="legw", duration="8 steps"
    )
    at = at_microbatches(config, 8, resolve(config, 256))
    assert (at.batch_size, at.accumulation_steps, at.duration) == (128, 8, "512 examples")
    assert not at.batch_rule and resolve(at, 256).total_steps == 4


def test_the_option_belongs_to_a_batch_that_changes() -> None:
    options.check_batches_of(None, False)
    options.check_batches_of("run", True)
    with pytest.raises(UserError, match="^--batches-of is 'run', and the config has one batch"):
        options.check_batches_of("run", False)


def test_a_long_path_is_told_in_short() -> None:
    rows = tuple(Row(10, 10.0 * 16 * n, (1e-3,) * 3, (1e-4,) * 3) for n in range(1, 21))
    head, names, *told = Along(16, rows).describe()
    assert head == "along the run, in microbatches of 16:"
    assert names.split() == ["batch", "updates", "examples", "ms", "time"]
    assert told[0].split() == ["16", "10", "160", "1.1", "0.011", "s"]
    assert len(told) == 10 and told[-2].split() == ["11", "more"] and told[-1].split()[0] == "320"
    unknown = Along(16, (*rows, Row(1, 16, None, None)))
    assert unknown.seconds() is None and "?" in unknown.describe()[-1]

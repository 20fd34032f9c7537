"""A sweep is a table whose cells are points of a search; every mistake is told before it trains."""

import pathlib
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import cli
from lamb_tpu.config import recipe_folder
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine, jobs, sweeps
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.sweeps import Sweep
from lamb_tpu.run import overrides
from tests.reproduce.test_results import add

RATE = "optimizer.learning_rate=log(1e-3,1e-1)"


def config_of(recipe: str, *flags: str) -> ConfigDict:
    config = cli.load_recipe(recipe)
    own, rest = overrides.take([f"--config.{flag}" for flag in flags])
    overrides.apply(config, own)
    for item in rest:
        key, _, text = item.removeprefix("--config.").partition("=")
        config.update_from_flattened_dict({key: overrides.convert(key, text, str | int | float)})
    return config


def make(
    folder: pathlib.Path,
    *searches: str,
    flags: tuple[str, ...] = ("duration=4 steps",),
    trials: int | None = 3,
    recipe: str = "digits:batch=128",
    **options: Any,
) -> Sweep:
    config = config_of(recipe, *flags)
    dimensions, points = sweeps.points(config, searches, trials, 0)
    return sweeps.make(recipe, config, dimensions, points, folder, **options)


def test_trials_have_the_searched_values(tmp_path: pathlib.Path) -> None:
    sweep = make(
        tmp_path,
        RATE,
        "model.hidden_sizes=(8,),(16, 8)",
        "schedule.first_step=linear(0,3)",
        "schedule.decay=cosine, polynomial",
        trials=5,
        seeds=2,
        flags=("duration=4 steps", "optimizer.b2=0.98"),
    )
    assert [cell.name for cell in sweep.cells] == [f"trial-00{number}" for number in range(5)]
    assert sweep.scale.metric[:2] == ("accuracy", "accuracy")
    due = engine.due(sweep.table, sweep.scale, sweep.cells, 2, Results(sweep.table))
    assert len(due) == 10 and len({job.name for job in due}) == 10
    sizes = set()
    for job in due:
        (stage,) = jobs.stages(job)
        config, point = stage.config(), job.cell.overrides
        assert (config.duration, config.optimizer.b2, config.seed) == ("4 steps", 0.98, job.seed)
        assert config.optimizer.learning_rate == point["optimizer.learning_rate"]
        assert config.schedule.decay == point["schedule.decay"]
        assert type(config.schedule.first_step) is int
        sizes.add(config.model.hidden_sizes)
    assert sizes == {(8,), (16, 8)}


def test_lists_make_a_grid(tmp_path: pathlib.Path) -> None:
    sweep = make(tmp_path, "optimizer.b2=0.9,0.99", "ema.decay=0,0.5", trials=None, metric="loss")
    assert [tuple(cell.overrides.values()) for cell in sweep.cells] == [
        (0.9, 0.0),
        (0.9, 0.5),
        (0.99, 0.0),
        (0.99, 0.5),
    ]
    assert sweep.scale.metric.better == "lower"
    # Some of the grid only.
    some = make(tmp_path, "optimizer.b2=0.9,0.99", "ema.decay=0,0.5", trials=2)
    assert all(cell.overrides in [c.overrides for c in sweep.cells] for cell in some.cells)


def test_more_trials_keep_the_records_of_the_first(tmp_path: pathlib.Path) -> None:
    few = make(tmp_path, RATE, trials=2)
    for job in engine.due(few.table, few.scale, few.cells, 1, Results(few.table)):
        add(Results(few.table), job, 0.9, scale=sweeps.NAME)
    many = make(tmp_path, RATE, trials=4)
    due = engine.due(many.table, many.scale, many.cells, 1, Results(many.table))
    assert [job.cell.name for job in due] == ["trial-002", "trial-003"]
    sweeps.check_records(many)
    other = make(tmp_path, RATE, flags=("duration=5 steps",))
    with pytest.raises(UserError, match="holds another sweep .trial-000: duration: '4 steps' ther"):
        sweeps.check_records(other)


def test_phases(tmp_path: pathlib.Path) -> None:
    sweep = make(
        tmp_path,
        "phases.phase_1.batch_size=32,64",
        recipe="bert_pretrain:smoke",
        flags=(),
        trials=None,
    )
    assert sweep.scale.metric[:4] == ("mlm_loss", "mlm_loss", 4, "lower")


def test_a_shipped_recipe_has_its_name() -> None:
    path = recipe_folder() / "digits.py"
    assert sweeps.short_recipe(f"{path}:batch=64") == "digits:batch=64"
    assert sweeps.short_recipe("mine/digits.py") == "mine/digits.py"


@pytest.mark.parametrize(
    "searches, options, message",
    [
        (["optimizer.b3=linear(0,1)"], {}, r"config\.optimizer\.b3 is unknown; .* has: .*b2"),
        (["optimiser.b2=linear(0,1)"], {}, r"config\.optimiser is unknown; config has: "),
        (["schedule=1,2"], {}, r"config\.schedule is a section; name one of its keys: .*scaling"),
        (
            ["schedule.warmup=linear(0,1)"],
            {},
            "takes no numbers but values such as '0.1 epochs'; list its values",
        ),
        (["schedule.staircase=linear(0,1)"], {}, "takes no numbers but values such as True"),
        (["optimizer.b2=0.9,high"], {}, r"config\.optimizer\.b2 is 'high'; it must be a number"),
        ([RATE, RATE], {}, "--search=optimizer.learning_rate is given 2 times"),
        (
            [RATE, "ema.decay=0,0.5"],
            {"trials": None},
            "--trials is missing; .* optimizer.learning_rate is a range",
        ),
        (["ema.decay=0,0.5"], {"trials": 3}, "ema.decay has 2 different points and not 3"),
        (
            ["duration=4 steps,5 steps"],
            {"trials": None},
            "--search=duration is also given as --conf",
        ),
        (["seed=0,1"], {"trials": None}, "--search=seed is set by --seeds"),
        (
            [RATE],
            {"flags": ("seed=3",)},
            "--config.seed is set for each run of a sweep; give --seeds",
        ),
        (
            ["log.every=1 steps,2 steps"],
            {"trials": None},
            "trial-000 and trial-001 are the same run, because --search=log.every changes no result",
        ),
        (
            ["optimizer.b2=linear(0.5,3)"],
            {},
            r"trial-\d* .optimizer.b2=[\d.]*.: config.optimizer.*b2",
        ),
        (
            ["batch_size=64,-1"],
            {"trials": None},
            r"trial-001 .batch_size=-1.: config.batch_size is -1",
        ),
        (
            ["model.hidden_sizes=(8,),(0,)"],
            {"trials": None},
            r"trial-001 .model.hidden_sizes=\(0,\)\): config.model: hidden_sizes must be whole",
        ),
        (
            [RATE],
            {"metric": "f1"},
            "--metric is 'f1'; the evaluation's metrics are: accuracy, loss",
        ),
        ([RATE], {"flags": ("data.eval_split=tset",)}, "tset"),
    ],
)
def test_mistakes(
    tmp_path: pathlib.Path, searches: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, *searches, **options)
    assert not list(tmp_path.iterdir())


def test_a_replaced_section_is_told(tmp_path: pathlib.Path) -> None:
    config = cli.load_recipe("digits")
    with config.unlocked():
        config.optimizer = ConfigDict({"name": "lamb", "learning_rate": 0.1})
    dimensions, points = sweeps.points(config, [RATE], 2, 0)
    with pytest.raises(UserError, match="--config.optimizer leaves out optimizer.rules; a swe"):
        sweeps.make("digits", config, dimensions, points, tmp_path)

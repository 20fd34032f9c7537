"""A sweep is a table whose cells are points of a search; errors are reported before training."""

import pathlib
from typing import Any

import pytest

from lamb_tpu import cli, field_types, overrides
from lamb_tpu.config import recipe_folder
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine, jobs, sweeps
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.sweeps import Sweep
from lamb_tpu.reproduce.tables import Metric
from lamb_tpu.spec import Spec, changed, parse
from tests.raising import rejected
from tests.reproduce.test_results import add

RATE = "optimizer.learning_rate=log(1e-3,1e-1)"
WARMUP, STAIRCASE = "schedule.warmup=linear(0,1)", "schedule.staircase=linear(0,1)"
EMA = "ema.decay=0,0.5"
GRID = ",".join(map(str, range(1, 102)))


def config_of(recipe: str, *flags: str) -> Spec:
    config = cli.load_recipe(recipe)
    changes, rest = overrides.take([f"--config.{flag}" for flag in flags])
    overrides.apply(config, changes)
    for item in rest:
        key, _, text = item.removeprefix("--config.").partition("=")
        config.update_from_flattened_dict({key: field_types.convert(key, text, str | int | float)})
    return parse(config)


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
    assert sweep.scale.metric == Metric("accuracy", "accuracy")
    due = engine.due(sweep.table, sweep.scale, sweep.cells, 2, Results(sweep.table))
    assert len(due) == 10 and len({job.name for job in due}) == 10
    sizes = set()
    for job in due:
        (stage,) = jobs.stages(job)
        config, point = stage.config(), job.cell.overrides
        b2, rate = (config.optimizer.get(key) for key in ("b2", "learning_rate"))
        assert (config.duration, b2, config.seed) == ("4 steps", 0.98, job.seed)
        assert rate == point["optimizer.learning_rate"]
        assert config.schedule.decay == point["schedule.decay"]
        assert type(config.schedule.first_step) is int
        sizes.add(config.model.get("hidden_sizes"))
    assert sizes == {(8,), (16, 8)}


def test_lists_make_a_grid(tmp_path: pathlib.Path) -> None:
    sweep = make(tmp_path, "optimizer.b2=0.9,0.99", "ema.decay=0,0.5", trials=None, metric="loss")
    expected = [(0.9, 0.0), (0.9, 0.5), (0.99, 0.0), (0.99, 0.5)]
    assert [tuple(cell.overrides.values()) for cell in sweep.cells] == expected
    assert sweep.scale.metric.better == "lower"
    # Random points instead of the full grid.
    some = make(tmp_path, "optimizer.b2=0.9,0.99", "ema.decay=0,0.5", trials=2)
    assert all(cell.overrides in [c.overrides for c in sweep.cells] for cell in some.cells)


def test_more_trials_keep_the_records_of_the_first(tmp_path: pathlib.Path) -> None:
    few = make(tmp_path, RATE, trials=2)
    for job in engine.due(few.table, few.scale, few.cells, 1, Results(few.table)):
        add(Results(few.table), job, 0.9)
    many = make(tmp_path, RATE, trials=4)
    due = engine.due(many.table, many.scale, many.cells, 1, Results(many.table))
    assert [job.cell.name for job in due] == ["trial-002", "trial-003"]
    sweeps.check_records(many, Results(many.table))
    other = make(tmp_path, RATE, flags=("duration=5 steps",))
    problem = "holds another sweep (trial-000: duration: '4 steps' there"
    with rejected(f"--workdir {tmp_path}", ..., problem):
        sweeps.check_records(other, Results(other.table))


def test_phases(tmp_path: pathlib.Path) -> None:
    sweep = make(
        tmp_path,
        "phases.phase_1.batch_size=32,64",
        recipe="bert_pretrain:smoke",
        flags=(),
        trials=None,
    )
    assert sweep.scale.metric == Metric("mlm_loss", "mlm_loss", better="lower")


def test_a_shipped_recipe_has_its_name() -> None:
    path = recipe_folder() / "digits.py"
    assert sweeps.short_recipe(f"{path}:batch=64") == "digits:batch=64"
    assert sweeps.short_recipe("mine/digits.py") == "mine/digits.py"


@pytest.mark.parametrize(
    "searches, trials, expected",
    [
        (WARMUP, 3, ("--search=schedule.warmup", ..., "such as '0.1 epochs'", "list its values")),
        (STAIRCASE, 3, ("--search=schedule.staircase", ..., "takes no numbers, only values such")),
        ("optimizer.b2=0.9,high", 3, ("config.optimizer.b2", "high", "has the wrong type")),
        (f"{RATE};{RATE}", 3, ("--search=optimizer.learning_rate", ..., "is given 2 times")),
        (f"{RATE};{EMA}", None, ("--trials", ..., "is missing, but must be given to search a r")),
        (EMA, 3, ("--trials", 3, "is more than the 2 different points of ema.decay")),
        ("duration=4 steps,5 steps", None, ("--search=duration", ..., "is also set by --config")),
        ("seed=0,1", None, ("--search=seed", ..., "is set by --seeds")),
        (
            "log.every=1 steps,2 steps",
            None,
            ("--search=log.every", ..., "trial-000 and trial-001 are the same run"),
        ),
        (
            f"batch_size={GRID};optimizer.b2={GRID}",
            None,
            ("--search", ..., "a grid of 10,201 trials: 2 list(s) of up to 101", "10,000"),
        ),
    ],
)
def test_errors(
    tmp_path: pathlib.Path, searches: str, trials: int | None, expected: tuple[Any, ...]
) -> None:
    with rejected(*expected):
        make(tmp_path, *searches.split(";"), trials=trials)
    assert not list(tmp_path.iterdir())


def test_the_seed_is_no_override(tmp_path: pathlib.Path) -> None:
    with rejected("--config.seed", ..., "is set for each run", "--seeds"):
        make(tmp_path, RATE, flags=("seed=3",))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "search, options, message",
    [
        ("optimizer.b3=linear(0,1)", {}, r"config\.optimizer\.b3.*b2"),
        ("optimiser.b2=linear(0,1)", {}, r"config\.optimiser"),
        ("schedule=1,2", {}, r"config\.schedule.*section"),
        (
            "optimizer.b2=linear(0.5,3)",
            {},
            r"trial-\d* .optimizer.b2=[\d.]*.: config.optimizer.*b2",
        ),
        ("batch_size=64,-1", {"trials": None}, r"trial-001 .batch_size=-1.: config.batch_size.*-1"),
        (
            "model.hidden_sizes=(8,),(0,)",
            {"trials": None},
            r"trial-001 .model.hidden_sizes=\(0,\)\): config.model.hidden_sizes",
        ),
        (RATE, {"metric": "f1"}, "--metric.*'f1'.*accuracy"),
        (RATE, {"flags": ("data.eval_split=tset",)}, "tset"),
    ],
)
def test_errors_of_configs(
    tmp_path: pathlib.Path, search: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path, search, **options)
    assert not list(tmp_path.iterdir())


def test_a_replaced_section_is_rejected(tmp_path: pathlib.Path) -> None:
    replaced = {"optimizer": {"name": "lamb", "learning_rate": 0.1}}
    config = changed(overrides.load("digits"), replaced)
    dimensions, points = sweeps.points(config, [RATE], 2, 0)
    with rejected("--config.optimizer", ..., "leaves out optimizer.rules", "give single keys"):
        sweeps.make("digits", config, dimensions, points, tmp_path)

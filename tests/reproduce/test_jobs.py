"""A job's config is the recipe's with the cell's argument, the overrides and the seed."""

import pathlib
import shlex

import pytest

from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import jobs
from lamb_tpu.reproduce.jobs import Job, Stage
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, write

ALL = load_all(folder())


def first(table: Table, cell: str = "lamb", **more: object) -> Job:
    scale = next(iter(table.scales.values()))
    return Job(table, scale, table.cells[cell], 3)._replace(**more)


def test_config(tmp_path: pathlib.Path) -> None:
    job = first(write(tmp_path))
    (stage,) = jobs.stages(job, tmp_path)
    config = stage.config()
    assert stage.recipe == "digits:batch=128,optimizer=lamb"
    assert (config.optimizer.name, config.seed, config.duration) == ("lamb", 3, "4 steps")
    assert config.data.dir is None  # the scale names no data
    assert config.is_locked


def test_command_has_the_same_config(tmp_path: pathlib.Path) -> None:
    (stage,) = jobs.stages(first(write(tmp_path)))
    words = shlex.split(stage.command("runs/x"))
    assert words[:4] == ["python", "-m", "lamb_tpu.train", f"--config={stage.recipe}"]
    assert "--config.duration=4 steps" in words and words[-1] == "--workdir=runs/x"
    again = Stage(
        stage.recipe,
        dict(word.removeprefix("--config.").split("=", 1) for word in words if "--config." in word)
        | {"seed": 3},
    )
    assert flatten(again.config()) == flatten(stage.config())


def test_seed_and_free_keys_do_not_count(tmp_path: pathlib.Path) -> None:
    job = first(write(tmp_path))

    def digest(job: Job, **more: object) -> str:
        (stage,) = jobs.stages(job)
        stage = stage._replace(overrides={**stage.overrides, **more})
        return jobs.config_hash(jobs.flat_configs([stage.config()]))

    same = digest(job)
    assert digest(job._replace(seed=4), **{"eval.batch_size": 7}) == same
    assert digest(job, batch_size=64) != same


def test_a_key_that_an_old_config_lacks_has_its_default(tmp_path: pathlib.Path) -> None:
    (stage,) = jobs.stages(first(write(tmp_path)))
    now = jobs.flat_configs([stage.config()])
    old = [{key: value for key, value in now[0].items() if key != "prng"}]
    assert jobs.changes(old, now) == []
    old[0]["optimizer.learning_rate"] = 7.0
    (line,) = jobs.changes(old, now)
    assert line.startswith("optimizer.learning_rate: 7.0 there, ")
    assert jobs.changes([], now) == ["0 stages there, 1 now"]


def test_a_key_of_an_old_config_is_read_by_its_name_of_today(tmp_path: pathlib.Path) -> None:
    (stage,) = jobs.stages(first(write(tmp_path)))
    now = jobs.flat_configs([stage.config()])
    old = [dict(now[0])]
    old[0]["parallel.gradient_dtype"] = old[0].pop("parallel.exchange.name")
    assert jobs.changes(old, now) == []
    old[0]["parallel.gradient_dtype"] = "bfloat16"
    assert jobs.changes(old, now) == ["parallel.exchange.name: 'bfloat16' there, 'float32' now"]


def test_defaults_of_an_optimizer_or_a_model_count_as_those_of_the_whole_config(
    tmp_path: pathlib.Path,
) -> None:
    (stage,) = jobs.stages(first(write(tmp_path)))
    old = jobs.flat_configs([stage.config()])
    default = {"optimizer.ratio_bounds": [0.0, float("inf")], "model.name": old[0]["model.name"]}
    assert "optimizer.ratio_bounds" not in old[0]
    assert jobs.changes(old, [old[0] | default]) == jobs.changes([old[0] | default], old) == []
    (line,) = jobs.changes(old, [old[0] | {"optimizer.ratio_bounds": [0.1, 10.0]}])
    assert line == "optimizer.ratio_bounds: [0.0, inf] there, [0.1, 10.0] now"
    # An optimizer that is no more has no defaults.
    gone = old[0] | {"optimizer.name": "gone"}
    assert len(jobs.changes([gone], [old[0] | default])) == 2


TUNED = (
    TABLE
    + """
[tuning]
key = "optimizer.learning_rate"
factors = [0.5, 1, 2]
overrides = {"data.train_split" = "train[:80%]"}
seeds = 2
"""
)


def test_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    base = flatten(jobs.stages(first(write(tmp_path / "plain")))[0].config())
    for more, rate, split in (
        ({"factor": 0.5}, 0.5, "train[:80%]"),
        ({"chosen": 2.0}, 2.0, base["data.train_split"]),
    ):
        found = flatten(jobs.stages(first(table, **more))[0].config())
        assert found["optimizer.learning_rate"] == rate * base["optimizer.learning_rate"]
        assert found["data.train_split"] == split
    table = write(
        tmp_path, TUNED.replace('"optimizer=lamb"', '"optimizer=lamb", search = {batch_size = 64}')
    )
    for more, batch in (({"factor": 0.5}, 64), ({"chosen": 2.0}, 128)):
        assert jobs.stages(first(table, **more))[0].config().batch_size == batch
    assert first(table, factor=0.5).name == "lamb-small-search0.5-seed3"
    with pytest.raises(UserError, match="tuning.key is 'optimizer.name', which .* is 'lamb'"):
        jobs.stages(
            first(write(tmp_path, TUNED.replace("optimizer.learning_rate", "optimizer.name")))
        )


@pytest.mark.parametrize(
    "overrides, message",
    [
        ('{"log.evry" = "2 steps"}', "config.log.evry is unknown; config.log has: "),
        ('{"optimizer.beta9" = 1}', "config.optimizer.beta9 is unknown"),
        ('{"seed.x" = 1}', "config.seed.x is unknown; config.seed has: no keys"),
        ('{batch_size = "many"}', "config.batch_size is 'many'; it must have the type of 128"),
        ("{batch_size = 0}", "config.batch_size is 0"),
    ],
)
def test_mistakes(tmp_path: pathlib.Path, overrides: str, message: str) -> None:
    table = write(
        tmp_path, TABLE.replace('{duration = "4 steps", "log.every" = "2 steps"}', overrides)
    )
    (stage,) = jobs.stages(first(table))
    with pytest.raises(UserError, match=message):
        stage.config()


def test_stages_start_from_the_one_before_and_have_data_of_their_own() -> None:
    table = ALL["lamb/adamw16k"]
    one, two = jobs.stages(first(table, "adamw-0.05-1e-4"))
    assert one.config().phases.phase_1.schedule.warmup == "1562 steps"
    assert set(two.overrides) == {"seed"}
    table = ALL["lamb/table1"]
    one, two = jobs.stages(first(table, "lamb-1k"), pathlib.Path("/data"))
    assert (one.recipe, two.recipe) == (
        "bert_pretrain:size=large,batch=1024",
        "bert_squad:size=large",
    )
    assert (one.overrides["data.dir"], two.overrides["data.dir"]) == ("/data/text", "/data/squad")


def test_a_cell_may_have_stages_of_its_own_and_paths_below_the_data(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'config = "digits:batch=128"',
        ('stages = ["digits:batch=64", "digits:batch=128"]\ndata = ["one", "two"]'),
    ).replace(
        'name = "lamb", ',
        ('name = "lamb", config = "digits", overrides = {"init_from" = "DATA/two/x"}, '),
    )
    table = write(tmp_path, text)
    (stage,) = jobs.stages(first(table), pathlib.Path("/data"))
    assert stage.recipe == "digits:optimizer=lamb"
    assert stage.overrides["data.dir"] == "/data/two"
    assert stage.overrides["init_from"] == "/data/two/x"
    (stage,) = jobs.stages(first(table))
    assert stage.overrides["init_from"] == "DATA/two/x" and "data.dir" not in stage.overrides
    assert len(jobs.stages(first(table, "adamw"))) == 2


@pytest.mark.parametrize("key", ALL)
def test_every_cell_of_a_shipped_table_is_a_recipe(key: str) -> None:
    table = ALL[key]
    for scale in table.scales.values():
        for cell in table.cells.values():
            if not cell.unknown:
                for stage in jobs.stages(Job(table, scale, cell, 0)):
                    stage.config()

"""A job's config is the recipe with the cell's argument, the overrides and the seed."""

import pathlib
import shlex

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import jobs
from lamb_tpu.reproduce.jobs import Job, JobStage
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.spec import Spec, flatten
from tests.raising import rejected
from tests.reproduce.papers import TABLE, TUNED, with_keys, write

ALL = load_all(folder())


def first(table: Table, cell: str = "lamb", **more: object) -> Job:
    scale = list(table.scales.values())[-1]
    return Job(table, scale, table.cells[cell], 3)._replace(**more)


def test_config(tmp_path: pathlib.Path) -> None:
    job = first(write(tmp_path))
    (stage,) = jobs.stages(job, tmp_path)
    config = stage.config()
    assert stage.recipe == "digits:batch=128,optimizer=lamb"
    assert (config.optimizer.name, config.seed, config.duration) == ("lamb", 3, "4 steps")
    assert config.data.dir is None  # the scale names no data
    assert type(config) is Spec


def test_command_has_the_same_config(tmp_path: pathlib.Path) -> None:
    (stage,) = jobs.stages(first(write(tmp_path)))
    words = shlex.split(stage.command("runs/x"))
    assert words[:4] == ["python", "-m", "lamb_tpu.train", f"--config={stage.recipe}"]
    assert "--config.duration=4 steps" in words and words[-1] == "--workdir=runs/x"
    again = JobStage(
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


def test_missing_keys_have_the_defaults_of_the_optimizer_or_model(tmp_path: pathlib.Path) -> None:
    (stage,) = jobs.stages(first(write(tmp_path)))
    old = jobs.flat_configs([stage.config()])
    default = {"optimizer.ratio_bounds": [0.0, float("inf")], "model.name": old[0]["model.name"]}
    assert "optimizer.ratio_bounds" not in old[0]
    assert jobs.changes(old, [old[0] | default]) == jobs.changes([old[0] | default], old) == []
    (line,) = jobs.changes(old, [old[0] | {"optimizer.ratio_bounds": [0.1, 10.0]}])
    assert line == "optimizer.ratio_bounds: [0.0, inf] there, [0.1, 10.0] now"
    # There are no defaults for an optimizer that has been removed.
    gone = old[0] | {"optimizer.name": "gone"}
    assert len(jobs.changes([gone], [old[0] | default])) == 2


def test_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    base = flatten(jobs.stages(first(write(tmp_path / "plain")))[0].config())
    for more, rate, split in (
        ({"factor": 0.5}, 0.5, "train[:80%]"),
        ({"chosen": 2.0}, 2.0, base["data.train_split"]),
    ):
        actual = flatten(jobs.stages(first(table, **more))[0].config())
        assert actual["optimizer.learning_rate"] == rate * base["optimizer.learning_rate"]
        assert actual["data.train_split"] == split
    table = write(tmp_path, with_keys(TUNED, lamb="search = {batch_size = 64}"))
    for more, batch in (({"factor": 0.5}, 64), ({"chosen": 2.0}, 128)):
        assert jobs.stages(first(table, **more))[0].config().batch_size == batch
    assert first(table, factor=0.5).name == "lamb-small-search0.5-seed3"
    with rejected("*digits.toml: tuning.key", "optimizer.name", "has the value 'lamb' in cell"):
        table = write(tmp_path, TUNED.replace("optimizer.learning_rate", "optimizer.name"))
        jobs.stages(first(table))


@pytest.mark.parametrize(
    "overrides, message",
    [
        ('{"log.evry" = "2 steps"}', "config.log.evry"),
        ('{"optimizer.beta9" = 1}', "config.optimizer.beta9"),
        ('{"seed.x" = 1}', "config.seed.x"),
        ('{batch_size = "many"}', "config.batch_size.*'many'"),
        ("{batch_size = 0}", "config.batch_size.*0"),
    ],
)
def test_errors(tmp_path: pathlib.Path, overrides: str, message: str) -> None:
    table = write(
        tmp_path, TABLE.replace('{duration = "4 steps", "log.every" = "2 steps"}', overrides)
    )
    (stage,) = jobs.stages(first(table))
    with pytest.raises(UserError, match=message):
        stage.config()


def test_stages_start_from_the_previous_one_and_have_separate_data() -> None:
    table = ALL["lamb/adamw16k"]
    one, two = jobs.stages(first(table, "adamw-0.05-1e-4"))
    assert one.config().phases["phase_1"]["schedule"]["warmup"] == "1562 steps"
    assert set(two.overrides) == {"seed"}
    table = ALL["lamb/table1"]
    one, two = jobs.stages(first(table, "lamb-1k"), pathlib.Path("/data"))
    expected = ("bert_pretrain:size=large,batch=1024", "bert_squad:size=large")
    assert (one.recipe, two.recipe) == expected
    assert (one.overrides["data.dir"], two.overrides["data.dir"]) == ("/data/text", "/data/squad")


def test_a_cell_may_have_custom_stages_and_paths_below_the_data(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(
        'config = "digits:batch=128"',
        'stages = ["digits:batch=64", "digits:batch=128"]\ndata = ["one", "two"]',
    )
    keys = 'config = "digits", overrides = {"init_from" = "DATA/two/x"}'
    table = write(tmp_path, with_keys(text, lamb=keys))
    (stage,) = jobs.stages(first(table), pathlib.Path("/data"))
    assert stage.recipe == "digits:optimizer=lamb"
    assert stage.overrides["data.dir"] == "/data/two"
    assert stage.overrides["init_from"] == "/data/two/x"
    (stage,) = jobs.stages(first(table))
    assert stage.overrides["init_from"] == "DATA/two/x" and "data.dir" not in stage.overrides
    assert len(jobs.stages(first(table, "adamw"))) == 2


def test_a_scale_can_replace_values_of_its_cells(tmp_path: pathlib.Path) -> None:
    text = with_keys(TUNED, lamb="overrides = {accumulation_steps = 64, batch_size = 96}")
    replaced = "over_cells = [{accumulation_steps = 2, batch_size = 64}]\n"
    text = text.replace("seeds = 2\n", "seeds = 2\n" + replaced, 1)
    table = write(tmp_path, text)
    for more in ({}, {"factor": 0.5}):
        (stage,) = jobs.stages(first(table, **more))
        config = stage.config()
        assert (config.accumulation_steps, config.batch_size) == (2, 64)
    # If a cell has fewer stages, it gets the scale's values for the last stages.
    two = text.replace('config = "digits:batch=128"', 'stages = ["digits:batch=64", "digits"]')
    two = two.replace("over_cells = [", "over_cells = [{batch_size = 32}, ")
    two = with_keys(two, lamb='config = "digits"')
    (stage,) = jobs.stages(first(write(tmp_path / "two", two)))
    assert stage.config().batch_size == 64
    with rejected("*scales.small.over_cells", ..., "has 2 entries for 1 stage(s)"):
        write(tmp_path / "wrong", text.replace("over_cells = [", "over_cells = [{}, "))


def test_a_recipe_of_a_cell_is_a_smoke_recipe_at_that_scale(tmp_path: pathlib.Path) -> None:
    text = with_keys(lamb='config = "digits"')
    text += '\n[scales.smoke]\nconfig = "digits:smoke"\n'
    table = write(tmp_path, text)
    job = first(table)
    assert jobs.stages(job)[0].recipe == "digits:optimizer=lamb"
    smoke = job._replace(scale=table.scales["smoke"])
    assert jobs.stages(smoke)[0].recipe == "digits:smoke,optimizer=lamb"


def test_a_set_that_tfds_prepares_is_read_from_its_prepared_folder() -> None:
    table = ALL["lamb/table3"]
    (stage,) = jobs.stages(first(table, "lamb-16384"), "/data")
    assert stage.overrides["data.prepared_dir"] == "/data/imagenet"
    assert "data.dir" not in stage.overrides

"""Tests command-line overrides of fields that a config file leaves out."""

import doctest
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import cli, field_types, overrides
from lamb_tpu import config as config_lib
from lamb_tpu.errors import UserError
from lamb_tpu.run import phases
from lamb_tpu.run.categories import REGISTRIES, check_fields
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import resolve
from lamb_tpu.spec import parse
from tests import tiny
from tests.raising import rejected

SECTIONS = ("optimizer", "model", "task", "data.options", "batch_rule")


def applied(config: ConfigDict, *flags: str) -> ConfigDict:
    actual, rest = overrides.take(flags)
    assert not rest
    overrides.apply(config, actual)
    return config


def phased(**changes: Mapping[str, Any]) -> ConfigDict:
    return tiny.digits(phases=ConfigDict({"one": {"seed": 1}, "two": changes or {"seed": 2}}))


@pytest.mark.parametrize(
    "key, kind",
    [
        ("optimizer.learning_rate", float),
        ("optimizer.name", str),
        ("batch_size", int),
        ("schedule.warmup", str),
        ("schedule.staircase", bool),
        ("data.dir", str | None),
        ("model.hidden_sizes", Sequence[int]),
        ("parallel.rules", tuple),
        ("phases.two.seed", int),
        ("phases.two.optimizer.b2", float),
        ("batch_rule.name", str),
        ("phases.two.batch_rule.name", str),
    ],
)
def test_types_of_keys(key: str, kind: Any) -> None:
    assert overrides.kind_of(phased(), key) == kind


@pytest.mark.parametrize(
    "key, problem, remedy",
    [
        ("batchsize", "is unknown", "did you mean config.batch_size?"),
        ("schedule.decay.x", "is unknown", "config.schedule.decay has: no keys"),
        ("optimizer.b3", "is unknown", "optimizer 'lamb' has: name, learning_rate, b1, b2"),
        ("ema", "is a section", "name one of its keys: decay"),
        ("phases.three", "is unknown", "config.phases has: one, two"),
    ],
)
def test_keys_without_a_type(key: str, problem: str, remedy: str) -> None:
    with rejected(f"config.{key}", ..., problem, remedy):
        overrides.kind_of(phased(), key)


def test_a_recipe_with_other_values() -> None:
    """Values may come from a table's file: text, lists for tuples, integers for floats."""
    changes = {"optimizer.b2": "0.98", "model.hidden_sizes": [8, 4], "ema.decay": 0, "seed": 3}
    config = overrides.load("digits:batch=128", changes)
    assert (config.batch_size, config.seed, repr(config.ema.decay)) == (128, 3, "0.0")
    assert config.optimizer.get("b2") == 0.98 and config.model.get("hidden_sizes") == (8, 4)
    # A default adds no key.
    assert overrides.load("digits", {"optimizer.b1": 0.9}) == overrides.load("digits")
    for key, value, problem in (
        ("batch_size", "many", "has the wrong type"),
        ("log.evry", "1 steps", "is unknown"),
        ("batch_size", 0, "is out of range"),
    ):
        with rejected(f"config.{key}", problem=problem):
            overrides.load("digits", {key: value})


def test_docstrings() -> None:
    assert doctest.testmod(overrides) == (0, 2)


def test_what_is_taken_from_a_command_line() -> None:
    argv = [
        "train",
        "--config=x.py",
        "--config.optimizer.b2=0.9",
        "-config.model.a",
        "3",
        "--config.seed=3",
        "--noconfig.task.flag",
        "--config.task.other",
        "--workdir=w",
        "--config.phases.one.data.options.text=a=b",
        "--config.optimizer={}",
    ]
    actual, rest = overrides.take(argv)
    assert [(item.key, item.text) for item in actual] == [
        ("config.optimizer.b2", "0.9"),
        ("config.model.a", "3"),
        ("config.task.flag", "False"),
        ("config.task.other", "True"),
        ("config.phases.one.data.options.text", "a=b"),
    ]
    assert rest == [*argv[:2], "--config.seed=3", "--workdir=w", "--config.optimizer={}"]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_argument_accepts_its_default(section: str) -> None:
    """The text of a default converts to the default, so that an override with this text adds no key."""
    for name in [*REGISTRIES[section], *(f"{each}x" for each in REGISTRIES[section].prefixes)]:
        for key, (kind, default) in REGISTRIES[section].fields(name).items():
            if default is inspect.Parameter.empty and key != "learning_rate":
                continue
            text = "1.0" if key == "learning_rate" else str(default)
            value = field_types.convert(f"{name}.{key}", text, kind, default)
            assert value == (1.0 if key == "learning_rate" else default), (name, key)
            json.dumps(value)


def test_a_batch_rule() -> None:
    config, before = tiny.digits(), config_lib.flatten(tiny.digits())
    assert config_lib.flatten(applied(config, "--config.batch_rule.name=constant")) == before
    applied(
        config,
        "--config.batch_rule.points=((0, 16), (64, 32))",
        "--config.batch_rule.name=ramp",
        "--config.batch_rule.linear=false",
    )
    assert config.batch_rule.to_dict() == {"name": "ramp", "points": ((0, 16), (64, 32))}
    assert "config.batch_rule.scaling = 'identity'  # default of ramp" in overrides.describe(config)
    with rejected("config.batch_rule.target", ..., "is unknown", "batch rule 'ramp' has:"):
        applied(config, "--config.batch_rule.target=1")
    problem = "sets points; batch rule 'constant' has: name"
    with rejected("config.batch_rule.name", "constant", problem, "replace the section"):
        applied(config, "--config.batch_rule.name=constant")


def test_values_have_the_type_of_the_argument() -> None:
    config = applied(
        tiny.digits(),
        "--config.optimizer.collect=true",
        "--config.optimizer.b2=1e-1",
        "--config.optimizer.weight_decay=0",
        "--config.optimizer.clip_global_norm=1",
        "--config.optimizer.phi_bounds=(0, inf)",
        "--config.optimizer.mu_dtype=bfloat16",
        "--config.optimizer.ratio_bounds=[0.01, 10]",
        "--config.optimizer.stochastic_rounding=7",
        "--config.optimizer.rules=[('bias', {'decay': False}), ('.*', {})]",
        "--config.optimizer.l2=1e-5",
        "--config.optimizer.agvm={'modules': (('body', '^hidden'), ('head', '')), 'start': 9}",
        "--config.model.hidden_sizes=8,8",
        "--config.model.group_size=16",
        "--config.task.input_mean=(1, 2)",
        "--config.task.input_std=3",
    )
    optimizer = config.optimizer.to_dict()
    assert optimizer == {
        "name": "lamb",
        "learning_rate": 0.02,
        "collect": True,
        "b2": 0.1,
        "weight_decay": 0.0,
        "clip_global_norm": 1.0,
        "mu_dtype": "bfloat16",
        "ratio_bounds": (0.01, 10.0),
        "stochastic_rounding": 7,
        "l2": 1e-5,
        "rules": (("bias", {"decay": False}), (".*", {})),
        "agvm": {"modules": (("body", "^hidden"), ("head", "")), "start": 9},
    }
    for key in ("weight_decay", "clip_global_norm"):
        assert type(optimizer[key]) is float
    assert config.model.hidden_sizes == (8, 8) and config.model.group_size == 16
    assert config.task.input_mean == (1.0, 2.0) and config.task.input_std == 3.0
    parse(config)
    resolve_optimizer(parse(config).optimizer).make(resolve(config, num_examples=256))
    with pytest.raises(AttributeError):  # the config is locked again
        config.optimizer.b3 = 1


@pytest.mark.parametrize(
    "flag, message",
    [
        ("optimizer.b3=1", "optimizer.b3 is unknown; optimizer 'lamb' has: name, learning_rate, "),
        ("optimizer.axis_name=data", "optimizer.axis_name is unknown"),
        ("optimizer.b2=abc", "optimizer.b2='abc' has the wrong type; use a number, such as 0.999$"),
        ("optimizer.b2=None", "optimizer.b2='None' has the wrong type; use a number"),
        ("optimizer.collect=1", "optimizer.collect='1' has the wrong type; use True or False"),
        (
            "optimizer.clip_global_norm=a",
            "clip_global_norm='a' has the wrong type; use a number or None$",
        ),
        ("optimizer.agvm=3", "optimizer.agvm='3' has the wrong type; use a dictionary or None$"),
        ("optimizer.phi_bounds=(1, 2, 3)", "use a tuple of 2 numbers, such as .0.0, inf.$"),
        ("optimizer.phi_bounds=(1, 'a')", "phi_bounds=.*; use a tuple of 2 numbers"),
        ("optimizer.name=adan", "config.optimizer.name='adan' is unknown; use lamb, .*=adam"),
        ("optimizer.preset=papr", "preset name='papr' is unknown; for lamb use one of paper"),
        (
            "model.hidden_sizes=(8, 8.5)",
            "hidden_sizes='.8, 8.5.' has the wrong type; use a tuple of whol",
        ),
        ("model.hidden_sizes=" + "(" * 10_000, "hidden_sizes='.*; use a tuple"),
        ("model.width=3", "model.width is unknown; model 'mlp' has: name, num_classes, hidden_"),
        ("model.name=mpl", "config.model.name='mpl' is unknown; use bert"),
        ("task.num_best=3", "task.num_best is unknown; task 'classification' has: name, label_"),
        ("data.options.size=3", "data.options.size is unknown; data set 'digits' has: no keys"),
        ("phases.three.model.dtype=float32", "phases.three is unknown; config.phases has: one, tw"),
        ("phases.two.optimizer.b3=1", "config.phases.two.optimizer.b3 is unknown"),
    ],
)
def test_error(flag: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config = applied(phased(), f"--config.{flag}")
        resolve_optimizer(parse(config).optimizer).make(resolve(config, num_examples=256))


def test_name_decides_whatever_the_order() -> None:
    config = applied(
        tiny.digits(), "--config.optimizer.momentum=0.95", "--config.optimizer.name=lars"
    )
    assert config.optimizer.momentum == 0.95
    resolve_optimizer(parse(config).optimizer).make(resolve(config, num_examples=256))
    tiny.change(config, {"data.name": "image_folder"})
    assert applied(config, "--config.data.options.size=96").data.options.size == 96
    problem = "does not fit the config file, which sets momentum"
    with rejected("config.optimizer.name", "adam", problem, "replace the section"):
        applied(config, "--config.optimizer.name=adam")


def with_preset() -> ConfigDict:
    optimizer = {"name": "lamb", "preset": "author", "learning_rate": 0.01}
    return tiny.digits(optimizer=ConfigDict(optimizer))


def test_a_preset_of_another_optimizer_names_the_remedy() -> None:
    key, problem = "config.optimizer.name", "does not fit config.optimizer.preset='author'"
    with rejected(key, "adamw", problem, "add --config.optimizer.preset=''"):
        applied(with_preset(), "--config.optimizer.name=adamw", "--config.optimizer.b1=0.8")
    with rejected(key, "novograd", problem, ", or give a preset of novograd: paper, jasper, optax"):
        applied(with_preset(), "--config.optimizer.name=novograd")
    # If another field does not fit either, the same message names both.
    config = with_preset()
    with config.unlocked():
        config.optimizer.collect = True
    with rejected(key, "adamw", "which sets collect and preset", "replace the section"):
        applied(config, "--config.optimizer.name=adamw")


@pytest.mark.parametrize("preset", ["", "none"])
def test_a_preset_can_be_taken_back(preset: str) -> None:
    config = applied(
        with_preset(),
        "--config.optimizer.b1=0.8",
        f"--config.optimizer.preset={preset}",
        "--config.optimizer.name=adamw",
    )
    recipe = resolve(config, 1000)
    assert resolve_optimizer(parse(config).optimizer).make(recipe) is not None
    assert config.optimizer.b1 == 0.8
    # The value is AdamW's default, not the preset's, so the flag adds no key.
    before = config.to_dict()
    assert applied(config, "--config.optimizer.eps=1e-8").to_dict() == before


def test_a_preset_of_the_new_optimizer() -> None:
    config = applied(
        with_preset(), "--config.optimizer.preset=larc", "--config.optimizer.name=lars"
    )
    assert (config.optimizer.name, config.optimizer.preset) == ("lars", "larc")


def test_what_changes_nothing_adds_no_key() -> None:
    before = config_lib.flatten(tiny.digits())
    flags = (
        "--config.optimizer.b2=0.999",
        "--config.optimizer.weight_decay=0.01",
        "--config.model.dropout_rate=0",
        "--noconfig.optimizer.collect",
    )
    assert config_lib.flatten(applied(tiny.digits(), *flags)) == before
    # The last flag counts.
    twice = ("--config.optimizer.b2=0.9", "--config.optimizer.b2=0.999")
    assert config_lib.flatten(applied(tiny.digits(), *twice)) == before
    # A preset changes the defaults, which still add no key.
    preset = (
        "--config.optimizer.preset=author",
        "--config.optimizer.bias_correction=moments",
        "--config.optimizer.clip_global_norm=1.0",
    )
    fields = applied(tiny.digits(), *reversed(preset)).optimizer
    assert fields.bias_correction == "moments" and "clip_global_norm" not in fields
    # In a phase, the config's top-level values are the defaults.
    config = applied(tiny.digits(), "--config.optimizer.b2=0.9")
    tiny.change(config, {"phases": ConfigDict({"one": {"seed": 1}})})
    applied(config, "--config.phases.one.optimizer.b2=0.9", "--config.phases.one.optimizer.b1=0.8")
    assert config.phases.one.to_dict() == {"seed": 1, "optimizer": {"b1": 0.8}}


def test_every_key_is_described() -> None:
    config = applied(
        phased(optimizer={"b1": 0.5}),
        "--config.optimizer.preset=author",
        "--config.phases.one.optimizer.b1=0.6",
    )
    lines = overrides.describe(config).splitlines()
    shown = dict(line.split(" = ", 1) for line in lines)
    assert len(shown) == len(lines) and lines == sorted(lines)
    for key, value in config_lib.flatten(config).items():
        assert f"config.{key}" in shown, (key, value)
    assert shown["config.optimizer.clip_global_norm"] == "1.0  # default of lamb"
    assert shown["config.optimizer.preset"] == "'author'"
    assert shown["config.model.dropout_rate"] == "0.0  # default of mlp"
    assert shown["config.phases.two.optimizer.b1"] == "0.5"
    assert "config.optimizer.b1" not in shown


@pytest.mark.parametrize(
    "section, fields, message",
    [
        (
            "batch_rule",
            {"name": "ramp", "points": ((0, 64.0),)},
            r"batch_rule.points=\(\(0, 64.0\),\) has the wrong type; use a tuple of tuples of 2",
        ),
        (
            "batch_rule",
            {"name": "ramp", "points": 3},
            "batch_rule.points=3 has the wrong type; use a tuple of",
        ),
        ("model", {"name": "mlp", "hidden_sizes": ("a",)}, "hidden_sizes=.*; use a tuple of"),
        (
            "model",
            {"name": "bert", "num_layers": 1.5},
            "num_layers=1.5 has the wrong type; use a whole number, such as 12$",
        ),
        (
            "parallel.exchange",
            {"name": "econtrol", "eta": "x"},
            "eta='x' has the wrong type; use a number, such as 0.1$",
        ),
        (
            "parallel.exchange",
            {"name": "ef21", "compressor": 3},
            "compressor=3 has the wrong type; use text, such as 'topk'$",
        ),
        ("optimizer", {"name": "lamb", "learning_rate": 0.1, "weight_decay": "x"}, "y='x' has"),
        (
            "optimizer",
            {"name": "lamb", "learning_rate": 0.1, "b1": [1]},
            r"b1=\[1\] has the wrong type; use a",
        ),
    ],
)
def test_fields_of_another_type(section: str, fields: Any, message: str) -> None:
    config = config_lib.base_config()
    with config.unlocked():
        if section == "parallel.exchange":
            config.parallel.exchange = ConfigDict(fields)
        else:
            config[section] = ConfigDict(fields)
    with pytest.raises(UserError, match=message):
        check_fields(parse(config))


def test_fields_of_shipped_recipes_have_their_types() -> None:
    for path in sorted(config_lib.recipe_folder().glob("*.py")):
        for phase in phases.split(cli.load_recipe(str(path))):
            check_fields(phase.config)

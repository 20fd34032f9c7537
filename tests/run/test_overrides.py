"""Fields that a config file leaves out, set on the command line."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import models, tasks
from lamb_tpu.batching.rules import RULES
from lamb_tpu.data import DATASETS
from lamb_tpu.errors import UserError
from lamb_tpu.optim import factory
from lamb_tpu.run import overrides
from lamb_tpu.run.recipe import resolve, resolve_optimizer
from tests import tiny

NAMES = {
    "optimizer": factory.OPTIMIZERS,
    "model": models.MODULES,
    "task": tasks.TASKS,
    "data.options": (*DATASETS, "tfds:imagenette"),
    "batch_rule": RULES,
}


def applied(config: ConfigDict, *flags: str) -> ConfigDict:
    found, rest = overrides.take(flags)
    assert not rest
    overrides.apply(config, found)
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
    "key, message",
    [
        ("batchsize", r"config\.batchsize is unknown; config has: .*batch_size"),
        ("schedule.decay.x", r"config\.schedule\.decay\.x is unknown; .* has: no keys"),
        ("optimizer.b3", r"config\.optimizer\.b3 is unknown; optimizer 'lamb' has: .*b2"),
        ("ema", r"config\.ema is a section; name one of its keys: decay"),
        ("phases.three.seed", r"config\.phases\.three is unknown; config\.phases has: one, two"),
    ],
)
def test_keys_without_a_type(key: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        overrides.kind_of(phased(), key)


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
    found, rest = overrides.take(argv)
    assert [(item.key, item.text) for item in found] == [
        ("config.optimizer.b2", "0.9"),
        ("config.model.a", "3"),
        ("config.task.flag", "False"),
        ("config.task.other", "True"),
        ("config.phases.one.data.options.text", "a=b"),
    ]
    assert rest == [
        "train",
        "--config=x.py",
        "--config.seed=3",
        "--workdir=w",
        "--config.optimizer={}",
    ]


@pytest.mark.parametrize("section", NAMES)
def test_every_argument_takes_its_own_default(section: str) -> None:
    """And adds no key by it, so that the config is that of a run that left it out."""
    for name in NAMES[section]:
        for key, (kind, default) in overrides.own_fields(section, name).items():
            if default is inspect.Parameter.empty and key != "learning_rate":
                continue
            text = "1.0" if key == "learning_rate" else str(default)
            value = overrides.convert(f"{name}.{key}", text, kind, default)
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
    with pytest.raises(UserError, match="batch_rule.target is unknown; batch_rule 'ramp' has:"):
        applied(config, "--config.batch_rule.target=1")
    with pytest.raises(UserError, match="sets points; batch_rule 'constant' has: name; replace"):
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
    config_lib.check_keys(config)
    resolve_optimizer(config, resolve(config, num_examples=256))
    with pytest.raises(AttributeError):  # it is locked again
        config.optimizer.b3 = 1


@pytest.mark.parametrize(
    "flag, message",
    [
        ("optimizer.b3=1", "optimizer.b3 is unknown; optimizer 'lamb' has: name, learning_rate, "),
        ("optimizer.axis_name=data", "optimizer.axis_name is unknown"),
        ("optimizer.b2=abc", "optimizer.b2 is 'abc'; it must be a number, such as 0.999$"),
        ("optimizer.b2=None", "optimizer.b2 is 'None'; it must be a number"),
        ("optimizer.collect=1", "optimizer.collect is '1'; it must be True or False, such as Fal"),
        ("optimizer.clip_global_norm=a", "clip_global_norm is 'a'; it must be a number or None$"),
        ("optimizer.agvm=3", "optimizer.agvm is '3'; it must be a dictionary or None$"),
        ("optimizer.phi_bounds=(1, 2, 3)", "must be a tuple of 2 values, such as .0.0, inf.$"),
        ("optimizer.phi_bounds=(1, 'a')", "phi_bounds is .*; it must be a tuple of 2 values"),
        ("optimizer.name=adan", "config.optimizer: the optimizer's name 'adan' is unknown; known"),
        ("optimizer.preset=papr", "the preset name 'papr' is unknown; lamb has: paper, author"),
        ("model.hidden_sizes=(8, 8.5)", "hidden_sizes is '.8, 8.5.'; it must be a tuple, such as"),
        ("model.hidden_sizes=" + "(" * 10_000, "hidden_sizes is '.*; it must be a tuple"),
        ("model.width=3", "model.width is unknown; model 'mlp' has: name, num_classes, hidden_"),
        ("model.name=mpl", "config.model.name is 'mpl'; known models: bert"),
        ("task.num_best=3", "task.num_best is unknown; task 'classification' has: name, label_"),
        ("data.options.size=3", "data.options.size is unknown; data set 'digits' has: none"),
        ("phases.three.model.dtype=float32", "phases.three is unknown; config.phases has: one, tw"),
        ("phases.two.optimizer.b3=1", "config.phases.two.optimizer.b3 is unknown"),
    ],
)
def test_mistake(flag: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config = applied(phased(), f"--config.{flag}")
        resolve_optimizer(config, resolve(config, num_examples=256))


def test_name_decides_whatever_the_order() -> None:
    config = applied(
        tiny.digits(), "--config.optimizer.momentum=0.95", "--config.optimizer.name=lars"
    )
    assert config.optimizer.momentum == 0.95
    resolve_optimizer(config, resolve(config, num_examples=256))
    tiny.change(config, {"data.name": "image_folder"})
    assert applied(config, "--config.data.options.size=96").data.options.size == 96
    with pytest.raises(UserError, match="name is 'adam' on the command line, .* sets momentum; .*"):
        applied(config, "--config.optimizer.name=adam")


def with_preset() -> ConfigDict:
    """Returns a recipe of LAMB with a preset."""
    optimizer = {"name": "lamb", "preset": "author", "learning_rate": 0.01}
    return tiny.digits(optimizer=ConfigDict(optimizer))


def test_a_preset_of_another_optimizer_names_the_remedy() -> None:
    with pytest.raises(UserError) as caught:
        applied(with_preset(), "--config.optimizer.name=adamw", "--config.optimizer.b1=0.8")
    assert str(caught.value) == (
        "config.optimizer.name is 'adamw' on the command line, and the config file sets "
        "config.optimizer.preset='author', a preset of another optimizer; add "
        "--config.optimizer.preset=''"
    )
    with pytest.raises(UserError, match="preset='', or one of novograd's: paper, jasper, optax"):
        applied(with_preset(), "--config.optimizer.name=novograd")
    # With another field that does not fit, one message has both.
    config = with_preset()
    with config.unlocked():
        config.optimizer.collect = True
    with pytest.raises(UserError, match="the config file sets collect, preset; .* replace them"):
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
    assert resolve_optimizer(config, recipe)[0] is not None
    assert config.optimizer.b1 == 0.8
    # The default of AdamW, not that of a preset, so the flag adds no key.
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
    # The last one counts.
    twice = ("--config.optimizer.b2=0.9", "--config.optimizer.b2=0.999")
    assert config_lib.flatten(applied(tiny.digits(), *twice)) == before
    # To a preset another value is the default.
    preset = (
        "--config.optimizer.preset=author",
        "--config.optimizer.bias_correction=moments",
        "--config.optimizer.clip_global_norm=1.0",
    )
    fields = applied(tiny.digits(), *reversed(preset)).optimizer
    assert fields.bias_correction == "moments" and "clip_global_norm" not in fields
    # And to a phase that of the whole config.
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

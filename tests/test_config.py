"""Tests configs: their keys, the arguments of recipes, and the differences between configs."""

import json
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu.spec import parse
from tests import tiny
from tests.raising import rejected


def test_base_config_is_locked_and_valid() -> None:
    config = config_lib.base_config()
    parse(config)
    with pytest.raises(AttributeError, match="lerning_rate"):
        config.optimizer.lerning_rate = 1
    with pytest.raises(TypeError, match="batch_size"):
        config.batch_size = "many"


def test_argument() -> None:
    parsed = config_lib.parse_argument(
        " batch=64, smoke ,rate=2", batch=32, rate=0.5, smoke=False, name="x"
    )
    assert parsed.to_dict() == {"batch": 64, "rate": 2.0, "smoke": True, "name": "x"}
    assert isinstance(parsed.rate, float)
    assert config_lib.parse_argument("smoke=false", smoke=True).smoke is False
    for nothing in (None, "", " "):
        assert config_lib.parse_argument(nothing, batch=32).batch == 32


@pytest.mark.parametrize(
    "argument, fields",
    [
        ("bath=64", ("", "bath", "is unknown", "use batch or smoke; did you mean batch?")),
        (
            "batch=sixty",
            (" batch", "sixty", "has the wrong type", "use a whole number, such as 32"),
        ),
        ("batch", (" batch", "true", "has the wrong type", "use a whole number")),
        ("smoke=perhaps", (" smoke", "perhaps", "has the wrong type", "use True or False")),
    ],
)
def test_wrong_argument(argument: str, fields: tuple[str, ...]) -> None:
    with rejected(f"the config's argument{fields[0]}", *fields[1:]):
        config_lib.parse_argument(argument, batch=32, smoke=False)


def test_unknown_value_of_an_argument() -> None:
    config_lib.check_argument("phase", 1, (1, 2))
    with rejected("the config's argument phase", 3, "is unknown", "use 1 or 2"):
        config_lib.check_argument("phase", 3, (1, 2))


def test_missing_key() -> None:
    config = tiny.digits()
    with config.unlocked():
        del config.eval.every
    with rejected("config.eval.every", ..., "is missing", "start from lamb_tpu.config.base_config"):
        parse(config)


def test_integers_are_valid_for_floats() -> None:
    config = tiny.digits(schedule__power=2, optimizer__learning_rate=1)
    parse(config)


def test_data_options_are_arbitrary() -> None:
    config = tiny.digits()
    config.data.options = ConfigDict({"sequence_length": 128, "vocab": "here/vocab.txt"})
    parse(config)
    old = config_lib.flatten(config)
    config.data.options.vocab = "elsewhere/vocab.txt"
    assert config_lib.differences(old, config_lib.flatten(config)) == []
    config.data.options.sequence_length = 512
    assert config_lib.differences(old, config_lib.flatten(config)) == [
        "data.options.sequence_length: 128 there, 512 now"
    ]
    with rejected("config.data.options", 3, "is not a section", "use a ConfigDict"):
        parse(tiny.digits(data__options=3))


def test_flatten_is_what_json_gives_back() -> None:
    flat = config_lib.flatten(
        ConfigDict({"b": {"rules": (("bias$", {"decay": False}),), "none": None}, "a": 1.5})
    )
    assert flat == {"a": 1.5, "b.none": None, "b.rules": [["bias$", {"decay": False}]]}
    assert list(flat) == sorted(flat)
    with rejected("config.a.dtype", float, "cannot be saved", "'bfloat16'"):
        config_lib.flatten({"a": {"dtype": float}})


@pytest.mark.parametrize("name", sorted(path.stem for path in tiny.ROOT.glob("configs/[a-z]*.py")))
def test_unflatten_undoes_it(name: str) -> None:
    config = tiny.recipe_file(tiny.ROOT / "configs" / f"{name}.py").get_config()
    flat = config_lib.flatten(config)
    again = config_lib.unflatten(json.loads(json.dumps(flat)))
    assert config_lib.flatten(again) == flat
    parse(again)
    assert again.is_locked and type(again.parallel.rules) is tuple


def test_differences_leave_free_keys_out() -> None:
    old = config_lib.flatten(tiny.digits())
    free = tiny.digits(
        data__dir="elsewhere",
        data__prepared_dir="x",
        checkpoint__every="3 steps",
        checkpoint__keep=1,
        log__every="9 steps",
        log__tensorboard=True,
        mesh__data=8,
        eval__batch_size=8,
        init_from="elsewhere",
    )
    assert config_lib.differences(old, config_lib.flatten(free)) == []
    other = tiny.digits(seed=1, data__train_split="test", eval__every="2 steps")
    assert config_lib.differences(old, config_lib.flatten(other)) == [
        "data.train_split: 'train[:256]' there, 'test' now",
        "eval.every: '6 steps' there, '2 steps' now",
        "seed: 0 there, 1 now",
    ]
    assert config_lib.differences(old, old | {"new": 1}) == ["new: None there, 1 now"]


def test_free_keys_of_phases() -> None:
    phases = {"phases.phase_1.batch_size": 8, "phases.phase_1.log.every": "1 steps"}
    changed = {"phases.phase_1.batch_size": 4, "phases.phase_1.log.every": "2 steps"}
    assert config_lib.differences(phases, changed) == ["phases.phase_1.batch_size: 8 there, 4 now"]


@pytest.mark.parametrize(
    "key, value, problem, remedy",
    [
        ("init_from", 3, "has the wrong type", "use text"),
        ("init.optimizer_state", True, "has the wrong type", "use text"),
        ("init.new", "x", "is unknown", "config.init has: new_parameters, optimizer_state"),
        ("phases", 3, "is not a section", "use a ConfigDict"),
        ("prng", None, "has the wrong type", "use text"),
    ],
)
def test_errors_about_the_initial_state(key: str, value: Any, problem: str, remedy: str) -> None:
    shown = ... if problem == "is unknown" else value
    with rejected(f"config.{key}", shown, problem, remedy):
        parse(tiny.digits(**{key.replace(".", "__"): value}))

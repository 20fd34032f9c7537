"""Keys, arguments and comparison of configs."""

import json

import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu.errors import UserError
from tests import tiny


def test_base_config_is_locked_and_valid() -> None:
    config = config_lib.base_config()
    config_lib.check_keys(config)
    config_lib.check_values(config)
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
    "argument, message",
    [
        ("bath=64", "'bath=64' has the unknown key 'bath'; known: batch, smoke"),
        ("batch=sixty", "batch='sixty' must be of type int, such as 32"),
        ("batch", "batch='true' must be of type int"),
        ("smoke=perhaps", "smoke='perhaps' must be of type bool"),
    ],
)
def test_wrong_argument(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_lib.parse_argument(argument, batch=32, smoke=False)


def test_argument_that_is_none_of_the_known() -> None:
    config_lib.check_argument("phase", 1, (1, 2))
    with pytest.raises(UserError, match="the config's argument phase=3 is unknown; known: 1, 2$"):
        config_lib.check_argument("phase", 3, (1, 2))


def test_missing_key() -> None:
    config = tiny.digits()
    with config.unlocked():
        del config.eval.every
    with pytest.raises(UserError, match="config.eval.every is missing; start from .*base_config"):
        config_lib.check_keys(config)


def test_whole_numbers_may_stand_for_fractions() -> None:
    config = tiny.digits(schedule__power=2, optimizer__learning_rate=1)
    config_lib.check_keys(config)
    config_lib.check_values(config)


def test_options_of_the_data_are_its_own() -> None:
    config = tiny.digits()
    config.data.options = ConfigDict({"sequence_length": 128, "vocab": "here/vocab.txt"})
    config_lib.check_keys(config)
    old = config_lib.flatten(config)
    config.data.options.vocab = "elsewhere/vocab.txt"
    assert config_lib.differences(old, config_lib.flatten(config)) == []
    config.data.options.sequence_length = 512
    assert config_lib.differences(old, config_lib.flatten(config)) == [
        "data.options.sequence_length: 128 there, 512 now"
    ]
    with pytest.raises(UserError, match="config.data.options is 3; it must be a ConfigDict"):
        config_lib.check_keys(tiny.digits(data__options=3))


def test_flatten_is_what_json_gives_back() -> None:
    flat = config_lib.flatten(
        ConfigDict({"b": {"rules": (("bias$", {"decay": False}),), "none": None}, "a": 1.5})
    )
    assert flat == {"a": 1.5, "b.none": None, "b.rules": [["bias$", {"decay": False}]]}
    assert list(flat) == sorted(flat)
    with pytest.raises(UserError, match="config.a.dtype is <class 'float'>; .*'bfloat16'"):
        config_lib.flatten({"a": {"dtype": float}})


@pytest.mark.parametrize("name", sorted(path.stem for path in tiny.ROOT.glob("configs/[a-z]*.py")))
def test_unflatten_undoes_it(name: str) -> None:
    config = tiny.recipe_file(tiny.ROOT / "configs" / f"{name}.py").get_config()
    flat = config_lib.flatten(config)
    again = config_lib.unflatten(json.loads(json.dumps(flat)))
    assert config_lib.flatten(again) == flat
    config_lib.check_keys(again)
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
    "changes, message",
    [
        ({"init_from": 3}, "config.init_from is 3; it must be text"),
        ({"init__optimizer_state": True}, "config.init.optimizer_state is True; it must be text"),
        ({"init__new": "x"}, "config.init.new is unknown; config.init has: new_parameters, opt"),
        ({"phases": 3}, "config.phases is 3; it must be a ConfigDict"),
        ({"prng": None}, "config.prng is None; it must be text"),
    ],
)
def test_mistakes_about_the_first_state(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_lib.check_keys(tiny.digits(**changes))


def test_section_of_a_key() -> None:
    config = config_lib.base_config()
    assert config_lib.section_of(config, "seed") is config
    assert config_lib.section_of(config, "ema.decay") is config.ema
    assert config_lib.section_of(config, "data.options") is config.data
    with pytest.raises(UserError, match="config.ema.dacay is unknown; config.ema has: decay"):
        config_lib.section_of(config, "ema.dacay")
    with pytest.raises(UserError, match="config.seed.x is unknown; config.seed has: no keys"):
        config_lib.section_of(config, "seed.x")

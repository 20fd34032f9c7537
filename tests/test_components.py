"""Tests registries of components: names, fields, types, and custom components."""

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import custom, overrides, trust
from lamb_tpu.components import MISSING, Field, Registry, fields_of
from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.run import batches
from lamb_tpu.run.build import prepare
from lamb_tpu.run.categories import REGISTRIES, check_fields
from lamb_tpu.spec import parse
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected


@dataclasses.dataclass(frozen=True)
class Box:
    model: Any
    width: int
    share: float = 0.5
    label: str = ""
    is_open: bool = False
    sizes: Sequence[int] | None = None
    corners: Sequence[int] = dataclasses.field(default_factory=lambda: (1, 2))


def circle(radius: float, **others: Any) -> tuple[float, dict[str, Any]]:
    return radius, others


BOXES = Registry("box", {"box": Box, "circle": circle}, section="shape.boxes", hidden=("model",))


def test_fields() -> None:
    assert BOXES.fields("box") == {
        "width": Field(int, MISSING),
        "share": Field(float, 0.5),
        "label": Field(str, ""),
        "is_open": Field(bool, False),
        "sizes": Field(Sequence[int] | None, None),
        "corners": Field(Sequence[int], (1, 2)),
    }
    assert list(BOXES.keys_of("circle")) == ["name", "radius"]
    assert fields_of(circle) == {"radius": Field(float, MISSING)}
    assert BOXES.fields("tests.test_components:circle") == BOXES.fields("circle")


def test_name_in_nested_configs() -> None:
    config = {"shape": {"boxes": {"name": "box"}}}
    assert BOXES.name_of(config) == BOXES.name_of(None, {}, {"shape": {}}, config) == "box"
    assert BOXES.name_of({"shape": {"boxes": {"name": "x"}}}, config) == "x"
    assert BOXES.name_of({}) is None
    assert REGISTRIES["batch_rule"].name_of({}) == "constant"


def test_making() -> None:
    made = BOXES.make("box", {"width": 3, "sizes": (1,), "share": 1}, model=7)
    assert made == Box(7, 3, 1, sizes=(1,))
    assert BOXES.make("circle", {"radius": 2}, model=7) == (2, {"model": 7})


BOX = "config.shape.boxes"
KNOWN = "use box, circle or 'package.module:Name' for a custom box"
HAS = "box 'box' has: name, width, share, label, is_open, sizes, corners"
WHOLE, TYPE = "use a whole number", "has the wrong type"


@pytest.mark.parametrize(
    "name, given, fields",
    [
        ("bax", {}, ("name", "bax", "is unknown", f"{KNOWN}; did you mean {BOX}.name=box?")),
        (["box"], {}, ("name", ["box"], "is unknown", KNOWN)),
        (None, {}, ("name", ..., "is missing", KNOWN)),
        ("box", {"widht": 3}, ("widht", ..., "is unknown", f"{HAS}; did you mean {BOX}.width?")),
        ("box", {"width": 3, "model": 1}, ("model", ..., "is unknown", HAS)),
        (
            "box",
            {},
            ("width", ..., "is missing", "set it, because box 'box' has no default for it"),
        ),
        ("box", {"width": 3.0}, ("width", 3.0, TYPE, WHOLE)),
        ("box", {"width": True}, ("width", True, TYPE, WHOLE)),
        ("box", {"width": None}, ("width", None, TYPE, WHOLE)),
        ("box", {"width": 3, "share": "x"}, ("share", "x", TYPE, "use a number, such as 0.5")),
        ("box", {"width": 3, "label": 1}, ("label", 1, TYPE, "use text")),
        ("box", {"width": 3, "is_open": 1}, ("is_open", 1, TYPE, "use True or False, such as Fal")),
        (
            "box",
            {"width": 3, "sizes": ("a",)},
            ("sizes", ("a",), TYPE, "use a tuple of whole numb"),
        ),
        (f"{__name__}:Bux", {}, ("name", f"{__name__}:Bux", "does not exist", "the module tests.")),
        (f"{__name__}:Box", {"width": "x"}, ("width", "x", TYPE, WHOLE)),
    ],
)
def test_errors(name: Any, given: dict[str, Any], fields: tuple[Any, ...]) -> None:
    key, *others = fields
    with rejected(f"{BOX}.{key}", *others):
        BOXES.check(name, given)


def test_none_can_stand_for_a_default() -> None:
    sets = Registry("set", {"box": Box}, hidden=("model",), none_is_default=True)
    sets.check("box", {"width": None, "share": None})


def test_every_shipped_component_is_documented() -> None:
    for section, registry in REGISTRIES.items():
        assert section == registry.section and registry
        for name, made in registry.items():
            made = made.options_type() if hasattr(made, "options_type") else made
            assert made.__doc__, (section, name)
            for field in registry.fields(name).values():
                assert isinstance(field, Field)


# One component of each category, in a folder outside of the package.
TOYS = '''
import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.batching.rules import Bounded, Rule
from lamb_tpu.data import ArraySource
from lamb_tpu.models import Model
from lamb_tpu.parallel.exchange import Exchange, Residual
from lamb_tpu.tasks.classification import Classification


def line(width: int = 4):
    def init(key, inputs):
        return {"params": {"w": 0.1 * jax.random.normal(key, (width, 2))}}

    def apply(variables, inputs, *, train, key=None):
        return inputs @ variables["params"]["w"], {}

    return Model(init, apply)


@dataclasses.dataclass(frozen=True)
class Labels(Classification):
    input_std: float = 1.0


def points(split: str, size: int = 64):
    x = np.random.default_rng(0).normal(size=(size, 4)).astype(np.float32)
    return ArraySource("points", {"image": x, "label": (x[:, 0] > 0).astype(np.int32)}, 2)


def sgd(learning_rate, momentum: float = 0.0):
    return optax.sgd(learning_rate, momentum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubling(Rule):
    """Doubles the batch after every `examples` examples."""

    examples: int

    def next_batch(self, batch, statistics, examples):
        return self.granularity * 2 ** (1 + examples // self.examples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Following(Bounded):
    needs = ("noise_scale",)
    factor: float = 1.0

    def wanted(self, batch, statistics):
        return self.factor * statistics["noise_scale"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wild(Rule):
    needs = ("noise_scale",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odd(Rule):
    def next_batch(self, batch, statistics, examples):
        return batch + 1


class Loose:
    needs = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken(Rule):
    def __post_init__(self):
        raise KeyError("sizes")


def falling(decay_steps: float, share: float = 1.0):
    return lambda count: jnp.maximum(1.0 - share * count / decay_steps, 0.0)


@dataclasses.dataclass(frozen=True)
class Halves(Exchange):
    """Sends gradients as their halves, and doubles the sums."""

    axes: tuple[str, ...]
    num_devices: int
    parts: int = 2

    def init(self, params):
        return Residual()

    def reduce(self, grads, residual):
        cut = jax.tree.map(lambda g: g / self.parts, grads)
        return jax.tree.map(lambda g: g * self.parts, jax.lax.psum(cut, self.axes)), residual
'''


@pytest.fixture
def toys(custom_folder: pathlib.Path) -> pathlib.Path:
    (custom_folder / "my_toys.py").write_text(TOYS)
    return custom_folder


def toy_config(**changes: Any) -> ConfigDict:
    config = tiny.digits(
        model=ConfigDict({"name": "my_toys:line", "width": 4}),
        task=ConfigDict({"name": "my_toys:Labels"}),
        optimizer=ConfigDict({"name": "my_toys:sgd", "learning_rate": 0.5, "momentum": 0.5}),
        batch_rule=ConfigDict({"name": "my_toys:Doubling", "examples": 32}),
        batch_size=16,
        accumulation_steps=2,
        duration="6 steps",
        schedule__decay="my_toys:falling",
        schedule__options=ConfigDict({"share": 0.5}),
        parallel__backend="shard_map",
        parallel__exchange=ConfigDict({"name": "my_toys:Halves", "parts": 4}),
    )
    data = {"name": "my_toys:points", "train_split": "train", "options": {"size": 64}}
    return tiny.change(config, {f"data.{key}": value for key, value in data.items()} | changes)


@pytest.mark.long
def test_toys_of_every_category_train_and_resume(toys: pathlib.Path) -> None:
    config = toy_config()
    result = train(config, toys / "run", quiet=True)
    assert result["accuracy"] > 0.8
    with tiny.preempted_at(3):
        train(config, toys / "resumed", quiet=True)
    assert train(config, toys / "resumed", quiet=True) == result
    tiny.same_state(config, toys / "run", toys / "resumed")
    records = (toys / "run" / "metrics.jsonl").read_text()
    # Batches of 16, 16, 32 and 32 add up to the run's 96 examples, so the fourth update is the last.
    assert '"batch_size": 32' in records and '"batch_size": 16' in records
    receipt = (toys / "run" / "run.jsonl").read_text()
    assert receipt.count('"sha256"') >= len(set(re.findall(r"my_toys:\w+", receipt))) >= 7


def test_toys_build_a_run(toys: pathlib.Path) -> None:
    run = prepare(toy_config(), None)
    assert run.exchange is not None and type(run.recipe.rule).__name__ == "Doubling"
    assert run.recipe.path.segments == [(0, 16), (2, 32)]


def test_fields_of_toys_are_flags(toys: pathlib.Path) -> None:
    config = toy_config()
    flags = {
        "model.width": 5,
        "task.input_std": 2.0,
        "data.options.size": 128,
        "optimizer.momentum": 0.25,
        "batch_rule.examples": 16,
        "schedule.options.share": 0.25,
        "parallel.exchange.parts": 8,
    }
    actual, rest = overrides.take([f"--config.{key}={value}" for key, value in flags.items()])
    assert not rest
    overrides.apply(config, actual)
    assert flags.items() <= flatten(config).items()
    assert "config.batch_rule.interval = 1  # default of my_toys:Doubling" in (
        overrides.describe(config).splitlines()
    )
    for key in flags:
        section = key.rpartition(".")[0]
        with rejected(f"config.{section}.wdith", ..., "is unknown", " 'my_toys:"):
            overrides.apply(config, overrides.take([f"--config.{section}.wdith=1"])[0])
        with rejected(f"config.{key}", "x", "has the wrong type", "use a "):
            check_fields(parse(tiny.change(toy_config(), {key: "x"})))


@pytest.mark.parametrize(
    "rule, message",
    [
        (
            "Loose",
            "name='my_toys:Loose' is not a batch rule; use a class that inherits from lamb_tpu",
        ),
        (
            "line",
            "name='my_toys:line' is not a batch rule; use a class that inherits from lamb_tpu",
        ),
        (
            "Wild",
            "name='my_toys:Wild' needs statistics .noise_scale. but has no largest batch; derive its class",
        ),
        ("Odd", "config.batch_rule: next_batch=.* must be a multiple of the batch granularity 8"),
        ("Broken", "custom module my_toys fails at line .*: KeyError: 'sizes'"),
        ("Doubling", "config.batch_rule.examples is missing; .* 'my_toys:Doubling' has no d"),
        ("Nothing", "config.batch_rule.name='my_toys:Nothing' does not exist; the module my_toys "),
    ],
)
def test_batch_rules_that_do_not_fit(toys: pathlib.Path, rule: str, message: str) -> None:
    config = toy_config(batch_rule=ConfigDict({"name": f"my_toys:{rule}"}))
    with pytest.raises(UserError, match=message):
        batches.resolve_path(parse(config), base_updates=6, most=100)


def test_statistics_of_a_custom_batch_rule(toys: pathlib.Path) -> None:
    rule = ConfigDict({"name": "my_toys:Following", "upper": 64})
    assert batches.required_statistics(parse(toy_config(batch_rule=rule))) == {
        "noise_scale": True,
        "decay": 0.99,
    }
    made, _ = batches.check_rule(parse(toy_config(batch_rule=rule)))
    assert made.decide(16, {"noise_scale": 30.0}, 0) == 32


def test_a_stored_config_runs_no_code_of_a_batch_rule(tmp_path: pathlib.Path) -> None:
    for key, stored in (
        ("batch_rule.name", {"batch_rule": {"name": "subprocess:Popen", "args": "ls"}}),
        ("schedule.decay", {"schedule": {"decay": "subprocess:Popen", "options": {"args": "ls"}}}),
    ):
        with rejected(f"config.{key}", "subprocess:Popen", "is rejected", "give --trust"):
            trust.check(stored, tmp_path / "config.json", "--trust")
    flat = {"batch_rule.name": "my_absent_module:Rule", "batch_rule.x": 1}
    before = custom.imported_tops()
    assert overrides.defaults_of_stored("batch_rule", flat) == {}
    assert custom.imported_tops() == before

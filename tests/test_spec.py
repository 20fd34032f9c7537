"""Tests that configs can be parsed into typed, frozen values, changed, and written back."""

import dataclasses
import pathlib
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu import spec
from lamb_tpu.spec_keys import Component, Spec
from tests import tiny
from tests.raising import rejected

RECIPES = sorted(tiny.ROOT.glob("configs/[a-z]*.py"))


def test_parsed() -> None:
    config = tiny.digits(statistics__modules=(("a", "b"),))
    config.data.options = ConfigDict({"crop": {"pad": 4}})
    parsed = spec.parse(config)
    assert parsed.optimizer.name == "lamb" and parsed.optimizer.fields["learning_rate"] == 0.02
    assert "name" not in parsed.optimizer.fields and parsed.batch_rule.name == ""
    assert parsed.data.options["crop"]["pad"] == 4 and parsed.statistics.modules == (("a", "b"),)
    assert parsed.eval.every == "6 steps" and parsed.mesh["data"] == -1
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed.eval.every = "1 steps"  # type: ignore[misc]
    with pytest.raises(TypeError, match="does not support item assignment"):
        parsed.optimizer.fields["b1"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_given_back(recipe: pathlib.Path) -> None:
    config = tiny.recipe_file(recipe).get_config("")
    parsed = spec.parse(config)
    assert spec.as_dict(parsed) == config.to_dict()
    assert spec.flatten(parsed) == config_lib.flatten(config)
    assert spec.parse(spec.as_dict(parsed)) == parsed and spec.parse(parsed) is parsed
    assert spec.flatten(spec.of_flat(spec.flatten(parsed))) == spec.flatten(parsed)


def test_a_name_that_is_missing_and_one_that_is_empty_stay_apart() -> None:
    # config.json must preserve this difference, because a resumed run compares configs key by key.
    for section in ({}, {"name": ""}):
        config = tiny.digits(batch_rule=ConfigDict(section))
        assert spec.as_dict(spec.parse(config))["batch_rule"] == section
        assert spec.flatten(spec.parse(config)) == config_lib.flatten(config)


def test_lists_of_custom_components_stay_lists() -> None:
    config = tiny.digits(statistics__modules=[["a", "b"]])
    config.model = ConfigDict({"name": "mlp", "hidden_sizes": [16]})
    parsed = spec.parse(config)
    assert parsed.model.fields["hidden_sizes"] == [16]
    assert parsed.statistics.modules == (("a", "b"),)


def test_changed() -> None:
    old = spec.parse(tiny.digits())
    new = spec.changed(
        old,
        {
            "checkpoint.keep": 3,
            "model.hidden_sizes": (8,),
            "optimizer.b1": 0.5,
            "data": dataclasses.replace(old.data, eval_split="train"),
            "task": Component("classification"),
            "mesh": {"data": 1},
            "phases.one.duration": "3 steps",
        },
    )
    assert (new.checkpoint.keep, old.checkpoint.keep) == (3, 10)
    assert new.model == Component("mlp", {"hidden_sizes": (8,)})
    assert new.optimizer.fields == {**old.optimizer.fields, "b1": 0.5}
    assert new.data.eval_split == "train" and new.data.train_split == "train[:256]"
    assert dict(new.task.fields) == {} and old.task.fields
    assert dict(new.mesh) == {"data": 1} and new.phases["one"]["duration"] == "3 steps"
    assert spec.changed(new, {"phases": {}, "model": old.model}).model == old.model


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({"checkpoint.keep": 0}, ("checkpoint.keep", 0, "is out of range", "use at least 1")),
        ({"checkpoint.kep": 1}, ("checkpoint.kep", ..., "is unknown", "did you mean")),
        ({"chekpoint.keep": 1}, ("chekpoint", ..., "is unknown", "did you mean")),
        ({"seed.x": 1}, ("seed.x", ..., "is unknown", "config.seed has: no keys")),
        ({"seed": "1"}, ("seed", "1", "has the wrong type", "use a whole number")),
        ({"eval": 3}, ("eval", 3, "is not a section", "use a ConfigDict")),
        ({"model": Component("", has_name=False)}, ("model.name", ..., "is missing", "set it")),
    ],
)
def test_changes_are_checked(changes: dict, fields: tuple[Any, ...]) -> None:
    with rejected(f"config.{fields[0]}", *fields[1:]):
        spec.changed(Spec(), changes)


def test_values_by_their_keys() -> None:
    parsed = spec.parse(tiny.digits())
    assert spec.value_of(parsed, "seed") == 0 and spec.value_of(parsed, "eval.every") == "6 steps"
    assert spec.value_of(parsed, "optimizer.learning_rate") == 0.02
    assert spec.value_of(parsed, "optimizer.name") == "lamb"
    with rejected("config.ema.dacay", ..., "is unknown", "did you mean config.ema.decay?"):
        spec.value_of(parsed, "ema.dacay")


def test_a_stored_config_gets_the_defaults_of_new_keys() -> None:
    parsed = spec.of_flat({"seed": 3, "model.name": "lenet", "parallel.rules": [["a", "fsdp"]]})
    assert parsed == spec.changed(
        Spec(), {"seed": 3, "model": {"name": "lenet"}, "parallel.rules": (("a", "fsdp"),)}
    )
    with rejected("config.data", 3, "is not a section", "use a ConfigDict"):
        spec.of_flat({"data": 3})


def test_section_of_a_key() -> None:
    config = config_lib.base_config()
    assert spec.section_of(config, "seed") is config
    assert spec.section_of(config, "ema.decay") is config.ema
    assert spec.section_of(config, "data.options") is config.data
    with rejected("config.ema.dacay", ..., "is unknown", "config.ema has: decay"):
        spec.section_of(config, "ema.dacay")
    with rejected("config.seed.x", ..., "is unknown", "config.seed has: no keys"):
        spec.section_of(config, "seed.x")

"""Recipes at other batches: by their own argument, with overrides kept."""

import doctest
import shlex

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan import variants
from lamb_tpu.plan.variants import Variants, changed, differences, flag
from lamb_tpu.run import overrides
from tests import tiny

CONFIGS = tiny.ROOT / "configs"


def of(recipe: str, **changes: object) -> Variants:
    path, _, argument = recipe.partition(":")
    config = tiny.recipe_file(CONFIGS / path).get_config(argument)
    return Variants(
        f"{CONFIGS}/{recipe}",
        tiny.change(config, {k.replace("__", "."): v for k, v in changes.items()}),
    )


def test_the_recipes_own_rule_follows_the_batch() -> None:
    found = of("imagenet_resnet.py:optimizer=lars", model__dtype="float32")
    assert found.at_batch(32_768) is found.config
    smaller, larger = found.at_batch(8192), found.at_batch(65_536)
    # Rows of LARS, with the override in each.
    assert [each.optimizer.learning_rate for each in (smaller, larger)] == [10.0, 35.6]
    assert {each.model.dtype for each in (smaller, larger)} == {"float32"}
    assert (larger.batch_size, larger.schedule.warmup) == (65_536, "40 epochs")
    groups = of("imagenet_efficientnet.py:optimizer=lars,batch=32768")
    assert groups.config.model.group_size == 1024
    assert groups.at_batch(65_536).model.group_size == 2048
    with pytest.raises(UserError, match="batch=8192 is unknown; known: 16384, 32768, 65536"):
        groups.at_batch(8192)


def test_a_recipe_without_the_argument() -> None:
    """One phase of a recipe with its own batches, and a batch that was overridden."""
    phase = of("bert_pretrain.py:size=tiny,recipe=mixed,phase=1")
    smaller = phase.at_batch(32_768)
    assert differences(phase.config, smaller) == {"batch_size": 32_768}
    row = of("imagenet_resnet.py:optimizer=lars", batch_size=8192)
    assert differences(row.config, row.at_batch(4096)) == {"batch_size": 4096}
    # A smoke variant keeps its batch, whatever its argument says.
    assert of("digits.py:smoke").at_batch(64).batch_size == 64
    assert of("imagenet_resnet.py:smoke").at_batch(64).batch_size == 64


def test_what_an_argument_changes() -> None:
    found = of("bert_pretrain.py:size=tiny,phase=1").by_argument("scan=true")
    assert set(found) == {"model.scan_layers", "optimizer.rules"}
    assert of("digits.py").by_argument("scan=true") == {}


def test_flags_make_the_change() -> None:
    """What `flag` prints, read again as a command line, gives the changed config."""
    found = of("bert_pretrain.py:size=tiny,phase=1")
    changes = found.by_argument("scan=true")
    line = " ".join(flag(key, value) for key, value in changes.items())
    taken, rest = overrides.take(shlex.split(line))
    config = found.config.copy_and_resolve_references()
    overrides.apply(config, taken)
    assert not rest and differences(config, changed(found.config, changes)) == {}


def test_a_new_key_and_section() -> None:
    config = tiny.digits()
    found = changed(config, {"model.dtype": "bfloat16", "data.options.size": 8})
    assert (found.model.dtype, found.data.options.size) == ("bfloat16", 8)
    assert "dtype" not in config.model
    assert differences(config, found) == {"model.dtype": "bfloat16", "data.options.size": 8}


def test_docstrings() -> None:
    assert doctest.testmod(variants) == (0, 2)

"""Recipes with other batch sizes, set by the argument `batch`, with all overrides preserved."""

import shlex

import pytest

from lamb_tpu import cli, overrides
from lamb_tpu.errors import UserError
from lamb_tpu.plan.variants import differences, flag
from lamb_tpu.spec import changed, parse
from tests import tiny
from tests.plan.planned import variants as of


def test_the_recipe_adapts_to_the_batch() -> None:
    actual = of("imagenet_resnet.py:optimizer=lars", model__dtype="float32")
    assert actual.at_batch(32_768) is actual.config
    smaller, larger = actual.at_batch(8192), actual.at_batch(65_536)
    # Learning rates of LARS, with the override in each config.
    assert [each.optimizer.get("learning_rate") for each in (smaller, larger)] == [10.0, 35.6]
    assert {each.model.get("dtype") for each in (smaller, larger)} == {"float32"}
    assert (larger.batch_size, larger.schedule.warmup) == (65_536, "40 epochs")
    groups = of("imagenet_efficientnet.py:optimizer=lars,batch=32768")
    assert groups.config.model.get("group_size") == 1024
    assert groups.at_batch(65_536).model.get("group_size") == 2048
    with pytest.raises(
        UserError, match="batch is 8192, which is unknown; use 16384, 32768 or 65536"
    ):
        groups.at_batch(8192)


def test_a_recipe_without_the_argument() -> None:
    """Only batch_size changes if the recipe lacks the argument, or batch_size is overridden."""
    phase = of("bert_pretrain.py:size=tiny,recipe=mixed,phase=1")
    smaller = phase.at_batch(32_768)
    assert differences(phase.config, smaller) == {"batch_size": 32_768}
    row = of("imagenet_resnet.py:optimizer=lars", batch_size=8192)
    assert differences(row.config, row.at_batch(4096)) == {"batch_size": 4096}
    # A smoke variant ignores the argument.
    assert of("digits.py:smoke").at_batch(64).batch_size == 64
    assert of("imagenet_resnet.py:smoke").at_batch(64).batch_size == 64


def test_by_argument() -> None:
    actual = of("bert_pretrain.py:size=tiny,phase=1").by_argument("scan=true")
    assert set(actual) == {"model.scan_layers", "optimizer.rules"}
    assert of("digits.py").by_argument("scan=true") == {}


def test_flag() -> None:
    """Parsing the flags gives the changed config."""
    actual = of("bert_pretrain.py:size=tiny,phase=1")
    changes = actual.by_argument("scan=true")
    line = " ".join(flag(key, value) for key, value in changes.items())
    taken, rest = overrides.take(shlex.split(line))
    config = cli.load_recipe("bert_pretrain:size=tiny,phase=1")
    overrides.apply(config, taken)
    assert not rest and differences(parse(config), changed(actual.config, changes)) == {}


def test_differences_include_new_keys() -> None:
    config = parse(tiny.digits())
    changes = {"model.dtype": "bfloat16", "data.options.size": 8, "model.hidden_sizes": (8,)}
    assert differences(config, changed(config, changes)) == changes

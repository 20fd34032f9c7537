"""Runs that are only planned: prepared without their data sets, and compiled."""

import doctest
import importlib.util

import pytest
from ml_collections import ConfigDict

from lamb_tpu.data import registry
from lamb_tpu.errors import UserError
from lamb_tpu.plan import guard, making
from lamb_tpu.run.build import prepare
from tests import tiny


@pytest.mark.long
@pytest.mark.parametrize(
    "recipe, changes, examples",
    [
        (
            "imagenet_efficientnet.py:size=b0",
            {"batch_size": 256, "model.group_size": 32},
            1_281_167,
        ),
        ("bert_pretrain.py:size=tiny,phase=2", {"batch_size": 64}, None),
        ("bert_squad.py:size=tiny,batch=64", {}, 87_599),
        ("cifar10.py:batch=512", {}, 50_000),
    ],
)
def test_no_data_set_is_needed(
    monkeypatch: pytest.MonkeyPatch, recipe: str, changes: dict[str, int], examples: int | None
) -> None:
    monkeypatch.setattr(registry, "load", None)  # no file is looked for
    path, _, argument = recipe.partition(":")
    config = tiny.recipe_file(tiny.ROOT / "configs" / path).get_config(argument)
    run = prepare(tiny.change(config, changes), None, load=making.loader(config, None))
    assert run.recipe.total_steps > 100
    assert run.train_set.counted == (examples is not None)
    assert run.recipe.num_examples == (examples or 10**6)


def test_durations_that_need_the_number_of_examples() -> None:
    config = tiny.recipe_file(tiny.ROOT / "configs" / "bert_pretrain.py").get_config(
        "size=tiny,phase=1"
    )
    tiny.change(config, {"batch_size": 64, "checkpoint.every": "1 epochs"})
    with pytest.raises(UserError, match="config.checkpoint.every is '1 epochs', and the number of"):
        prepare(config, None, load=making.loader(config, None))
    assert prepare(config, None, load=making.loader(config, 640)).recipe.checkpoint_every == 10


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_a_program_on_which_the_compiler_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    class All(set[str]):
        def __contains__(self, key: object) -> bool:
            return True

    monkeypatch.setattr(guard, "crashed", All())
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config("batch=64")
    with pytest.raises(UserError, match="^the TPU compiler crashes on this step for v5e-4$"):
        making.make_plan(config, "v5e-4")


def test_a_batch_that_changes_is_refused() -> None:
    config = tiny.recipe_file(tiny.ROOT / "configs" / "digits.py").get_config("batch=64")
    config.batch_rule = ConfigDict({"name": "ramp", "points": ((0, 64), (1280, 128))})
    with pytest.raises(UserError, match="'ramp', and this plan is of one batch size; leave config"):
        making.make_plan(config, "v5e-4")


def test_docstrings() -> None:
    assert doctest.testmod(making) == (0, 5)

"""Plans of single runs: no data set is needed; compiler crashes and changing batches are rejected."""

import pytest
from ml_collections import ConfigDict

from lamb_tpu.data import registry
from lamb_tpu.errors import UserError
from lamb_tpu.plan import guard, making
from lamb_tpu.run.build import prepare
from tests import tiny
from tests.plan.planned import config_of, needs_compiler
from tests.raising import rejected


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
    monkeypatch.setattr(registry, "load", None)  # loading any data set would fail
    config = config_of(recipe)
    run = prepare(tiny.change(config, changes), None, load=making.loader(config, None))
    assert run.recipe.total_steps > 100
    assert run.train_set.counted == (examples is not None)
    assert run.recipe.num_examples == (examples or 10**6)


def test_durations_in_epochs_need_examples() -> None:
    config = config_of("bert_pretrain.py:size=tiny,phase=1")
    tiny.change(config, {"batch_size": 64, "checkpoint.every": "1 epochs"})
    with pytest.raises(UserError, match="because config.checkpoint.every is '1 epochs'; give --ex"):
        prepare(config, None, load=making.loader(config, None))
    assert prepare(config, None, load=making.loader(config, 640)).recipe.checkpoint_every == 10


@needs_compiler
def test_a_program_on_which_the_compiler_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "key_of", lambda *_: "k")
    monkeypatch.setattr(guard, "crashed", {"k"})
    with rejected("the training step for v5e-4", problem="crashes the TPU compiler"):
        making.make_plan(config_of("digits.py:batch=64"), "v5e-4")


def test_a_changing_batch_is_rejected() -> None:
    config = config_of("digits.py:batch=64")
    config.batch_rule = ConfigDict({"name": "ramp", "points": ((0, 64), (1280, 128))})
    with rejected("config.batch_rule.name", "ramp", "changes the batch", "leave config.batch_rule"):
        making.make_plan(config, "v5e-4")

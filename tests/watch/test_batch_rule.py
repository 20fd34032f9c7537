"""Tests, without a trainer, which batch sizes a rule chooses, and that checkpoints store them."""

import dataclasses
import json
import math
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu.batching.rules import Bounded
from lamb_tpu.run.recipe import CurrentRecipe, resolve
from lamb_tpu.watch.batch_rule import BatchRule
from tests import tiny
from tests.raising import rejected
from tests.run.test_batches import ramp
from tests.watch.observing import start


def recipe(name: str, **fields: Any) -> CurrentRecipe:
    """Returns a recipe for 768 examples, whose batch rule begins with a batch size of 64."""
    rule = {"name": name, "upper": 128, **fields}
    steps = 4 if name == "norm_test" else 8
    config = tiny.digits(accumulation_steps=steps, batch_rule=ConfigDict(rule))
    return CurrentRecipe(resolve(config, 256))


def observer(of: CurrentRecipe) -> BatchRule:
    actual = BatchRule(of)
    actual.started(start())
    return actual


def test_a_decision_uses_its_update() -> None:
    of = recipe("norm_test", eta=1.0, interval=3)
    rule = observer(of)
    tested = {"variance": (200.0, 2.0), "grad_sq": (1.0, 1.0)}
    # No decision is due after two updates; the decision after update 3 uses only its statistics.
    rule.fetched([(1, {"loss": (1.0, 1.0)}), (2, {"variance": (1e9, 1.0), "grad_sq": (1.0, 1.0)})])
    rule.fetched([(3, tested), (4, {})])
    assert of.value.path is not None
    assert of.value.path.batches(0, 6).tolist() == [64] * 3 + [112] * 3
    assert of.value.total_steps == 3 + math.ceil((768 - 192) / 112) == 9 and of.value.batch(8) == 16
    with rejected("config.batch_rule", ..., "failed after update 6: the rule needs"):
        rule.fetched([(6, {"loss": (1.0, 1.0)})])


def test_a_skipped_update_keeps_the_batch() -> None:
    of = recipe("norm_test", eta=1.0)
    before = of.value
    observer(of).fetched([(1, {"variance": (0.0, 0.0), "grad_sq": (0.0, 0.0)})])
    assert of.value is before


def test_no_decision_after_the_last_update() -> None:
    of = recipe("norm_test", eta=1.0)
    rule = observer(of)
    rule.fetched([(step, {"variance": (0.0, 1.0), "grad_sq": (1.0, 1.0)}) for step in range(1, 12)])
    rule.fetched([(12, {})])
    assert of.value.examples(12) == 768 and of.value.total_steps == 12


def pair(grad_sq: float, trace: float) -> dict[str, tuple[float, float]]:
    return {"noise_scale/grad_sq": (grad_sq, 1.0), "noise_scale/trace": (trace, 1.0)}


def test_the_noise_scale_averages_all_updates() -> None:
    """The averages of numerator and denominator also include updates after which there is no decision."""
    of = recipe("noise_scale", interval=2, decay=0.5)
    rule = observer(of)
    rule.fetched([(1, pair(1.0, 20.0)), (2, pair(2.0, 100.0))])
    assert of.value.batch(2) == 48  # (20 / 4 + 100 / 2) / (1 / 4 + 2 / 2) = 44
    # The rule resumes from a checkpoint and makes the next decision.
    saved = json.loads(json.dumps(rule.state()))
    assert saved["step"] == 2 and saved["pieces"] == [[0, 64], [2, 48]]
    again = recipe("noise_scale", interval=2, decay=0.5)
    resumed = BatchRule(again)
    resumed.restore(saved)
    resumed.started(start(2))
    assert resumed.state() == saved
    assert again.value.batch(2) == 48 and again.value.examples(2) == 128
    for each in (rule, resumed):
        each.fetched([(3, pair(1.0, 70.0)), (4, pair(-8.0, 90.0))])
    assert resumed.state() == rule.state()
    assert again.value.batch(4) == of.value.batch(4) == 128  # the noise scale is infinite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patient(Bounded):
    """Chooses the largest batch after two updates in a row with a variance above 1."""

    needs = ("variance",)

    def init(self) -> tuple[float, ...]:
        return (0.0,)

    def update(self, state: tuple[float, ...], statistics: Any) -> Any:
        (before,) = state
        high = before + 1 if statistics["variance"] > 1 else 0.0
        return (high,), {**statistics, "in a row": high}

    def wanted(self, batch: int, statistics: Any) -> float:
        return self.upper if statistics["in a row"] >= 2 else batch


def test_the_state_of_a_custom_rule_is_saved() -> None:
    def patient() -> CurrentRecipe:
        rule = Patient(granularity=8, upper=128)
        return CurrentRecipe(dataclasses.replace(recipe("norm_test", eta=1.0).value, rule=rule))

    of, again = patient(), patient()
    first = observer(of)
    for step, variance in enumerate([2.0, 0.5, 2.0], 1):
        first.fetched([(step, {"variance": (variance, 1.0)})])
    assert of.value.batch(3) == 64
    resumed = BatchRule(again)
    resumed.restore(json.loads(json.dumps(first.state())))
    resumed.started(start(3))
    for each in (first, resumed):
        each.fetched([(4, {"variance": (2.0, 1.0)})])
    assert of.value.batch(4) == again.value.batch(4) == 128 and first.state() == resumed.state()


def test_a_constant_batch_has_no_state() -> None:
    of = CurrentRecipe(resolve(tiny.digits(), 256))
    rule = observer(of)
    rule.fetched([(1, pair(1.0, 2.0))])
    assert rule.state() is None
    rule.restore(None)


def test_a_checkpoint_of_another_path() -> None:
    rule = observer(CurrentRecipe(resolve(ramp(), 256)))
    rule.restore({"step": 5, "pieces": [[0, 16], [4, 32]]})
    with rejected("config.batch_rule", ..., "[[0, 16], [4, 32]] up to update 5, but "):
        rule.restore({"step": 5, "pieces": [[0, 16], [3, 32]]})
    with rejected("config.batch_rule", ..., "but the checkpoint has None"):
        rule.restore(None)
    rule.fetched([(8, {})])
    saved = rule.state()
    assert saved is not None and saved["pieces"] == [[0, 16], [4, 32], [8, 128]]

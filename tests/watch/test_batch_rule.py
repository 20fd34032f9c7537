"""Decisions of the next batch, and the path in checkpoints, without a trainer."""

import json
import math
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.recipe import Recipe, resolve
from lamb_tpu.watch.batch_rule import BatchRule
from tests import tiny
from tests.run.test_batches import ramp
from tests.watch.observing import start


def recipe(name: str, **fields: Any) -> Recipe:
    """768 examples, first in batches of 64, by a rule with quanta of 16 or pairs of 8."""
    rule = {"name": name, "upper": 128, **fields}
    steps = 4 if name == "norm_test" else 8
    return resolve(tiny.digits(accumulation_steps=steps, batch_rule=ConfigDict(rule)), 256)


def observer(of: Recipe) -> BatchRule:
    found = BatchRule(of)
    found.started(start())
    return found


def test_a_decision_of_one_updates_statistics() -> None:
    of = recipe("norm_test", eta=1.0, interval=3)
    rule = observer(of)
    tested = {"variance": (200.0, 2.0), "grad_sq": (1.0, 1.0)}
    # Only the second is due, and only its statistics are read.
    rule.fetched([(1, {"loss": (1.0, 1.0)}), (2, {"variance": (1e9, 1.0), "grad_sq": (1.0, 1.0)})])
    rule.fetched([(3, tested), (4, {})])
    assert of.path is not None and of.path.batches(0, 6).tolist() == [64, 64, 64, 112, 112, 112]
    assert of.total_steps == 3 + math.ceil((768 - 192) / 112) == 9 and of.batch(8) == 16
    with pytest.raises(UserError, match="^config.batch_rule, after update 6: the rule needs the"):
        rule.fetched([(6, {"loss": (1.0, 1.0)})])


def test_a_skipped_update_leaves_the_batch() -> None:
    of = recipe("norm_test", eta=1.0)
    observer(of).fetched([(1, {"variance": (0.0, 0.0), "grad_sq": (0.0, 0.0)})])
    assert of.path is not None and of.path.decisions == 0


def test_nothing_is_decided_behind_the_last_update() -> None:
    of = recipe("norm_test", eta=1.0)
    rule = observer(of)
    rule.fetched([(step, {"variance": (0.0, 1.0), "grad_sq": (1.0, 1.0)}) for step in range(1, 12)])
    rule.fetched([(12, {})])
    assert of.examples(12) == 768 and of.total_steps == 12


def pair(grad_sq: float, trace: float) -> dict[str, tuple[float, float]]:
    return {"noise_scale/grad_sq": (grad_sq, 1.0), "noise_scale/trace": (trace, 1.0)}


def test_the_noise_scale_is_of_all_updates() -> None:
    """Both halves of the ratio are averaged, also over updates behind which nothing is decided."""
    of = recipe("noise_scale", interval=2, decay=0.5)
    rule = observer(of)
    rule.fetched([(1, pair(1.0, 20.0)), (2, pair(2.0, 100.0))])
    assert of.batch(2) == 48  # (20 / 4 + 100 / 2) / (1 / 4 + 2 / 2) = 44
    # It goes on from a checkpoint, with the decision for the update that follows.
    saved = json.loads(json.dumps(rule.state()))
    assert saved["step"] == 2 and saved["pieces"] == [[0, 64], [2, 48]]
    again = recipe("noise_scale", interval=2, decay=0.5)
    resumed = BatchRule(again)
    resumed.restore(saved)
    resumed.started(start(2))
    assert resumed.state() == saved and again.batch(2) == 48 and again.examples(2) == 128
    for each in (rule, resumed):
        each.fetched([(3, pair(1.0, 70.0)), (4, pair(-8.0, 90.0))])
    assert resumed.state() == rule.state() and again.batch(4) == of.batch(4) == 128  # infinite


def test_a_constant_batch_has_no_state() -> None:
    of = resolve(tiny.digits(), 256)
    rule = observer(of)
    rule.fetched([(1, pair(1.0, 2.0))])
    assert rule.state() is None
    rule.restore(None)


def test_a_checkpoint_of_another_path() -> None:
    rule = observer(resolve(ramp(), 256))
    rule.restore({"step": 5, "pieces": [[0, 16], [4, 32]]})
    with pytest.raises(UserError, match=r"\[\[0, 16\], \[4, 32\]\] up to update 5, and the check"):
        rule.restore({"step": 5, "pieces": [[0, 16], [3, 32]]})
    with pytest.raises(UserError, match="was trained with None"):
        rule.restore(None)
    rule.fetched([(8, {})])
    saved = rule.state()
    assert saved is not None and saved["pieces"] == [[0, 16], [4, 32], [8, 128]]

"""Formulas of schedules, batch sizes, rules and optimizers, at values that are computed by hand."""

import numpy as np
import pytest

from lamb_tpu.config import base_config
from lamb_tpu.spec import flatten, parse
from tests import tiny
from tests.fuzz import textbook


def rates(**changes: object) -> list[float]:
    values = {key.replace("__", "."): value for key, value in changes.items()}
    keys = flatten(parse(tiny.change(base_config(), {"batch_size": 16, **values})))
    schedule = textbook.schedule(keys, 1.0, 40, 4)
    return [round(schedule(update), 6) for update in range(4)]


def test_schedules() -> None:
    assert rates() == [1.0, 1.0, 1.0, 1.0]
    assert rates(schedule__warmup="2 steps") == [0.0, 0.5, 1.0, 1.0]
    assert rates(schedule__warmup="2 steps", schedule__first_step=1) == [0.5, 1.0, 1.0, 1.0]
    assert rates(schedule__decay="polynomial") == [1.0, 0.75, 0.5, 0.25]
    assert rates(schedule__decay="cosine")[2] == 0.5
    half = {"schedule__decay_factor": 0.5}
    steps = {"schedule__boundaries": "1 steps, 48 examples", "schedule__decay_from": "zero"}
    assert rates(schedule__decay="step", **half, **steps) == [1.0, 0.5, 0.5, 0.25]
    every = {"schedule__decay_every": "2 steps"}
    assert rates(schedule__decay="exponential", **half, **every) == [1.0, 1.0, 0.5, 0.5]
    # Twice the base batch: LEGW multiplies the rate by the root of 2, and keeps the warm-up's updates.
    legw = {"schedule__scaling": "legw", "schedule__base_batch_size": 8}
    assert rates(schedule__warmup="2 steps", **legw) == [0.0, 0.707107, 1.414214, 1.414214]


def test_batch_sizes() -> None:
    assert textbook.batch_sizes(None, 16, 64) == [16] * 4
    rule = {"points": [[0, 16], [16, 32]], "scaling": "linear"}
    assert textbook.batch_sizes(rule, 16, 64) == [16, 32, 16]
    assert textbook.rates(rule, lambda t: t + 1, [0, 1, 3], [16, 32, 16]) == [1, 4, 4]


def test_rules() -> None:
    assert textbook.decays_and_adapts("all", "dense/bias") == (True, True)
    assert textbook.decays_and_adapts("no_bias_no_norm", "norm0/scale") == (False, False)
    assert textbook.decays_and_adapts("no_bias_no_norm_decay", "dense/bias") == (False, True)
    assert textbook.decays_and_adapts("resnet", "dense/bias") == (True, True)
    assert textbook.decays_and_adapts("resnet", "norm0/bias") == (False, False)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"name": "sgd"}, [2.7, 3.6]),
        ({"name": "sgd", "clip_global_norm": 2.5}, [2.85, 3.8]),
        ({"name": "sgd", "weight_decay": 1.0}, [2.4, 3.2]),
        ({"name": "adamw", "weight_decay": 0.0}, [2.9, 3.9]),
        ({"name": "lion", "weight_decay": 1.0}, [2.6, 3.5]),
        # The direction is (1, 1) and the ratio 5 / sqrt(2).
        ({"name": "lamb", "weight_decay": 0.0}, [3 - 0.353553, 4 - 0.353553]),
    ],
)
def test_first_step(fields: dict[str, object], expected: list[float]) -> None:
    params, grads = {"kernel": np.array([3.0, 4.0])}, {"kernel": np.array([3.0, 4.0])}
    made = textbook.Optimizer({"rules": "all", **fields}, [0.1], False)
    np.testing.assert_allclose(made.step(params, grads)["kernel"], expected, rtol=1e-6)


def test_layers_of_a_stack_have_separate_norms() -> None:
    value = np.array([[3.0, 4.0], [6.0, 8.0]])
    assert textbook.layers("encoder/layers/kernel", value, True).ravel().tolist() == [5.0, 10.0]
    assert textbook.layers("pooler/kernel", value, True).size == 1


def test_averages() -> None:
    one = np.float64(1)
    assert textbook.averaged(0 * one, one, 0.9, 0) == pytest.approx(0.9)
    assert textbook.averaged(0 * one, one, 0.05, 0) == pytest.approx(0.95)

"""The metric that is compared: of the flag, of the config, or the usual one of the task."""

from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.run import metric

BEST = {"checkpoint.best": "auc", "checkpoint.best_mode": "max"}
TARGET = {"target.metric": "steps_loss", "target.mode": "max"}
NAMES = ("loss", "accuracy", "auc", "steps_loss")


@pytest.mark.parametrize(
    "config, names, flags, found",
    [
        ({}, ("loss", "accuracy"), (None, None), ("accuracy", "higher")),
        ({}, ("exact_match", "f1"), (None, None), ("f1", "higher")),
        ({}, ("mlm_accuracy", "mlm_loss", "nsp_loss"), (None, None), ("mlm_loss", "lower")),
        ({}, ("accuracy", "loss", "perplexity"), (None, None), ("perplexity", "lower")),
        ({}, NAMES, ("loss", None), ("loss", "lower")),
        ({}, NAMES, ("loss", "higher"), ("loss", "higher")),
        ({"checkpoint.best": "", "target.metric": ""}, NAMES, (None, None), ("accuracy", "higher")),
        (BEST | TARGET, NAMES, (None, None), ("auc", "higher")),
        (TARGET, NAMES, (None, None), ("steps_loss", "higher")),
        (BEST | {"checkpoint.best_mode": "min"}, NAMES, (None, None), ("auc", "lower")),
        (BEST, NAMES, ("accuracy", None), ("accuracy", "higher")),
    ],
)
def test_choice(config: Any, names: Any, flags: Any, found: tuple[str, str]) -> None:
    assert metric.choose(config, names, *flags) == found


def test_mistakes() -> None:
    with pytest.raises(UserError, match="--metric is 'acc'; the evaluation's metrics are: auc, "):
        metric.choose({}, ("auc", "loss"), "acc")
    with pytest.raises(UserError, match="--metric is missing; .* are: auc, rank"):
        metric.choose({}, ("rank", "auc"))

"""The metric to compare: from the flag, the config, or the task."""

from typing import Any

import pytest

from lamb_tpu.run import metric
from tests.raising import rejected

BEST = {"checkpoint.best": "auc", "checkpoint.best_mode": "max"}
TARGET = {"target.metric": "steps_loss", "target.mode": "max"}
NAMES = ("loss", "accuracy", "auc", "steps_loss")


@pytest.mark.parametrize(
    "config, names, flags, expected",
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
def test_choice(config: Any, names: Any, flags: Any, expected: tuple[str, str]) -> None:
    assert metric.choose(config, names, *flags) == expected


def test_errors() -> None:
    with rejected("--metric", "acc", "is unknown", "use auc or loss"):
        metric.choose({}, ("auc", "loss"), "acc")
    with rejected("--metric", problem="is missing", remedy="use auc or rank"):
        metric.choose({}, ("rank", "auc"))


@pytest.mark.parametrize(
    "task, decay, key, is_known",
    [
        ("classification", 0.0, "accuracy", True),
        ("classification", 0.0, "bleu", False),
        ("classification", 0.0, "ema_accuracy", False),
        ("classification", 0.9, "ema_accuracy", True),
        ("question_answering", 0.0, "f1", True),
        ("masked_lm", 0.0, "nsp_loss", True),
        ("language_model", 0.0, metric.RATE, True),
        ("my_module:Task", 0.0, "anything", True),
    ],
)
def test_what_a_task_measures(task: str, decay: float, key: str, is_known: bool) -> None:
    reason = metric.unknown({"task.name": task, "ema.decay": decay}, key)
    assert (reason == "") is is_known
    assert is_known or f"the task {task!r} does not measure; use one of loss, accuracy" in reason

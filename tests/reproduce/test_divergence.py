"""Diverged runs: runs that ended early, and runs at chance level."""

import doctest

import pytest
from msgspec.structs import replace

from lamb_tpu.reproduce import divergence
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.tables import Metric
from tests.reproduce.papers import record

ACCURACY = Metric("accuracy", "accuracy, %", 1, factor=100.0, chance=0.1)
LOSS = Metric("loss", "loss", 3, better="lower", chance=2.3026)


def test_examples() -> None:
    assert doctest.testmod(divergence).failed == 0


@pytest.mark.parametrize(
    ("accuracy", "output"),
    [
        (0.984, "98.4"),
        (0.191, "19.1"),
        (0.19, "19.0 (diverged)"),
        (0.1135, "11.3 (diverged)"),
        (0.0, "0.0 (diverged)"),
        (None, "diverged"),
    ],
)
def test_accuracy(accuracy: float | None, output: str) -> None:
    run = record("lamb", 0, accuracy)
    assert divergence.text(run, ACCURACY) == output
    value = divergence.value(run, ACCURACY)
    assert (value is None) == ("diverged" in output)
    # Without a chance level, only the run that ended early diverged.
    assert (divergence.value(run, replace(ACCURACY, chance=None)) is None) == (accuracy is None)


def test_loss() -> None:
    run = record("lamb", 0, 0.5)
    for loss, output in ((2.3, "2.300"), (2.3026, "2.303 (diverged)"), (17.0, "17.000 (diverged)")):
        run["values"]["loss"] = loss
        assert divergence.text(run, LOSS) == output


def test_the_criterion_has_the_numbers() -> None:
    assert divergence.criterion(ACCURACY) == (
        "A run counts as diverged if it ended with a loss or metric that is not finite, or if "
        "its last accuracy is 19 % or less; a random guess has 10 %."
    )
    assert divergence.criterion(LOSS).endswith("last loss is 2.3026 or more, like a random guess.")
    assert divergence.criterion(replace(LOSS, chance=None)).endswith("metric that is not finite.")


def test_every_shipped_metric_that_a_guess_has_says_what_that_is() -> None:
    for table in load_all(folder()).values():
        for scale in table.measured_scales():
            metric = scale.metric
            if any(word in metric.key for word in ("accuracy", "loss", "perplexity")):
                assert metric.chance is not None, table.key

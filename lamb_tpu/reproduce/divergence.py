"""The criterion for diverged runs, which the pages state.

A run has diverged if training ended early because a loss or metric was not finite. If the table gives
`Metric.chance`, a run has also diverged if its last evaluation is hardly better than guessing. A mean over
successful and failed runs measures nothing, so pages exclude diverged runs from means and count them.
"""

from collections.abc import Mapping
from typing import Any

from lamb_tpu.reproduce.tables import Metric


def limit(metric: Metric) -> float | None:
    """Returns the value at or beyond which a run has diverged; None if `chance` is unknown.

    For an accuracy the limit is above `chance`, because a network that always predicts the same class
    can pick the most frequent class: the limit is twice `chance`, but at most a tenth of the way from
    `chance` to 1. For a loss or perplexity the limit is `chance`. Limits are in the unit of the records.

    >>> limit(Metric("accuracy", "", chance=0.1)), limit(Metric("accuracy", "", chance=0.5))
    (0.19, 0.55)
    >>> limit(Metric("perplexity", "", better="lower", chance=10_000))
    10000
    """
    if metric.chance is None or metric.better == "lower":
        return metric.chance
    return round(metric.chance + min(metric.chance, (1 - metric.chance) / 10), 12)


def value(record: Mapping[str, Any], metric: Metric) -> float | None:
    """Returns a run's metric in the published unit; None if the run diverged."""
    if record["values"] is None:
        return None
    number, worst = record["values"][metric.key], limit(metric)
    if worst is not None and (number <= worst if metric.better == "higher" else number >= worst):
        return None
    return float(metric.factor * number)


def text(record: Mapping[str, Any], metric: Metric) -> str:
    """Formats a run's metric, such as '0.9840', '0.1135 (diverged)' or 'diverged'."""
    if record["values"] is None:
        return "diverged"
    number = f"{metric.factor * record['values'][metric.key]:.{metric.digits}f}"
    return number if value(record, metric) is not None else f"{number} (diverged)"


def criterion(metric: Metric) -> str:
    """Returns the criterion as a sentence, with the limits of the metric."""
    ended = "A run counts as diverged if it ended with a loss or metric that is not finite"
    worst = limit(metric)
    if worst is None:
        return f"{ended}."
    assert metric.chance is not None
    name = metric.label.removesuffix(", %")
    unit = "" if name == metric.label else " %"
    end, guess = (f"{metric.factor * number:.5g}{unit}" for number in (worst, metric.chance))
    side = "or less" if metric.better == "higher" else "or more"
    if end == guess:
        return f"{ended}, or if its last {name} is {guess} {side}, like a random guess."
    return f"{ended}, or if its last {name} is {end} {side}; a random guess has {guess}."

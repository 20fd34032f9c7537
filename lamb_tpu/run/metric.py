"""The metric by which runs are compared, and whether higher or lower values are better."""

from collections.abc import Collection, Mapping
from typing import Any

from lamb_tpu import errors, tasks
from lamb_tpu.errors import ABSENT, UserError, listed

# The main metrics of the shipped tasks and of most custom tasks; the first that was measured is used.
_MAIN = ("perplexity", "accuracy", "f1", "mlm_loss", "loss")
_LOWER = ("loss", "error", "perplexity")
RATE = "examples_per_second"  # a key of training records, and a metric in tables
# Fields of a run's records that are not metrics.
_RECORDED = ("step", "kind", "epoch", "seconds", "seconds_with_startup", "examples", "batch_size")
_BETTER = {"max": "higher", "min": "lower"}


def not_measured(key: str) -> str:
    """Returns why a name cannot be a metric, as the end of a sentence; '' if it can."""
    if key not in _RECORDED:
        return ""
    return f"a field of every record, not a metric; give a metric such as {', '.join(_MAIN[1:])}"


def unknown(config: Mapping[str, Any], key: str) -> str:
    """Returns why evaluations will lack a metric, as the end of a sentence; '' if they may have it."""
    task = config["task.name"]
    names = tasks.declared_metrics(task)
    if names is None or key in (RATE, *names):
        return ""
    averages = tuple(f"ema_{name}" for name in names) if config["ema.decay"] else ()
    if key in averages:
        return ""
    return f"which the task {task!r} does not measure; use one of {', '.join(names + averages)}"


def choose(
    config: Mapping[str, Any],
    names: Collection[str],
    key: str | None = None,
    better: str | None = None,
) -> tuple[str, str]:
    """Returns the metric to compare and whether 'higher' or 'lower' values are better.

    Without `key`, takes the first of these that is in `names`: config.checkpoint.best,
    config.target.metric, the main metrics of the tasks. Without `better`, uses the mode that the
    config sets for this metric. If the config sets none, lower is better for metrics whose name ends
    in loss, error or perplexity.
    """
    modes = {
        config.get("target.metric"): config.get("target.mode"),
        config.get("checkpoint.best"): config.get("checkpoint.best_mode"),
    }
    if key is None:
        wanted = (config.get("checkpoint.best"), config.get("target.metric"), *_MAIN)
        key = next((name for name in wanted if name in names), None)
        if key is None:
            raise UserError("--metric", ABSENT, "is missing", f"use {listed(sorted(names))}")
    if key not in names:
        raise errors.unknown("--metric", key, sorted(names))
    if better is None:
        by_name = "lower" if key.endswith(_LOWER) else "higher"
        better = _BETTER.get(str(modes.get(key)), by_name)
    return key, better

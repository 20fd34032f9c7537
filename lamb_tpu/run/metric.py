"""The metric by which runs are compared, and whether higher or lower values are better."""

from collections.abc import Collection, Mapping
from typing import Any

from lamb_tpu.errors import UserError

# The main metrics of the shipped tasks, and of most others.
_MAIN = ("perplexity", "accuracy", "f1", "mlm_loss", "loss")
_LOWER = ("loss", "error", "perplexity")
_BETTER = {"max": "higher", "min": "lower"}


def choose(
    config: Mapping[str, Any],
    names: Collection[str],
    key: str | None = None,
    better: str | None = None,
) -> tuple[str, str]:
    """Returns a metric of the evaluation, and 'higher' or 'lower'.

    Without `key` it is the metric of config.checkpoint.best, that of config.target, or the main
    metric of the task. Without `better` these keys of the config decide, or else the name: of a
    loss, an error and a perplexity lower values are better.

    Args:
      config: the flattened config of a run.
      names: the metrics of its evaluation.
      key: value of --metric.
      better: value of --better.

    Raises:
      UserError: the evaluation has no such metric, or none of the known ones.
    """
    modes = {
        config.get("target.metric"): config.get("target.mode"),
        config.get("checkpoint.best"): config.get("checkpoint.best_mode"),
    }
    known = ", ".join(sorted(names))
    if key is None:
        wanted = (config.get("checkpoint.best"), config.get("target.metric"), *_MAIN)
        key = next((name for name in wanted if name in names), None)
        if key is None:
            raise UserError(f"--metric is missing; the evaluation's metrics are: {known}")
    if key not in names:
        raise UserError(f"--metric is {key!r}; the evaluation's metrics are: {known}")
    if better is None:
        by_name = "lower" if key.endswith(_LOWER) else "higher"
        better = _BETTER.get(str(modes.get(key)), by_name)
    return key, better

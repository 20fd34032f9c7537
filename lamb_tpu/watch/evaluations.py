"""Evaluations with a metric that is not finite, which end a run as diverged."""

from collections.abc import Callable, Mapping

from lamb_tpu.store.metrics import nonfinite
from lamb_tpu.watch.guards import Diverged
from lamb_tpu.watch.observer import Observer, Start


class Evaluations(Observer):
    """Ends a run after an evaluation with a metric that is not finite, before its state is saved.

    It comes after the observers that write and show the evaluation, and before those to which it
    must not count.

    Args:
      allowed: whether to warn only: `config.guards.allow_nonfinite_eval`.
      warn: prints a line even in a quiet run.
    """

    def __init__(self, allowed: bool, warn: Callable[[str], None]) -> None:
        self._allowed, self._warn = allowed, warn

    def started(self, start: Start) -> None:
        self._start = start

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks the metrics of an evaluation.

        Raises:
          Diverged: one is not finite.
        """
        check_finite(
            f"the evaluation after update {step}",
            metrics,
            self._allowed,
            self._warn,
            self._start.last_checkpoint,
        )


def check_finite(
    what: str,
    metrics: Mapping[str, float],
    allowed: bool,
    warn: Callable[[str], None],
    last_checkpoint: Callable[[], str] | None = None,
) -> None:
    """Reports metrics that are not finite.

    Args:
      what: the evaluation, for messages.
      metrics: its metrics.
      allowed: whether to warn only.
      warn: prints a line.
      last_checkpoint: returns the path of the newest checkpoint; None for an evaluation alone.

    Raises:
      Diverged: there are such metrics, and they are not allowed.
    """
    found = nonfinite(metrics)
    if not found:
        return
    listed = ", ".join(f"{name} {value}" for name, value in found.items())
    if allowed:
        warn(f"{what} is not finite: {listed}; config.guards.allow_nonfinite_eval is True")
        return
    saved = f"; the last checkpoint is {last_checkpoint()}" if last_checkpoint else ""
    raise Diverged(
        f"{what} is not finite: {listed}{saved}. Check the data of config.data.eval_split and, in "
        "a new --workdir, try a lower config.optimizer.learning_rate; to accept such evaluations, "
        "set config.guards.allow_nonfinite_eval=True"
    )

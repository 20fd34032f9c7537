"""Ends a run as diverged if a metric of an evaluation is not finite."""

from collections.abc import Callable, Mapping

from lamb_tpu.store.metrics import nonfinite
from lamb_tpu.watch.guards import Diverged
from lamb_tpu.watch.observer import Observer, Start


class Evaluations(Observer):
    """Ends a run after an evaluation with a non-finite metric, before the state is saved.

    In the list of observers, it comes after the observers that write and show the evaluation, and
    before those that must ignore such an evaluation. See `check_finite` for the arguments.
    """

    def __init__(self, allowed: bool, warn: Callable[[str], None]) -> None:
        self._allowed, self._warn = allowed, warn

    def started(self, start: Start) -> None:
        self._start = start

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        what = f"the evaluation after update {step}"
        check_finite(what, metrics, self._allowed, self._warn, self._start.last_checkpoint)


def check_finite(
    what: str,
    metrics: Mapping[str, float],
    allowed: bool,
    warn: Callable[[str], None],
    last_checkpoint: Callable[[], str] | None = None,
) -> None:
    """Raises Diverged if metrics are not finite; if `allowed`, only warns.

    Args:
      what: name of the evaluation, for messages.
      metrics: the evaluation's metrics.
      allowed: `config.guards.allow_nonfinite_eval`.
      warn: prints a line even in a quiet run.
      last_checkpoint: returns the path of the newest checkpoint; None outside of a training run.
    """
    invalid = nonfinite(metrics)
    if not invalid:
        return
    listed = ", ".join(f"{name} {value}" for name, value in invalid.items())
    if allowed:
        warn(f"{what} is not finite: {listed}; config.guards.allow_nonfinite_eval is True")
        return
    saved = f"the last checkpoint is {last_checkpoint()}. Check" if last_checkpoint else "check"
    raise Diverged(
        what,
        ...,
        f"is not finite: {listed}",
        f"{saved} the data of config.data.eval_split and, in a new --workdir, try a lower "
        "config.optimizer.learning_rate; to accept such evaluations, set "
        "config.guards.allow_nonfinite_eval=True",
    )

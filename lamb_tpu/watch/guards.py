"""Guards against non-finite losses and norms, skipped updates and loss spikes."""

import collections
import math
import statistics
from collections.abc import Callable, Iterable

from lamb_tpu import spec_keys
from lamb_tpu.errors import UserError
from lamb_tpu.watch.observer import Observer, Record, Start, Sums

# Number of losses that count as recent, and number of losses needed before a spike is reported.
_WINDOW, _ENOUGH = 100, 20


class Diverged(UserError):
    """A loss, a norm, a gradient or an evaluation metric is not finite."""


class SpikeDetector:
    """Detects losses far above the recent losses.

    A spike exceeds `factor` times the median of the recent losses. Two more conditions avoid false
    reports when the loss is small, as on a memorised training set. On such a set, one batch in six
    can have three times the median loss, so a spike must exceed all recent losses. A single
    misclassified example can cost a hundred times the median, so a spike must also exceed `floor`.

    Args:
      factor: see above; 0 disables the detector.
      floor: lower bound of a spike, in the unit of the loss.
      window: number of recent losses.
      enough: number of recent losses needed before a spike is reported.
    """

    def __init__(
        self, factor: float, floor: float = 0.0, window: int = _WINDOW, enough: int = _ENOUGH
    ) -> None:
        self._factor, self._floor, self._enough = factor, floor, enough
        self.recent: collections.deque[float] = collections.deque(maxlen=window)

    def observe(self, loss: float) -> float | None:
        """Adds a loss; if it is a spike, returns the median of the losses before it, else None.

        A spike is also added to the recent losses. A non-finite loss is ignored. If the median is
        not positive, there is no spike.
        """
        if not self._factor or not math.isfinite(loss):
            return None
        before = list(self.recent)
        self.recent.append(loss)
        if len(before) < self._enough or loss <= max(self._floor, *before):
            return None
        median = statistics.median(before)
        return median if 0 < self._factor * median < loss else None


class Guards(Observer):
    """Checks the metrics of every update when they are fetched from the devices for a record.

    Args:
      settings: `config.guards`.
      rate: returns the learning rate of an update, for messages; see `Recipe.rate`.
      warn: prints a line even in a quiet run.
      report: prints a line.
      examine: raises a UserError if the batch of an update (counted from 1) may be the cause of a
        non-finite number.
    """

    name = "guards"

    def __init__(
        self,
        settings: spec_keys.Guards,
        rate: Callable[[int], float],
        warn: Callable[[str], None],
        report: Callable[[str], None],
        examine: Callable[[int], None] = lambda update: None,
    ) -> None:
        self._limit = settings.max_skipped
        self._spikes = SpikeDetector(settings.spike_factor, settings.spike_floor)
        self._rate = rate
        self._warn, self._report, self._examine = warn, report, examine
        self.skipped = 0

    def state(self) -> list[float]:
        return list(self._spikes.recent)

    def restore(self, state: Iterable[float]) -> None:
        self._spikes.recent.extend(state)

    def started(self, start: Start) -> None:
        self._start = start
        # The train state also counts the updates that earlier starts skipped.
        self.skipped = int(start.state.skipped)

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Checks the metrics of updates; a skipped update has the sum and weight (1, 1) as `skipped`.

        Raises:
          Diverged: a metric is not finite, or too many updates were skipped.
          UserError: in the same cases, if a value in the update's batch may be the cause.
        """
        for step, sums in updates:
            # All other metrics of a skipped update are (0, 0), so they pass this check.
            for name, (total, _) in sums.items():
                if not math.isfinite(total):
                    self._end(f"{name} became {float(total)} at update {step}", step)
            if sums.get("skipped", (0, 0))[0]:
                self._count(step)
                continue
            total, weight = sums["loss"]
            loss = float(total) / float(weight)
            median = self._spikes.observe(loss)
            if median is not None:
                self._start.records.write(step, "spike", {"loss": loss, "median": median})
                self._report(
                    f"update {step}: loss spike of {loss:.4g}, the recent median is {median:.4g}"
                )

    def recorded(self, record: Record) -> None:
        """Replaces the mean of `skipped` by the number of updates that the run has skipped so far."""
        if "skipped" in record.values:
            record.values["skipped"] = self.skipped

    def _count(self, step: int) -> None:
        self.skipped += 1
        if self.skipped > self._limit:
            self._end(
                f"the gradient is not finite at update {step}: {self.skipped} skipped so far, and "
                f"config.guards.max_skipped is {self._limit}",
                step,
            )
        cause = self._cause(step)
        self._warn(
            f"update {step} is skipped, because its gradient is not finite: {self.skipped} skipped "
            f"so far, and config.guards.max_skipped is {self._limit}"
            + (f"; {cause}" if cause else "")
        )

    def _cause(self, step: int) -> str:
        """Returns the error in the batch of an update; '' if there is none."""
        try:
            self._examine(step)
        except UserError as error:
            return str(error)
        return ""

    def _end(self, what: str, step: int) -> None:
        if cause := self._cause(step):
            remedy = f"the last checkpoint is {self._start.last_checkpoint()}"
            raise UserError(what, ..., f", and its batch may be the cause: {cause}", remedy)
        # The state of an optimizer with one-bit momentum has further advice as `remedy`.
        remedy = getattr(self._start.state.opt_state, "remedy", "")
        remedy += ", " if remedy else ""
        raise Diverged(
            what,
            ...,
            f"(learning rate {self._rate(step - 1):.4g})",
            f"the last checkpoint is {self._start.last_checkpoint()}. Try, in a new --workdir, "
            f"{remedy}a lower config.optimizer.learning_rate, a longer config.schedule.warmup or "
            "config.optimizer.clip_global_norm",
        )

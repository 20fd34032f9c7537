"""Guards against losses and norms that are not finite, skipped updates and loss spikes.

Every update's numbers are checked, at the time when they are fetched for the log.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable

from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.watch.observer import Observer, Record, Start, Sums

# The number of losses that count as recent, and the number needed before a spike is reported.
_WINDOW, _ENOUGH = 100, 20


class Diverged(UserError):
    """The loss, the gradient or the parameters are no longer finite."""


class SpikeDetector:
    """Detects losses far above the recent ones.

    A spike exceeds `factor` times the median of the recent losses. Two more conditions avoid false
    reports when the loss is small, as on a memorised training set. There one batch in six can have
    three times the median, so a spike must exceed all recent losses. A single wrong example can
    cost a hundred times the median, so a spike must exceed `floor`.

    Args:
      factor: see above; 0 disables the detector.
      floor: lower bound of a spike, in the unit of the loss.
      window: number of losses that count as recent.
      enough: number of recent losses needed before a spike is reported.

    Attributes:
      recent: the recent losses.
    """

    def __init__(
        self, factor: float, floor: float = 0.0, window: int = _WINDOW, enough: int = _ENOUGH
    ) -> None:
        self._factor, self._floor, self._enough = factor, floor, enough
        self.recent: collections.deque[float] = collections.deque(maxlen=window)

    def observe(self, loss: float) -> float | None:
        """Adds a loss; returns the median of the losses before it if it is a spike, else None.

        A spike becomes one of the recent losses. A non-finite loss is ignored. There is no spike
        above a median that is not positive.
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
    """Checks the numbers of every update of a run.

    Args:
      config: `config.guards`.
      rate: returns the learning rate of an update, see `Recipe.rate`, for messages.
      warn: prints a line even in a quiet run.
      tell: prints a line.
      examine: raises a UserError if the batch of an update, counted from 1, may be the cause of a
        number that is not finite.
    """

    name = "guards"

    def __init__(
        self,
        config: ConfigDict,
        rate: Callable[[int], float],
        warn: Callable[[str], None],
        tell: Callable[[str], None],
        examine: Callable[[int], None] = lambda update: None,
    ) -> None:
        self._limit = config.max_skipped
        self._spikes = SpikeDetector(config.spike_factor, config.spike_floor)
        self._rate = rate
        self._warn, self._tell, self._examine = warn, tell, examine
        self.skipped = 0

    def state(self) -> list[float]:
        """Returns the recent losses."""
        return list(self._spikes.recent)

    def restore(self, state: Iterable[float]) -> None:
        """Continues with the recent losses of the previous start."""
        self._spikes.recent.extend(state)

    def started(self, start: Start) -> None:
        self._start = start
        # The state of the run counts the skipped updates of earlier starts too.
        self.skipped = int(start.state.skipped)

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Checks some updates, in order.

        Args:
          updates: number of each update, counted from 1, and its metrics as sums and weights. If
            updates may be skipped, `skipped` is among the metrics: (1, 1) for a skipped update.

        Raises:
          Diverged: a number is not finite, or too many updates were skipped.
          UserError: the same, and a value of the update's batch may be the cause.
        """
        for step, sums in updates:
            # The metrics of a skipped update are pairs of 0, so they pass.
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
                self._tell(
                    f"update {step}: loss spike of {loss:.4g}, the recent median is {median:.4g}"
                )

    def recorded(self, record: Record) -> None:
        """Replaces the mean of `skipped` by the count over the whole run."""
        if "skipped" in record.values:
            record.values["skipped"] = self.skipped

    def _count(self, step: int) -> None:
        self.skipped += 1
        if self.skipped > self._limit:
            self._end(
                f"the gradient is not finite at update {step}; {self.skipped} updates were left "
                f"out for that, and config.guards.max_skipped is {self._limit}",
                step,
            )
        cause = self._cause(step)
        self._warn(
            f"update {step} is left out, its gradient is not finite: {self.skipped} left out, and "
            f"config.guards.max_skipped is {self._limit}" + (f"; {cause}" if cause else "")
        )

    def _cause(self, step: int) -> str:
        """Returns what is wrong with the batch of an update; '' for nothing."""
        try:
            self._examine(step)
        except UserError as error:
            return str(error)
        return ""

    def _end(self, what: str, step: int) -> None:
        if cause := self._cause(step):
            raise UserError(
                f"{what}, and its batch may be the cause: {cause}; the last checkpoint is "
                f"{self._start.last_checkpoint()}"
            )
        # The states of optimizers that send momentum in one bit have advice.
        remedy = getattr(self._start.state.opt_state, "remedy", "")
        remedy += ", " if remedy else ""
        raise Diverged(
            f"{what}, at the learning rate {self._rate(step - 1):.4g}; the last "
            f"checkpoint is {self._start.last_checkpoint()}. Try, in a new --workdir, "
            f"{remedy}a lower config.optimizer.learning_rate, a longer config.schedule.warmup or "
            "config.optimizer.clip_global_norm"
        )

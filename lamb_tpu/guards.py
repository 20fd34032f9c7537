"""What the host watches over: losses and norms that are not finite, updates left out, loss spikes.

The numbers are those of every update, looked at when they are fetched for the log.
"""

import collections
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError

# How many losses are recent, and how many there must be before anything is unusual.
_WINDOW, _ENOUGH = 100, 20

Sums = Mapping[str, tuple[float, float]]


class Diverged(UserError):
    """The loss, the gradient or the parameters are no longer finite."""


class SpikeDetector:
    """Tells when a loss is far above the recent ones.

    Two more conditions are for a small loss, as on a training set that is learnt by heart. There
    one batch in six can be three times the median, so a spike is above all of the recent losses.
    And a single example that is wrong can be a hundred times the median, so it is above a floor.

    Args:
      factor: a loss above this many times the median of the recent ones, above all of them and
        above the floor is a spike; 0: none is.
      floor: in the loss's own unit.
      window: how many losses are recent.
      enough: how many of them there must be before anything counts as a spike.

    Attributes:
      recent: those losses.
    """

    def __init__(
        self, factor: float, floor: float = 0.0, window: int = _WINDOW, enough: int = _ENOUGH
    ) -> None:
        self._factor, self._floor, self._enough = factor, floor, enough
        self.recent: collections.deque[float] = collections.deque(maxlen=window)

    def observe(self, loss: float) -> float | None:
        """The median of the losses before, where this one is a spike; else None.

        A spike is one of the recent losses afterwards. A loss that is not finite counts for
        nothing, and above a median that is not positive nothing is a spike.
        """
        if not self._factor or not math.isfinite(loss):
            return None
        before = list(self.recent)
        self.recent.append(loss)
        if len(before) < self._enough or loss <= max(self._floor, *before):
            return None
        median = statistics.median(before)
        return median if 0 < self._factor * median < loss else None


class Guards:
    """Looks at the numbers of every update of a run.

    Args:
      config: `config.guards`.
      learning_rates: of every update, for messages.
      skipped: updates left out before, `TrainState.skipped` of the restored state.
      last_checkpoint: its path, or that there is none; asked when the run is to end.
      warn: shows a line.
    """

    def __init__(
        self,
        config: ConfigDict,
        learning_rates: Sequence[float] | np.ndarray,
        skipped: int,
        last_checkpoint: Callable[[], str],
        warn: Callable[[str], None],
    ) -> None:
        self._limit = config.max_skipped
        self._spikes = SpikeDetector(config.spike_factor, config.spike_floor)
        self._learning_rates = learning_rates
        self._last_checkpoint = last_checkpoint
        self._warn = warn
        self.skipped = skipped

    def state(self) -> list[float]:
        """The recent losses, for `restore` in a resumed run."""
        return list(self._spikes.recent)

    def restore(self, state: Iterable[float]) -> None:
        """Goes on from the recent losses of the run before."""
        self._spikes.recent.extend(state)

    def look(self, updates: Iterable[tuple[int, Sums]]) -> dict[int, dict[str, float]]:
        """Goes through some updates, in order.

        Args:
          updates: of each its number, counted from 1, and its metrics as sums and weights, with
            `skipped` among them where updates may be left out: (1, 1) for one that was.

        Returns:
          For the update of each loss spike its `loss` and the recent `median`.

        Raises:
          Diverged: a number is not finite, or more updates were left out than may be.
        """
        spikes = {}
        for step, sums in updates:
            for name, (total, _) in sums.items():
                if not math.isfinite(total):
                    self._end(f"{name} became {float(total)} at update {step}", step)
            if sums.get("skipped", (0, 0))[0]:
                self._count(step)
                continue
            loss, weight = sums["loss"]
            median = self._spikes.observe(float(loss) / float(weight))
            if median is not None:
                spikes[step] = {"loss": float(loss) / float(weight), "median": median}
        return spikes

    def _count(self, step: int) -> None:
        self.skipped += 1
        if self.skipped > self._limit:
            self._end(
                f"the gradient is not finite at update {step}; {self.skipped} updates were left "
                f"out for that, and config.guards.max_skipped is {self._limit}",
                step,
            )
        self._warn(
            f"update {step} is left out, its gradient is not finite: {self.skipped} left out, and "
            f"config.guards.max_skipped is {self._limit}"
        )

    def _end(self, what: str, step: int) -> None:
        raise Diverged(
            f"{what}, at the learning rate {self._learning_rates[step - 1]:.4g}; the last "
            f"checkpoint is {self._last_checkpoint()}. Try, in a new --workdir, a lower "
            "config.optimizer.learning_rate, a longer config.schedule.warmup or "
            "config.optimizer.clip_global_norm"
        )

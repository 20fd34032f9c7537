"""Progress of a run: a bar on a terminal, and plain lines otherwise."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from lamb_tpu import terminal
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.run.recipe import CurrentRecipe, Recipe
from lamb_tpu.watch.observer import Observer, Record, Start

_SECONDS_BETWEEN_LINES = 10.0


def format_values(values: Mapping[str, float]) -> str:
    """Formats metrics as 'loss 0.1234, accuracy 0.9876'."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def format_seconds(seconds: float) -> str:
    """Formats a duration as '1:02:03' or '2:03'."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(rate: float) -> str:
    """
    >>> _short(6126.4), _short(123_456), _short(582_541_057)
    ('6,126', '123k', '583M')
    """
    if rate < 1e5:
        return f"{rate:,.0f}"
    return f"{rate / 1e3:.0f}k" if rate < 1e6 else f"{rate / 1e6:,.3g}M"


class RunProgress(Observer):
    """Shows the progress of a run in updates, with the rate and the time left.

    If the batch changes, the bar counts examples, because updates take different times. The rate is
    the mean since the first update in this process, including evaluations and saves.

    Args:
      label: text before the bar.
      current: the run's recipe, with the batch sizes decided so far.
      shown: whether to print anything; False in every process except the first.
      quiet: whether to print only the bar on a terminal, and warnings.
      tokens: tokens in an update of the base batch, including padding; 0 shows the rate in examples.
      prefix: text before each message, to distinguish concurrent runs.
      beside: the RunProgress of a concurrent run that shows progress for both runs; or None.
    """

    def __init__(
        self,
        label: str,
        current: CurrentRecipe,
        shown: bool = True,
        quiet: bool = False,
        tokens: int = 0,
        prefix: str = "",
        beside: "RunProgress | None" = None,
    ) -> None:
        recipe = current.value
        self._current, self._prefix, self._beside = current, prefix, beside
        self._amount, self._unit = tokens or recipe.batch_size, "tokens" if tokens else "examples"
        self._shown, self._told = shown, shown and not quiet
        # soft_wrap keeps rich from breaking lines, which `terminal.fit` has done already.
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        if beside is not None:
            self._console = beside._console
        self._bar: Progress | None = None
        if shown and self._console.is_terminal and beside is None:
            wide = self._console.width >= 100
            fixed = Column(no_wrap=True)  # so that only the bar shrinks on a narrow terminal
            self._bar = Progress(
                TextColumn(label),
                BarColumn(bar_width=None),
                MofNCompleteColumn(table_column=fixed),
                TextColumn("{task.fields[rate]}"),
                TextColumn("{task.fields[values]}"),
                *([TimeElapsedColumn(table_column=fixed)] if wide else []),
                TextColumn("left"),
                TimeRemainingColumn(table_column=fixed),
                console=self._console,
                speed_estimate_period=1e9,  # by default rich forgets updates after 30 s
            )
            self._task = self._bar.add_task(
                label, total=self._done(recipe.total_steps), rate="", values=""
            )
        self._start: tuple[float, int] | None = None
        self._last_line = time.monotonic()

    @property
    def _recipe(self) -> Recipe:
        return self._current.value

    def started(self, start: Start) -> None:
        self._first, self._clock = start.step + 1, start.clock
        if self._bar:
            self._bar.start()

    def updated(self, step: int, state: TrainState) -> None:
        """After the first update, starts the clock for the rate and the time left."""
        if step != self._first:
            return
        seconds = self._clock.since_began
        self.message(f"first update after {seconds:.1f} s, reading data and compiling included")
        self._start = (time.monotonic(), step)
        # rich ignores the first value in its rate, so updates of earlier starts do not count.
        if self._bar:
            self._bar.update(self._task, completed=self._done(step))

    def recorded(self, record: Record) -> None:
        """Shows the latest metrics; the bar shows only `loss`."""
        if self._start is None or self._beside is not None or not (self._bar or self._told):
            return
        step, values = record.step, record.values
        began, first = self._start
        now = time.monotonic()
        # The rate is in updates of the base batch.
        place = self._recipe.place
        rate = (place(step) - place(first)) / (now - began) if now > began else 0.0
        if self._bar:
            speed = f"{_short(rate * self._amount)} {self._unit}/s" if rate else ""
            # More metrics would push the rate and the time out of 80 columns.
            loss = format_values({"loss": values["loss"]}) if "loss" in values else ""
            self._bar.update(self._task, completed=self._done(step), rate=speed, values=loss)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            pace = ""
            if rate:
                left = format_seconds((place(self._recipe.total_steps) - place(step)) / rate)
                pace = f"; {rate * self._amount:,.0f} {self._unit}/s, {left} left"
            # Later decisions of the batch rule change the number of updates.
            about = "~" if self._recipe.decides else ""
            self.message(
                f"update {step}/{about}{self._recipe.total_steps}: {format_values(values)}{pace}"
            )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        epoch = self._recipe.epoch(step)
        self.message(f"update {step} (epoch {epoch:.4g}): {format_values(metrics)}")

    def ended(self) -> None:
        if self._bar:
            self._bar.stop()

    def _done(self, step: int) -> int:
        return step if self._recipe.path is None else self._recipe.examples(step)

    def warn(self, text: str) -> None:
        """Prints a line even in a quiet run."""
        if self._shown:
            print(terminal.fit(self._prefix + text), file=sys.stderr)

    def message(self, text: str, of_all: bool = False) -> None:
        """Prints a line, without the prefix if it concerns all concurrent runs (`of_all`)."""
        if self._told:
            text = text if of_all else self._prefix + text
            # emoji=False, or text such as ':train:' would become an emoji.
            self._console.print(terminal.fit(text), markup=False, emoji=False)
            # Otherwise a file or pipe would receive nothing until the buffer is full.
            self._console.file.flush()

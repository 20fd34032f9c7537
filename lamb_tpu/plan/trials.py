"""Plans several configs, one after the other, with a progress bar on stderr."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lamb_tpu import terminal
from lamb_tpu.errors import UserError
from lamb_tpu.plan.making import make_plan, release
from lamb_tpu.plan.report import Plan
from lamb_tpu.plan.totals import Totals
from lamb_tpu.spec import Spec, flatten

# Period of rich's speed estimate: longer than all compilations, each of which may take minutes.
_MEMORY_SECONDS = 7 * 86_400.0


class Answer(NamedTuple):
    """Output of a command: text for the terminal, and a value for JSON."""

    text: str
    json: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of planning a config."""

    # The plan, without its program and its schedule; None if the config was rejected.
    plan: Plan | None
    # Time of a step: shortest, expected, longest; None if the step does not fit, or its program could
    # not be read.
    step_seconds: tuple[float, ...] | None = None
    totals: Totals | None = None  # times of the whole run; None if `step_seconds` is None
    error: UserError | None = None  # why the config was rejected; None if it was not

    @property
    def rejected(self) -> str:
        """The message of `error`; '' if the config was not rejected."""
        return str(self.error or "")

    @property
    def fits(self) -> bool:
        """True if the step fits into a device's memory; False for a rejected config."""
        return self.plan is not None and self.plan.fits

    @property
    def expected(self) -> float:
        """Expected time of a step in seconds; infinite if the step does not fit or the time is unknown."""
        return self.step_seconds[1] if self.fits and self.step_seconds else math.inf

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the columns in `HEAD`; for a rejected config only the word 'rejected'."""
        if self.plan is None:
            return ("rejected",)
        share = self.plan.share_of_memory
        return (
            "yes" if self.fits else "no",
            f"{100 * share:.3g} %" if share else "?",
            milliseconds(self.step_seconds) if self.fits else "",
        )

    def describe(self) -> str:
        """Formats the memory use and step time of a step that fits."""
        assert self.plan is not None
        share = self.plan.share_of_memory
        memory = f"{100 * share:.3g} % of memory, " if share else ""
        return f"{memory}{milliseconds(self.step_seconds)} ms a step"

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as a dict of JSON values; unknown numbers are None."""
        return {
            "rejected": self.rejected,
            "batch_size": self.plan and self.plan.batch_size,
            "fits": self.fits,
            "share_of_memory": self.plan and self.plan.share_of_memory,
            "step_milliseconds": self.step_seconds and [1e3 * each for each in self.step_seconds],
        }


HEAD = ("fits", "memory", "ms a step")
# Times of a run that no plan includes.
LEFT_OUT = "start-up, compiling on the pod, checkpoints, and waiting for the slowest chip"


class Trials:
    """Context manager that plans several configs, each once, and shows the progress.

    If a config is rejected, `make` does not raise, but returns a `Trial` with the error.

    Args:
      most: largest number of plans that will be requested.
      **how: keyword arguments of `make_plan`.
    """

    def __init__(self, most: int, **how: Any) -> None:
        self._most, self._how = most, how
        self._made: dict[str, Trial] = {}
        self._bar: Progress | None = None

    def __enter__(self) -> "Trials":
        console = Console(file=sys.stderr)
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("at most,"),
                TimeElapsedColumn(),
                TextColumn("so far,"),
                TimeRemainingColumn(),
                TextColumn("left: {task.description}"),
                console=console,
                transient=True,
                speed_estimate_period=_MEMORY_SECONDS,
            )
            self._bar.start()
            self._bar.add_task("", total=self._most)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def make(self, config: Spec, topology: str, label: str) -> Trial:
        """Plans a config on a slice; the progress bar shows `label`."""
        key = json.dumps([topology, flatten(config)])
        if key not in self._made:
            self._made[key] = self._make(config, topology, label)
        return self._made[key]

    def first(self, config: Spec, topology: str, label: str) -> Trial:
        """Plans the config as the user gives it; raises the error if it is rejected."""
        trial = self.make(config, topology, label)
        if trial.error is not None:
            raise trial.error
        return trial

    def _make(self, config: Spec, topology: str, label: str) -> Trial:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=label)
        try:
            plan = make_plan(config, topology, lambda _: self._reported(label), **self._how)
        except UserError as error:
            return Trial(None, error=error)
        finally:
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0])
        # Drop programs and schedules: those of large models take hundreds of megabytes.
        rest = dataclasses.replace(plan, program="", network=None, times=None, collectives=None)
        trial = Trial(rest, plan.step_seconds, plan.totals)
        del plan
        release()
        return trial

    @contextlib.contextmanager
    def _reported(self, label: str) -> Iterator[None]:
        """Prints a line for a compilation if there is no progress bar."""
        if self._bar is None:
            number = len(self._made) + 1
            text = f"compiling {label} ({number} of at most {self._most})"
            print(terminal.fit(text), file=sys.stderr, flush=True)
        yield


def check_any(trials: Sequence[Trial]) -> None:
    """Raises the error of the first trial if all of them were rejected."""
    errors = [trial.error for trial in trials if trial.error]
    if len(errors) == len(trials):
        raise errors[0]


def table(
    head: Sequence[str], rows: Sequence[tuple[Sequence[str], Trial]], right: Collection[int] = ()
) -> str:
    """Formats rows as aligned columns; columns with an index in `right` are right-aligned.

    The row of a rejected trial ends with the reason; only this text is wrapped. Cells at the end of
    a row may be missing.
    """
    width = len(head)
    cells = [tuple(head), *((*texts, *[""] * (width - len(texts))) for texts, _ in rows)]
    first, *lines = terminal.columns(cells, right).splitlines()
    return "\n".join(
        [
            first,
            *(
                terminal.fit(f"{line}: {trial.rejected}") if trial.rejected else line
                for line, (_, trial) in zip(lines, rows, strict=True)
            ),
        ]
    )


def milliseconds(seconds: tuple[float, ...] | None) -> str:
    """Formats the expected time of a step and its interval.

    >>> milliseconds((0.1, 0.12, 0.15)), milliseconds((1.1, 1.234, 1.5)), milliseconds(None)
    ('120 (100 to 150)', '1,234 (1,100 to 1,500)', '?')
    """
    if seconds is None:
        return "?"
    low, middle, high = (_number(1e3 * each) for each in seconds)
    return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""Plans of several configs, one after the other, with a bar of progress on stderr."""

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict
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
from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.plan.cache import Cache
from lamb_tpu.plan.making import make_plan, release
from lamb_tpu.plan.report import Plan
from lamb_tpu.plan.totals import Totals

# The bar's time left follows from all compilations so far, of which one may take many minutes.
_MEMORY_SECONDS = 7 * 86_400.0


class Answer(NamedTuple):
    """Output of a command: text for the terminal, and a value for JSON."""

    text: str
    json: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of planning a config.

    Attributes:
      plan: the plan, without its program and its schedule; None if the config was refused.
      step_seconds: time of a step: shortest, expected, longest; None if it does not fit, or the
        program could not be read.
      totals: times of the whole run; None where `step_seconds` is.
      refused: why the config was refused; '' if it was not.
    """

    plan: Plan | None
    step_seconds: tuple[float, ...] | None = None
    totals: Totals | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """True if the step fits into a device's memory; False for a refused one."""
        return self.plan is not None and self.plan.fits

    @property
    def expected(self) -> float:
        """Expected time of a step in seconds; infinite for one that does not run."""
        return self.step_seconds[1] if self.fits and self.step_seconds else math.inf

    def cells(self) -> tuple[str, ...]:
        """Returns the columns of `HEAD`; of a refused config only the word 'refused'."""
        if self.plan is None:
            return ("refused",)
        share = self.plan.share_of_memory
        return (
            "yes" if self.fits else "no",
            f"{100 * share:.3g} %" if share else "?",
            milliseconds(self.step_seconds) if self.fits else "",
        )

    def describe(self) -> str:
        """Returns memory and time of a step that fits as text."""
        assert self.plan is not None
        share = self.plan.share_of_memory
        memory = f"{100 * share:.3g} % of memory, " if share else ""
        return f"{memory}{milliseconds(self.step_seconds)} ms a step"

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as a dict of JSON values; None stands for what is not known."""
        return {
            "refused": self.refused,
            "batch_size": self.plan and self.plan.batch_size,
            "fits": self.fits,
            "share_of_memory": self.plan and self.plan.share_of_memory,
            "step_milliseconds": self.step_seconds and [1e3 * each for each in self.step_seconds],
        }


HEAD = ("fits", "memory", "ms a step")
# Parts of a run that are in none of the times.
LEFT_OUT = "start-up, compiling on the pod, checkpoints, and waiting for the slowest chip"


class Trials:
    """Makes plans of several configs, as a context; each is made once.

    A config that is refused is a result, as is one that does not fit.

    Args:
      most: largest number of plans that will be asked for.
      examples: number of training examples, see `make_plan`.
      cache: where compiled programs are kept.
      gbps: rate of a host's link, see `make_plan`.
    """

    def __init__(
        self,
        most: int,
        examples: int | None = None,
        cache: Cache | None = None,
        gbps: float | None = None,
    ) -> None:
        self._examples, self._cache, self._gbps = examples, cache, gbps
        self._made: dict[str, Trial] = {}
        self.most = most
        self._bar: Progress | None = None

    def __enter__(self) -> "Trials":
        console = Console(stderr=True)
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
            self._bar.add_task("", total=self.most)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def make(self, config: ConfigDict, topology: str, label: str) -> Trial:
        """Returns the outcome for a config on a slice; `label` names it in the progress."""
        key = json.dumps([topology, flatten(config)])
        if key not in self._made:
            self._made[key] = self._make(config, topology, label)
        return self._made[key]

    def first(self, config: ConfigDict, topology: str, label: str) -> Trial:
        """Returns the outcome for the config as the user gives it, where a refusal is an error.

        Raises:
          UserError: the config was refused.
        """
        trial = self.make(config, topology, label)
        if trial.plan is None:
            raise UserError(trial.refused)
        return trial

    def _make(self, config: ConfigDict, topology: str, label: str) -> Trial:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=label)
        try:
            plan = make_plan(
                config,
                topology,
                lambda _: self._told(label),
                self._examples,
                self._cache,
                self._gbps,
            )
        except UserError as error:
            return Trial(None, refused=str(error))
        finally:
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0])
        # Programs and schedules of large models take hundreds of megabytes.
        rest = dataclasses.replace(plan, program="", network=None, times=None, collectives=None)
        trial = Trial(rest, plan.step_seconds, plan.totals)
        del plan
        release()
        return trial

    @contextlib.contextmanager
    def _told(self, label: str) -> Iterator[None]:
        """Prints a line for a compilation, where no bar shows it."""
        if self._bar is None:
            number = len(self._made) + 1
            text = f"compiling {label} ({number} of at most {self.most})"
            print(terminal.fit(text), file=sys.stderr, flush=True)
        yield


def check_any(trials: Sequence[Trial]) -> None:
    """Raises the first trial's reason as a UserError if all of them were refused."""
    if all(trial.refused for trial in trials):
        raise UserError(trials[0].refused)


def table(
    head: Sequence[str], rows: Sequence[tuple[Sequence[str], Trial]], right: Collection[int] = ()
) -> str:
    """Returns rows of texts as aligned columns; a refused trial's row ends with the reason.

    Rows are not wrapped but for the reason, which may be long.

    Args:
      head: names of the columns.
      rows: the columns of each trial; those at the end may be missing.
      right: columns that are aligned to the right.
    """
    width = len(head)
    cells = [tuple(head), *((*texts, *[""] * (width - len(texts))) for texts, _ in rows)]
    first, *lines = terminal.columns(cells, right).splitlines()
    return "\n".join(
        [
            first,
            *(
                terminal.fit(f"{line}: {trial.refused}") if trial.refused else line
                for line, (_, trial) in zip(lines, rows, strict=True)
            ),
        ]
    )


def milliseconds(seconds: tuple[float, ...] | None) -> str:
    """Returns times of a step as text: the expected one, and the interval.

    >>> milliseconds((0.1, 0.12, 0.15)), milliseconds((1.1, 1.234, 1.5)), milliseconds(None)
    ('120 (100 to 150)', '1,234 (1,100 to 1,500)', '?')
    """
    if seconds is None:
        return "?"
    low, middle, high = (_number(1e3 * each) for each in seconds)
    return f"{middle} ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""Progress of branches: a bar on a terminal, or else a line per branch."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lamb_tpu import terminal
from lamb_tpu.watch.progress import format_seconds


class BranchProgress:
    """Context manager that shows progress on stderr: examples per second, and the time left.

    The rate is the mean since the first branch began, including compilation and evaluation.
    """

    def __init__(self, branches: int, examples: int) -> None:
        self._branches, self._total = branches, branches * examples
        self._ended = self._examples = 0
        self._name = ""
        console = Console(file=sys.stderr)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[rate]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
                speed_estimate_period=1e9,  # by default rich forgets updates after 30 s
            )
            self._task = self._bar.add_task("", total=self._total, rate="")

    def __enter__(self) -> "BranchProgress":
        self._began = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begins(self, step: int, factor: int) -> None:
        """Announces the next branch, by its first update and its factor."""
        self._name = f"branch {self._ended + 1}/{self._branches}: update {step:,}, x{factor}"
        if self._bar is not None:
            self._bar.update(self._task, description=self._name)

    def trained(self, examples: int) -> None:
        """Adds the examples of an update to the progress."""
        self._examples += examples
        if self._bar is not None:
            rate = f"{self._rate():,.0f} examples/s"
            self._bar.update(self._task, advance=examples, rate=rate)

    def ended(self, loss: float) -> None:
        """Prints the loss of the branch."""
        self._ended += 1
        text = f"{self._name}: loss {loss:.5g}"
        if self._bar is not None:
            # Text such as ':train:' must not become an emoji.
            self._bar.console.print(terminal.fit(text), markup=False, emoji=False)
            return
        left = format_seconds((self._total - self._examples) / self._rate())
        text = f"{text}; {self._rate():,.0f} examples/s, {left} left"
        print(terminal.fit(text), file=sys.stderr, flush=True)

    def _rate(self) -> float:
        return self._examples / max(time.monotonic() - self._began, 1e-9)

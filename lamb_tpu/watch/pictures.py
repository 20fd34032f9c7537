"""Counts of damaged and odd pictures that a start has read."""

from collections.abc import Callable

from lamb_tpu.run.build import Run
from lamb_tpu.run.describe import counts_read, describe_read
from lamb_tpu.watch.observer import Observer, Start


class Pictures(Observer):
    """Reports such pictures when a start ends, and records their numbers when a run ends.

    Args:
      run: the run, whose data sets count the pictures.
      tell: prints a line.
    """

    def __init__(self, run: Run, tell: Callable[[str], None]) -> None:
        self._run, self._tell = run, tell

    def started(self, start: Start) -> None:
        self._start = start

    def completed(self, step: int) -> None:
        counts = counts_read(self._run)
        # A complete run that is started again would record its evaluation's pictures a second time.
        if counts and not self._start.is_over:
            self._start.records.write(step, "pictures", counts)
            self._tell(describe_read(self._run))

    def preempted(self, step: int) -> None:
        if told := describe_read(self._run):
            self._tell(told)

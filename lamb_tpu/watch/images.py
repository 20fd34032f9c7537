"""Counts of damaged and unusual images that were read."""

from collections.abc import Callable

from lamb_tpu.run.build import Run
from lamb_tpu.run.describe import counts_read, describe_read
from lamb_tpu.watch.observer import Observer, Start


class Images(Observer):
    """Reports the counts when the run is preempted or complete; a complete run also records them."""

    def __init__(self, run: Run, report: Callable[[str], None]) -> None:
        self._run, self._report = run, report

    def started(self, start: Start) -> None:
        self._start = start

    def completed(self, step: int) -> None:
        counts = counts_read(self._run)
        # Starting a complete run again must not record the images of its evaluation twice.
        if counts and not self._start.is_over:
            self._start.records.write(step, "pictures", counts)
            self._report(describe_read(self._run))

    def preempted(self, step: int) -> None:
        if text := describe_read(self._run):
            self._report(text)

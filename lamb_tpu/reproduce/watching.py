"""Reports the progress of runs, which print nothing themselves."""

import contextlib
import sys
import threading
import time

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.engine import RunSetup
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.store.metrics import read_records
from lamb_tpu.watch.progress import format_seconds, format_values

_SECONDS_BETWEEN_LINES = 60.0


class Watch:
    """Context manager that prints, every minute, a line for each run in progress.

    If runs are trained one at a time on a terminal, each run has a progress bar, so no line is printed.
    """

    def __init__(self, setup: RunSetup, processes: int) -> None:
        self._setup, self._running = setup, dict[tuple, tuple[Job, float]]()
        self._ended = threading.Event()
        self._silent = processes == 1 and sys.stdout.isatty()
        self._thread = threading.Thread(target=self._print, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        if not self._silent:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def begun(self, job: Job) -> None:
        """Starts watching a run."""
        self._running[job.key] = job, time.monotonic()

    def done(self, job: Job) -> None:
        """Stops watching a run."""
        self._running.pop(job.key, None)

    def lines(self) -> list[str]:
        """Returns a line for each run in progress: its update, epoch, loss and elapsed time."""
        lines = []
        for job, began in list(self._running.values()):
            folder = engine.workdirs(job, self._setup)[-1]
            records = []
            for path in sorted(folder.glob("**/metrics.jsonl")):
                with contextlib.suppress(UserError):  # the file may be changing
                    records += read_records(path, "train")
            progress = "nothing recorded yet"
            if records:
                last = records[-1]
                names = ("epoch", "loss")
                shown: dict[str, float] = {key: last[key] for key in names if key in last}
                progress = f"update {last['step']:,}, {format_values(shown)}"
            elapsed = format_seconds(time.monotonic() - began)
            lines.append(f"  {job.name}: {progress}, {elapsed} so far")
        return lines

    def _print(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            for line in self.lines():
                print(line, flush=True)

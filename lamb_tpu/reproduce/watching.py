"""Tells how far the running runs are, which print nothing themselves."""

import contextlib
import sys
import threading
import time
from types import TracebackType

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.engine import Place
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.store.metrics import read_records
from lamb_tpu.watch.progress import format_seconds, format_values

_SECONDS_BETWEEN_LINES = 60.0


class Watch:
    """Prints a line every minute for each run that is going on, until the context ends.

    One run after another on a terminal has a progress bar of its own, and no lines.

    Args:
      place: folders of the runs.
      processes: how many run at a time.
    """

    def __init__(self, place: Place, processes: int) -> None:
        self._place, self._running = place, dict[tuple, tuple[Job, float]]()
        self._over = threading.Event()
        self._silent = processes == 1 and sys.stdout.isatty()
        self._thread = threading.Thread(target=self._tell, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        if not self._silent:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()

    def begun(self, job: Job) -> None:
        """Begins to watch a run."""
        self._running[job.key] = job, time.monotonic()

    def done(self, job: Job) -> None:
        """Ends watching a run."""
        self._running.pop(job.key, None)

    def lines(self) -> list[str]:
        """Returns a line for each running run: its update, epoch and loss, and its time so far."""
        found = []
        for job, began in list(self._running.values()):
            folder = engine.workdirs(job, self._place)[-1]
            records = []
            for path in sorted(folder.glob("**/metrics.jsonl")):
                with contextlib.suppress(UserError):  # it may be just being replaced
                    records += read_records(path, "train")
            how_far = "nothing recorded yet"
            if records:
                last = records[-1]
                names = ("epoch", "loss")
                shown: dict[str, float] = {key: last[key] for key in names if key in last}
                how_far = f"update {last['step']:,}, {format_values(shown)}"
            took = format_seconds(time.monotonic() - began)
            found.append(f"  {job.name}: {how_far}, {took} so far")
        return found

    def _tell(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_LINES):
            for line in self.lines():
                print(line, flush=True)

"""Periodic progress lines from every process except the first, which has a progress bar."""

import os
import pathlib
import socket
import threading
import time

import jax

from lamb_tpu.parallel.state import TrainState
from lamb_tpu.watch.observer import Observer, Start


class Heartbeat(Observer):
    """Prints at intervals a line with the process, host, update, updates per second and resident memory.

    If `every_seconds` is 0, prints nothing.
    """

    def __init__(self, every_seconds: float) -> None:
        self._every = every_seconds
        self._over = threading.Event()

    def started(self, start: Start) -> None:
        self._step = start.step
        if self._every and jax.process_index():
            self._who = f"process {jax.process_index()} of {jax.process_count()}"
            # A thread, because its lines matter most while the main thread is blocked. As a daemon
            # it does not keep the process alive.
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def updated(self, step: int, state: TrainState) -> None:
        self._step = step

    def ended(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        when, before = time.monotonic(), self._step
        while not self._over.wait(self._every):
            now, step = time.monotonic(), self._step
            print(
                f"{self._who} on {socket.gethostname()}: update {step}, "
                f"{(step - before) / (now - when):.4g} updates/s{_resident()}",
                flush=True,
            )
            when, before = now, step


def _resident() -> str:
    """Returns text such as ', 1.23 GiB resident'; '' if the system does not report it."""
    try:
        # The second number in the file is the count of resident pages.
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return ""
    return f", {pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.2f} GiB resident"

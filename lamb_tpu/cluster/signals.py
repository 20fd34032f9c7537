"""Signals that arrive while the main thread is in a compiler, an import, or C++ code.

Python calls signal handlers only in the main thread, between two bytecode instructions. Compiling a
large model keeps the main thread in C++ for minutes, but a scheduler kills a process that has not
ended half a minute after SIGTERM. Therefore a thread watches for signals. If nothing would be lost,
the thread ends the process with the exit status that the signal's handler would use.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

# Exit status by signal: after Ctrl-C the status that a shell reports, else EX_TEMPFAIL ("try again").
STATUS = {signal.SIGINT: 130, signal.SIGTERM: os.EX_TEMPFAIL, signal.SIGHUP: os.EX_TEMPFAIL}
# Exit status of a process that cannot continue without another process of its run. It is the number
# of SIGABRT, the signal with which JAX would end it; see `distributed._leave_when_aborted`.
LOST_PEER = int(signal.SIGABRT)
# Time that the main thread has to handle the first signal.
GRACE_SECONDS = 2.0
# Time that the main thread has after the second signal, which always ends the process.
_SECOND_SECONDS = 0.3
_SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides it


# Set once the main thread ends the process because of a signal; the watcher then lets it finish.
ending = threading.Event()
# Set once a signal has arrived, whether or not the main thread has handled it.
received = threading.Event()
# Set while there is something to save, so that a signal must not end the process.
saving = threading.Event()


class Watcher:
    """A thread that ends the process if the main thread does not handle a signal in time.

    Use as a context manager in the main thread, and set the signal handlers inside the block; the
    handlers must set `ending`. The thread ignores signals whose handler is not in `handlers`. To
    end the process, it calls `end` with the signal's number. If `end` is None, there is something
    to save, so only a second signal ends the process.
    """

    def __init__(
        self, handlers: Collection[Callable[..., Any]], end: Callable[[int], None] | None
    ) -> None:
        self._handlers, self._end = handlers, end
        self._over = threading.Event()

    def __enter__(self) -> "Watcher":
        # Python's C handler writes the number of each signal to this socket at once, even while
        # the main thread runs no Python code. The thread reads from the other end.
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._before = signal.set_wakeup_fd(self._ours.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(theirs,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self._before)
        self._over.set()
        self._ours.close()  # ends the thread

    def _watch(self, signals: socket.socket) -> None:
        count = 0
        with signals:
            # One byte per signal; b"" when the socket is closed.
            while byte := signals.recv(1):
                number = byte[0]
                if number not in STATUS or signal.getsignal(number) not in self._handlers:
                    continue
                count += 1
                received.set()
                if count > 1:
                    time.sleep(_SECOND_SECONDS)
                    show_cursor()
                    # The status that a shell reports for a process that this signal ended.
                    os._exit(128 + number)
                if self._end is not None:
                    threading.Thread(
                        target=self._bound, args=(number, self._end), daemon=True
                    ).start()

    def _bound(self, number: int, end: Callable[[int], None]) -> None:
        """Ends the process if the main thread does not handle the first signal in time."""
        if not self._over.wait(GRACE_SECONDS) and not ending.is_set():
            ending.set()
            show_cursor()
            end(number)


def show_cursor() -> None:
    """Shows the terminal's cursor, which a progress bar may have hidden; called before an exit."""
    if sys.stderr.isatty():
        print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)

"""Requests to end a run: SIGTERM and Ctrl-C, which save first, and failed writes."""

import itertools
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from lamb_tpu.cluster import distributed
from lamb_tpu.errors import Interrupted, Preempted, UserError

# All processes stop at the poll of the same number, so the count continues over several runs in one
# process. It starts at 1, because 0 means that a process has not polled yet.
_numbers = itertools.count(1)
_SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides it
# Time in which the main thread can handle a second signal itself.
_GRACE_SECONDS = 0.3


class Preemption:
    """Notices SIGTERM and Ctrl-C between updates and between batches of an evaluation.

    In a run of one process the handler only notes the signal; a second signal ends the process at
    once. In a run of several processes JAX notes SIGTERM, in whichever process it arrives, and all
    of them stop at the same poll a second or two later. Ctrl-C and an error passed to `fail` are
    sent the same way. Use as a context manager:

        with Preemption() as preemption:
            while ...:
                preemption.poll()
            preemption.settle()
    """

    # If a run of several processes has ended, JAX reports its signal to the next run's poll.
    _interrupted = False

    def __enter__(self) -> "Preemption":
        self._noticed = False
        self._error: UserError | None = None
        self._several = jax.distributed.is_initialized()
        # Python allows signal handlers in the main thread only.
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            numbers = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
            self._before = {number: signal.signal(number, self._take_note) for number in numbers}
            # Python's C handler writes the number of each signal to this socket at once, also while
            # the main thread runs no Python code. A thread reads it at the other end.
            self._ours, theirs = socket.socketpair()
            self._ours.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(
                self._ours.fileno(), warn_on_full_buffer=False
            )
            threading.Thread(
                target=_end_at_the_second, args=(theirs, numbers), name="signals", daemon=True
            ).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._listens:
            # The thread ends when its socket is closed at this end.
            signal.set_wakeup_fd(self._wakeup_before)
            self._ours.close()
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        del frame
        # From the first signal on, the next one has its default action and ends the process.
        for one in self._before:
            signal.signal(one, signal.SIG_DFL)
        if number == signal.SIGINT:
            # With several processes a later run's poll may be the one to report it.
            owner = Preemption if self._several else self
            owner._interrupted = True
            if jax.process_index() == 0:
                told = "Ctrl-C: saving, then ending; again to end at once"
                print(told, file=sys.stderr, flush=True)
        self._notice()

    def _notice(self) -> None:
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX sends it to the others
        else:
            self._noticed = True

    def fail(self, error: UserError) -> None:
        """Makes the next poll raise the error; with several processes, some seconds later.

        This is for an error of one process, which must not leave the others waiting for it.
        """
        # The first error is the cause; others may follow from it.
        if self._error is None:
            self._error = error
            self._notice()

    def poll(self) -> None:
        """Raises if the run was asked to end.

        All processes of a run must call it equally often, at the same places. They raise at the
        same call.

        Raises:
          Preempted: SIGTERM arrived.
          Interrupted: Ctrl-C arrived.
          UserError: `fail` was called, in this or another process.
        """
        number = next(_numbers)
        if self._several:
            self._noticed = multihost_utils.reached_preemption_sync_point(number)
        if self._noticed:
            # An error that was passed to `fail` comes before the signal by which it was sent.
            self.settle()
            interrupted = self._interrupted
            if self._several:
                # Ctrl-C may have reached one process only. All must raise the same.
                interrupted = multihost_utils.process_allgather(np.bool_(interrupted)).any()
            raise Interrupted if interrupted else Preempted

    def settle(self) -> None:
        """Raises an error passed to `fail`; all processes must call it at the same place.

        It is for the end of the work, after the last poll.

        Raises:
          UserError: `fail` was called, in this or another process.
        """
        distributed.agree(self._error)


def _end_at_the_second(signals: socket.socket, numbers: list[signal.Signals]) -> None:
    """Ends the process at the second signal if the main thread cannot.

    Python calls handlers in the main thread only, between two bytecode instructions: not while that
    thread compiles or waits for an update.
    """
    count = 0
    with signals:
        # One byte for each signal; nothing at the end of the socket.
        while received := signals.recv(1):
            count += received[0] in numbers
            if count > 1:
                time.sleep(_GRACE_SECONDS)
                if sys.stderr.isatty():
                    print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)
                # The exit status that a shell gives to a process ended by this signal.
                os._exit(128 + received[0])

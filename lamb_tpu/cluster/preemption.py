"""The notices that a run shall end: SIGTERM and Ctrl-C, answered by saving, and a failed write."""

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

# Processes find the poll at which all of them stop by its number, so it goes on over several runs
# in one process. It starts at 1, because a process that has not polled yet stands for 0.
_numbers = itertools.count(1)
_SHOW_CURSOR = "\x1b[?25h"  # the progress bar hides it
# For the main thread to answer a second signal by itself.
_GRACE_SECONDS = 0.3


class Preemption:
    """Notices SIGTERM and Ctrl-C between updates and between batches of an evaluation.

    In a run of one process the handler only takes note; a second signal ends the process at once.
    In a run of several JAX takes note of SIGTERM, in whichever process it arrives, and lets all of
    them stop at the same poll, a second or two later; Ctrl-C, and an error told to `fail`, take the
    same way. Use as a context manager:

        with Preemption() as preemption:
            while ...:
                preemption.poll()
            preemption.settle()
    """

    # Of several processes JAX tells the next run's poll where the run that it came to has ended.
    _interrupted = False

    def __enter__(self) -> "Preemption":
        self._noticed = False
        self._error: UserError | None = None
        self._several = jax.distributed.is_initialized()
        # Python lets only the main thread have handlers.
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            numbers = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
            self._before = {
                number: signal.signal(number, self._take_note) for number in numbers
            }
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
            signal.set_wakeup_fd(self._wakeup_before)
            self._ours.close()
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        del frame
        for one in self._before:
            signal.signal(one, signal.SIG_DFL)
        if number == signal.SIGINT:
            owner = Preemption if self._several else self
            owner._interrupted = True
            if jax.process_index() == 0:
                told = "Ctrl-C: saving, then ending; again to end at once"
                print(told, file=sys.stderr, flush=True)
        self._notice()

    def _notice(self) -> None:
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX tells the others
        else:
            self._noticed = True

    def fail(self, error: UserError) -> None:
        """Lets the next poll raise the error; in a run of several, one in a second or two.

        For an error of one process alone, which must not leave the others waiting for it.
        """
        if self._error is None:
            self._error = error
            self._notice()

    def poll(self) -> None:
        """Ends what is under way if there was a notice.

        All processes of a run must call it equally often, at the same places.

        Raises:
          Preempted: there was one; in a run of several processes in all of them at the same call.
          Interrupted: it was Ctrl-C.
          UserError: `fail` was told of one, in this or another process.
        """
        number = next(_numbers)
        if self._several:
            self._noticed = multihost_utils.reached_preemption_sync_point(number)
        if self._noticed:
            self.settle()
            interrupted = self._interrupted
            if self._several:
                interrupted = multihost_utils.process_allgather(np.bool_(interrupted)).any()
            raise Interrupted if interrupted else Preempted

    def settle(self) -> None:
        """Raises an error that `fail` was told of; all processes must call it at the same place.

        For the end of the work, behind which there is no poll.

        Raises:
          UserError: of this or another process.
        """
        distributed.agree(self._error)


def _end_at_the_second(signals: socket.socket, numbers: list[signal.Signals]) -> None:
    """Ends the process at the second signal where the main thread cannot.

    Python calls handlers in the main thread only, and only between two of its own instructions: not
    while that compiles, or waits for an update.
    """
    count = 0
    with signals:
        while received := signals.recv(1):
            count += received[0] in numbers
            if count > 1:
                time.sleep(_GRACE_SECONDS)
                if sys.stderr.isatty():
                    print(_SHOW_CURSOR, end="", file=sys.stderr, flush=True)
                os._exit(128 + received[0])

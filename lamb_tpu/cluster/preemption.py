"""Events that end a run: SIGTERM and Ctrl-C, after which the run saves, and failed writes."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lamb_tpu.cluster import distributed, signals
from lamb_tpu.errors import Interrupted, Preempted, UserError

# All processes stop at the poll with the same number, so the count continues over all runs of a
# process. It starts at 1, because 0 means that a process has not polled yet.
_numbers = itertools.count(1)


class Preemption:
    """Handles SIGTERM and Ctrl-C between updates and between batches of an evaluation.

    In a run of one process, the handler records the signal for the next poll, and a second signal
    ends the process at once. In a run of several processes, JAX notifies all processes of a SIGTERM
    to any of them, and they stop at the same poll a second or two later. Ctrl-C and an error passed
    to `fail` are sent in the same way. Use as a context manager:

        with Preemption() as preemption:
            while ...:
                preemption.poll()
            preemption.settle()

    Before `begin` is called, there is nothing to save, so the command's handlers end the process at
    once; see `lamb_tpu.cluster.signals`. If `begins` is True, or if there are no such handlers, as
    in a notebook, polls handle signals from the start of the block.
    """

    # Shared by all runs: JAX may report a signal to the poll of the next run in the process.
    _interrupted = False

    def __init__(self, begins: bool = True) -> None:
        self._begins = begins

    def __enter__(self) -> "Preemption":
        self._noticed = self._begun = False
        self._error: UserError | None = None
        self._several = jax.distributed.is_initialized()
        self._before: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()
        if self._begins or not callable(signal.getsignal(signal.SIGTERM)):
            self._listen()
        return self

    def begin(self) -> None:
        """Makes polls handle signals from now on; all processes must call it.

        Call it before the first update. Processes wait here for each other, because a process that
        has begun could not end together with a process that has not.
        """
        if self._begun:
            return
        if self._several:
            distributed.meet()
        self._listen()

    def _listen(self) -> None:
        self._begun = True
        signals.saving.set()
        self._stack.callback(signals.saving.clear)
        if self._error is not None:
            self._notice()
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return
        self._stack.enter_context(signals.Watcher((self._take_note,), None))
        numbers = [signal.SIGINT] if self._several else [signal.SIGINT, signal.SIGTERM]
        # SIGHUP means a closed terminal; nohup makes a process ignore it. With several processes,
        # their launcher handles SIGHUP.
        if not self._several and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            before = self._before[number] = signal.signal(number, self._take_note)
            self._stack.callback(signal.signal, number, before)

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        del frame
        # The next signal has its default action and ends the process.
        for one in self._before:
            signal.signal(one, signal.SIG_DFL)
        if number == signal.SIGINT:
            # With several processes, the poll of a later run may report the signal.
            owner = Preemption if self._several else self
            owner._interrupted = True
            if jax.process_index() == 0:
                text = "Ctrl-C: the run saves and ends; press Ctrl-C again to end it at once"
                print(text, file=sys.stderr, flush=True)
        self._notice()

    def _notice(self) -> None:
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX notifies the other processes
        else:
            self._noticed = True

    def fail(self, error: UserError) -> None:
        """Makes the next poll raise the error in all processes, which may take some seconds."""
        # Keep the first error; later ones may be consequences.
        if self._error is None:
            self._error = error
            # JAX's notice would end processes that have not begun, as if preempted.
            if self._begun or not self._several:
                self._notice()

    def poll(self) -> None:
        """Raises Preempted after SIGTERM, Interrupted after Ctrl-C, or the error passed to `fail`.

        All processes of a run must make the same sequence of calls. They raise at the same call.
        """
        number = next(_numbers)
        if self._several:
            # JAX reports a signal to one poll only; remember it for runs that train side by side.
            self._noticed |= bool(multihost_utils.reached_preemption_sync_point(number))
        if self._noticed:
            if self._several:
                signals.ending.set()
            # `fail` sends its error by a signal; raise the error, not the signal.
            self.settle()
            interrupted = self._interrupted
            if self._several:
                # Ctrl-C may have reached only one process, but all must raise the same.
                interrupted = multihost_utils.process_allgather(np.bool_(interrupted)).any()
            raise Interrupted if interrupted else Preempted

    def settle(self) -> None:
        """Raises an error that was passed to `fail` in any process; all processes must call it."""
        distributed.agree(self._error)

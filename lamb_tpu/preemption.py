"""The notice that the machine will be taken away: SIGTERM, to which a run answers by saving."""

import itertools
import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

from lamb_tpu.errors import Preempted

# Processes find the poll at which all of them stop by its number, so it goes on over several runs
# in one process. It starts at 1, because a process that has not polled yet stands for 0.
_numbers = itertools.count(1)


class Preemption:
    """Notices SIGTERM between updates and between batches of an evaluation.

    In a run of one process the handler only takes note; the second SIGTERM ends the process at
    once. In a run of several JAX takes note, in whichever process it arrives, and lets all of them
    stop at the same poll, a second or two later. Use as a context manager:

        with Preemption() as preemption:
            while ...:
                preemption.poll()
    """

    def __enter__(self) -> "Preemption":
        self._noticed = False
        self._several = jax.distributed.is_initialized()
        # Python lets only the main thread have handlers.
        self._listens = (
            not self._several and threading.current_thread() is threading.main_thread()
        )
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._take_note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._noticed = True
        signal.signal(number, signal.SIG_DFL)

    def poll(self) -> None:
        """Ends what is under way if there was a notice.

        All processes of a run must call it equally often, at the same places.

        Raises:
          Preempted: there was one; in a run of several processes in all of them at the same call.
        """
        number = next(_numbers)
        if self._several:
            self._noticed = multihost_utils.reached_preemption_sync_point(number)
        if self._noticed:
            raise Preempted

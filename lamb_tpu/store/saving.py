"""The save that Orbax' threads are at: its end, and its failure as soon as there is one."""

import itertools
import logging
import time
from typing import Any

import jax
from absl import logging as absl_logging

from lamb_tpu.cluster import distributed

# Every process makes them in the same order, so all know one by the same number.
_numbers = itertools.count()
_POLL_SECONDS = 0.2
# Modules of Orbax that log the exception of a thread, which then ends the save.
_TELLING = ("future", "async_checkpointer", "checkpoint_manager", "checkpoint")


class Background:
    """The save under way, and what has become of it.

    Orbax raises what failed in its threads only where the save is waited for, and logs each with a
    traceback. In a run of several processes it does not even raise it for 20 minutes: its threads
    wait for those of the other processes, which wait for the one that failed. So the failure is
    taken from the log, which is not printed then, and the processes tell each other over JAX'
    coordination service.

    Attributes:
      error: what has gone wrong, here or in another process; None as long as nothing has.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._response: Any = None
        self._key = f"lamb_tpu/save/{next(_numbers)}"

    def begin(self) -> None:
        """Takes what Orbax logs of failures for this save's, from here to `end`."""
        _listener.target = self

    def started(self, response: Any) -> None:
        """Takes in what Orbax has returned for the save."""
        self._response = response

    def fail(self, error: BaseException) -> None:
        """Notes a failure, the first one, and tells the other processes."""
        if self.error is None:
            self.error = error
            if jax.process_count() > 1:
                text = f"{type(error).__name__}: {error}"
                distributed.client().key_value_set(self._key, text, allow_overwrite=True)

    def wait(self) -> None:
        """Waits for the end of the save, and frees the thread and the descriptors it has taken.

        Raises:
          Exception: of many types, when it has failed, here or in another process.
        """
        while self._response is not None:
            if self.error is not None:
                raise self.error
            if jax.process_count() == 1:
                self._response.result()
                self._response = None
                break
            self._look()
            try:
                self._response.result(timeout=_POLL_SECONDS)
                self._response = None
            except TimeoutError:
                time.sleep(_POLL_SECONDS / 10)  # where it is the save's own, it comes at once
        self.end()

    def end(self) -> None:
        """Lets Orbax' log be printed again; for a save that has failed, when its threads are gone.

        One that has succeeded comes to it by `wait`.
        """
        if _listener.target is self:
            _listener.target = None

    def _look(self) -> None:
        """Raises when another process has told of a failure."""
        try:
            text = distributed.client().key_value_try_get(self._key)
        except jax.errors.JaxRuntimeError:  # there is none
            return
        self.error = RuntimeError(text)
        raise self.error


class _Listener(logging.Filter):
    """Takes failures out of absl's log.

    Attributes:
      target: of whom they are; None lets all pass.
    """

    target: Background | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be printed."""
        target = self.target
        if target is None or record.module not in _TELLING or "orbax" not in record.pathname:
            return True
        if not record.exc_info or record.exc_info[1] is None:
            return True
        target.fail(record.exc_info[1])
        return False


_listener = _Listener()
absl_logging.get_absl_logger().addFilter(_listener)

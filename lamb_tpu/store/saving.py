"""A save in Orbax' threads: waiting for its end, and learning of its failure at once."""

import itertools
import logging
import time
from typing import Any

import jax
from absl import logging as absl_logging

from lamb_tpu.cluster import distributed

# Numbers of the saves. Every process saves in the same order, so a number means the same to all.
_numbers = itertools.count()
_POLL_SECONDS = 0.2
# Modules of Orbax that log the exception of a thread, which then ends the save.
_TELLING = ("future", "async_checkpointer", "checkpoint_manager", "checkpoint")


class Background:
    """A save in progress and its result.

    Orbax raises an error of its threads only when the save is waited for, and logs it with a
    traceback. With several processes it does not raise it for 20 minutes: its threads wait for
    those of the other processes, which wait for the one that failed. So the failure is taken from
    the log, which is then not printed, and the processes inform each other over JAX' coordination
    service.

    Attributes:
      error: the error of the save, in this or another process; None so far.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._response: Any = None
        self._key = f"lamb_tpu/save/{next(_numbers)}"

    def begin(self) -> None:
        """Starts a save: until `end`, failures in Orbax' log count as this save's."""
        _listener.target = self

    def started(self, response: Any) -> None:
        """Stores the response that Orbax returned for the save."""
        self._response = response

    def fail(self, error: BaseException) -> None:
        """Stores the first failure and informs the other processes."""
        if self.error is None:
            self.error = error
            if jax.process_count() > 1:
                text = f"{type(error).__name__}: {error}"
                # Several processes may fail and set the same key; any of their texts will do.
                distributed.client().key_value_set(self._key, text, allow_overwrite=True)

    def wait(self) -> None:
        """Waits for the end of the save, and frees its thread and file descriptors.

        Raises:
          Exception: the save failed, here or in another process; errors of many types.
        """
        while self._response is not None:
            if self.error is not None:
                raise self.error
            # Nobody else can fail, so there is nothing to poll for.
            if jax.process_count() == 1:
                self._response.result()
                self._response = None
                break
            # Short waits in turn: for the end of the save here, and for a failure elsewhere.
            self._look()
            try:
                self._response.result(timeout=_POLL_SECONDS)
                self._response = None
            except TimeoutError:
                time.sleep(_POLL_SECONDS / 10)  # an error of this process comes at once
        self.end()

    def end(self) -> None:
        """Lets Orbax' log be printed again.

        `wait` calls it for a save that succeeded. After a failed save it must be called when the
        save's threads have ended.
        """
        # A later save may have taken the listener over already.
        if _listener.target is self:
            _listener.target = None

    def _look(self) -> None:
        """Raises if another process has reported a failure."""
        try:
            text = distributed.client().key_value_try_get(self._key)
        except jax.errors.JaxRuntimeError:  # there is none
            return
        self.error = RuntimeError(text)
        raise self.error


class _Listener(logging.Filter):
    """Filter that takes failures of a save out of absl's log.

    Attributes:
      target: the save that gets the failures; None lets all records pass.
    """

    target: Background | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to print the record."""
        target = self.target
        # Other programs have modules of these names too.
        if target is None or record.module not in _TELLING or "orbax" not in record.pathname:
            return True
        # Orbax also logs progress and warnings there, which are no failures.
        if not record.exc_info or record.exc_info[1] is None:
            return True
        target.fail(record.exc_info[1])
        return False


_listener = _Listener()
# Orbax logs by absl, from threads of its own, so one filter for the process serves all saves.
absl_logging.get_absl_logger().addFilter(_listener)

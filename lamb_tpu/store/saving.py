"""Waits for a save in Orbax's threads, and detects its failure at once."""

import itertools
import logging
import time
from typing import Any

import jax
from absl import logging as absl_logging

from lamb_tpu.cluster import distributed

# Numbers the saves. All processes save in the same order, so a number means the same save in all.
_numbers = itertools.count()
_POLL_SECONDS = 0.2
# Modules of Orbax that log an exception of a thread when a save fails.
_LOGGING_MODULES = ("future", "async_checkpointer", "checkpoint_manager", "checkpoint")


class Background:
    """A save in progress; `error` is its error in this or another process, or None.

    Orbax logs an error of its threads with a traceback, and raises it only when the caller waits for
    the save. With several processes, it raises only after 20 minutes, because the threads of the
    processes wait for each other. Therefore this class takes the failure from the log, suppresses the
    log record, and informs the other processes through JAX's coordination service.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._response: Any = None
        self._key = f"lamb_tpu/save/{next(_numbers)}"

    def begin(self) -> None:
        """Starts a save: until `end`, failures in Orbax's log belong to this save."""
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
                # Several processes may fail and set the same key; any of their texts is enough.
                distributed.client().key_value_set(self._key, text, allow_overwrite=True)

    def wait(self) -> None:
        """Waits for the end of the save, and frees its thread and file descriptors.

        If the save failed in this or another process, raises the error, which can have any type.
        """
        while self._response is not None:
            if self.error is not None:
                raise self.error
            # No other process can fail, so there is nothing to poll for.
            if jax.process_count() == 1:
                self._response.result()
                self._response = None
                break
            # Alternate: check for a failure elsewhere, and wait briefly for the end of the save.
            self._check_others()
            try:
                self._response.result(timeout=_POLL_SECONDS)
                self._response = None
            except TimeoutError:
                # Pause: if the save itself raised the TimeoutError, `result` returned without waiting.
                time.sleep(_POLL_SECONDS / 10)
        self.end()

    def end(self) -> None:
        """Lets the failures in Orbax's log be printed again.

        After a failed save, call it when the threads of the save have ended.
        """
        # A later save may already have taken over the listener.
        if _listener.target is self:
            _listener.target = None

    def _check_others(self) -> None:
        """Raises if another process has reported a failure."""
        try:
            text = distributed.client().key_value_try_get(self._key)
        except jax.errors.JaxRuntimeError:  # no failure is reported
            return
        self.error = RuntimeError(text)
        raise self.error


class _Listener(logging.Filter):
    """A filter that removes failures of the save `target` from absl's log."""

    target: Background | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to print the record."""
        target = self.target
        # Other libraries have modules with these names too.
        if (
            target is None
            or record.module not in _LOGGING_MODULES
            or "orbax" not in record.pathname
        ):
            return True
        # These modules also log progress and warnings.
        if not record.exc_info or record.exc_info[1] is None:
            return True
        target.fail(record.exc_info[1])
        return False


_listener = _Listener()
# Orbax logs through absl from its own threads, so one filter in the process serves all saves.
absl_logging.get_absl_logger().addFilter(_listener)
# If Ctrl-C ends a read or a save of Orbax, asyncio would report unfinished tasks with tracebacks.
logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)

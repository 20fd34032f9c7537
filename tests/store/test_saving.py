"""Tests that the error of a save in Orbax's threads is taken from the log and is not printed."""

import logging

import pytest
from absl import logging as absl_logging

from lamb_tpu.store.saving import Background

FULL = OSError(28, "No space left on device")


def log(path: str, error: BaseException | None = FULL) -> bool:
    """Logs an error as if from the file `path`; returns whether the record is printed."""
    record = logging.LogRecord(
        "absl", logging.ERROR, path, 1, "failed", (), error and (type(error), error, None)
    )
    return bool(absl_logging.get_absl_logger().filter(record))


FUTURE = "/x/orbax/checkpoint/_src/futures/future.py"


class Response:
    """Replaces Orbax's response to a save; `calls` counts the calls of `result`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.calls = error, 0

    def result(self, timeout: float | None = None) -> bool:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return True


def test_response_is_waited_for_once() -> None:
    background, response = Background(), Response()
    background.wait()  # nothing to wait for
    background.begin()
    background.started(response)
    background.wait()
    background.wait()
    assert response.calls == 1 and background.error is None


def test_failure_is_known_before_the_end() -> None:
    background = Background()
    background.begin()
    assert not log(FUTURE) and background.error is FULL
    assert not log(FUTURE, ValueError("what comes of it")) and background.error is FULL
    background.started(Response())
    with pytest.raises(OSError, match="No space"):
        background.wait()
    assert not log(FUTURE)
    background.end()
    assert log(FUTURE)


def test_failure_that_was_not_logged() -> None:
    background = Background()
    background.begin()
    background.started(Response(FULL))
    with pytest.raises(OSError, match="No space"):
        background.wait()
    background.end()


def test_other_records_are_printed() -> None:
    background = Background()
    assert log(FUTURE)  # the log of another save
    background.begin()
    assert log("/x/other/future.py") and log("/x/orbax/checkpoint/_src/path/deleter.py")
    assert log(FUTURE, None) and background.error is None
    background.started(Response())
    background.wait()
    assert log(FUTURE) and background.error is None


def test_unfinished_tasks_are_not_printed() -> None:
    assert not logging.getLogger("asyncio").isEnabledFor(logging.CRITICAL)

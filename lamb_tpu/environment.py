"""Temporary environment variables."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Sets environment variables for the block, and then restores their previous values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

"""Parameters of tests of which `make test` takes some, and `make test-all` every one."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Optimizers that differ in kind: both of the project's, one of matrices, one without a ratio.
MAIN = ("lamb", "lars", "apollo", "adamw", "scale_by_lamb, scale_by_trust_ratio")


def some(names: Iterable[Any], main: Collection[Any] = MAIN) -> list[Any]:
    """Returns `names` as parameters, of which those outside of `main` are marked long."""
    return [name if name in main else pytest.param(name, marks=pytest.mark.long) for name in names]

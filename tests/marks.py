"""Test parameters: `make test` runs some of them, and `make test-all` runs all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# Different types of optimizers: LAMB and LARS, one for matrices, and one without a trust ratio.
MAIN = ("lamb", "lars", "apollo", "adamw", "scale_by_lamb, scale_by_trust_ratio")


def some(names: Iterable[Any], main: Collection[Any] = MAIN) -> list[Any]:
    """Returns `names` as parameters; those not in `main` get the marker `long`."""
    return [name if name in main else pytest.param(name, marks=pytest.mark.long) for name in names]

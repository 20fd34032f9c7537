"""Finds the real data sets and golden trajectories beside the checkout."""

import os
import pathlib
from typing import NoReturn

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def folder() -> pathlib.Path:
    """Returns the shared folder: `$LAMB_TPU_SHARED`, or `../shared` beside the checkout."""
    return pathlib.Path(os.environ.get("LAMB_TPU_SHARED") or ROOT.parent / "shared")


def shared(*parts: str) -> pathlib.Path:
    """Returns the path of `parts` in the shared folder; skips the calling test if the path is absent."""
    path = folder().joinpath(*parts)
    if not path.exists():
        missing("/".join(parts))
    return path


def missing(name: str) -> NoReturn:
    """Skips the calling test, which needs `name` from the shared folder.

    If `LAMB_TPU_REQUIRE_SHARED` is set, the folder must be complete and the test fails instead; see
    .ci/run.
    """
    reason = (
        f"needs {name} from the folder of data sets and golden trajectories, which is "
        "expected beside the checkout; set LAMB_TPU_SHARED to the folder's path"
    )
    if os.environ.get("LAMB_TPU_REQUIRE_SHARED"):
        pytest.fail(reason)
    pytest.skip(reason)

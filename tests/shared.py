"""Finds the real data sets and golden trajectories that are kept beside the checkout."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def shared(*parts: str) -> pathlib.Path:
    """The path of `parts` in the shared folder; skips the calling test where it is absent.

    The folder is `$LAMB_TPU_SHARED`, or `../shared` beside the checkout. Where it has to be there,
    `LAMB_TPU_REQUIRE_SHARED` is set, and absence is a failure instead of a skip: see .ci/run.
    """
    folder = pathlib.Path(os.environ.get("LAMB_TPU_SHARED", ROOT.parent / "shared"))
    path = folder.joinpath(*parts)
    if not path.exists():
        reason = (
            f"needs {'/'.join(parts)} of the folder of data sets and golden trajectories that is "
            "kept beside the checkout; set LAMB_TPU_SHARED to its path"
        )
        if os.environ.get("LAMB_TPU_REQUIRE_SHARED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path

"""Cases that failed once: each passes now. `python -m tests.fuzz --write` adds a case to `found`."""

import pathlib

import pytest

from tests.fuzz import checking, trying
from tests.fuzz.case import Case

FOUND = sorted((pathlib.Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_found_case_passes(path: pathlib.Path) -> None:
    assert not trying.attempt(Case.from_json(path.read_text()), checking.Compiles()).problems

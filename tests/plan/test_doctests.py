"""Runs the examples in the docstrings of lamb_tpu.cost, launch and plan."""

import doctest
import importlib
import pkgutil

import pytest


@pytest.mark.parametrize("package, attempted", [("cost", 17), ("launch", 5), ("plan", 13)])
def test_docstrings(package: str, attempted: int) -> None:
    path = importlib.import_module(f"lamb_tpu.{package}").__path__
    names = {each.name for each in pkgutil.iter_modules(path)} - {"__main__"}
    results = [
        doctest.testmod(importlib.import_module(f"lamb_tpu.{package}.{name}")) for name in names
    ]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) == attempted

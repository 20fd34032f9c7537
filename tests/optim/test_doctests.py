"""Runs the examples in the docstrings of lamb_tpu.optim."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name, fewest", [
    ("", 8), (".parameters", 3), (".trust_ratio", 4), (".lamb", 5), (".lars", 10),
    (".schedules", 7), (".durations", 5), (".factory", 1),
])
def test_docstrings(name, fewest):
    module = importlib.import_module("lamb_tpu.optim" + name)
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= fewest

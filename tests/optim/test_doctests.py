"""Runs the examples in the docstrings of lamb_tpu.optim."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name, fewest",
    [
        ("", 8),
        (".parameters", 3),
        (".trust_ratio", 4),
        (".lamb", 5),
        (".lars", 9),
        (".novograd", 6),
        (".diffgrad", 5),
        (".rmsprop_tf", 5),
        (".adagrad_norm", 8),
        (".apollo", 4),
        (".agvm", 9),
        (".modules", 1),
        (".rounding", 7),
        (".schedules", 14),
        (".scaling", 8),
        (".refinement", 2),
        (".durations", 5),
        (".factory", 2),
        (".sharding", 3),
        (".chains", 6),
        (".directions", 13),
        (".clipping", 3),
        (".presets", 1),
        (".readings", 6),
    ],
)
def test_docstrings(name, fewest):
    module = importlib.import_module("lamb_tpu.optim" + name)
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted >= fewest

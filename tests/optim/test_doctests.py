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
        (".reducing", 3),
        (".rounding", 7),
        (".schedules", 14),
        (".scaling", 7),
        (".refinement", 2),
        (".durations", 5),
        (".factory", 2),
        (".sharding", 3),
        (".chains", 6),
        (".directions", 13),
        (".clipping", 3),
        (".presets", 1),
        (".diagnostics", 6),
    ],
)
def test_docstrings(name, fewest):
    run("lamb_tpu.optim" + name, fewest)


def run(module, fewest):
    result = doctest.testmod(importlib.import_module(module))
    assert result.failed == 0
    assert result.attempted >= fewest

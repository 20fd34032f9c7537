"""Runs the examples in the docstrings of lamb_tpu.batching."""

import pytest

from tests.optim.test_doctests import run


@pytest.mark.parametrize(
    "name, fewest",
    [
        ("critical", 3),
        ("learning_rate", 1),
        ("noise_scale", 4),
        ("path", 3),
        ("similarity", 4),
        ("variance", 3),
        ("rules.base", 1),
        ("rules.noise_scale", 2),
        ("rules.ramp", 6),
        ("rules.simigrad", 3),
        ("rules.variance_tests", 6),
    ],
)
def test_docstrings(name: str, fewest: int) -> None:
    run(f"lamb_tpu.batching.{name}", fewest)

"""Tests that config values that no run can use are rejected with key, problem and remedy."""

import math
from typing import Any

import pytest
from ml_collections import ConfigDict

from lamb_tpu.config import base_config
from lamb_tpu.spec import parse
from tests.raising import rejected


def _changed(key: str, value: Any) -> ConfigDict:
    config = base_config()
    with config.unlocked(), config.ignore_type():
        *sections, last = key.split(".")
        node = config
        for name in sections:
            node = node[name]
        node[last] = value
    return config


def _deep() -> list:
    actual: list = []
    for _ in range(100_000):
        actual = [actual]
    return actual


NOT_FINITE = ("is not finite", "use a finite number")


@pytest.mark.parametrize(
    "key, value, problem, remedy",
    [
        ("batch_rule", ConfigDict({"name": ["ramp"]}), "is not a name", "the name of a component"),
        ("parallel.exchange.name", ["bfloat16"], "is not a name", "use the name of a component"),
        ("model.name", None, "is not a name", "use the name of a component"),
        ("optimizer.name", 3, "is not a name", "use the name of a component"),
        ("model.num_layers", 10**9, "is out of range", "use at most 1,000"),
        ("task.beam", 10**9, "is out of range", "use at most 256"),
        ("task.max_length", 10**12, "is out of range", "use at most 4,096"),
        ("model.hidden_sizes", (8, 10**12), "is out of range", "use at most 16,777,216"),
        ("batch_size", 10**12, "is out of range", "use at most 2,147,483,647"),
        ("checkpoint.keep", 10**12, "is out of range", "use at most 1,000,000"),
        ("data.options.threads", 10**9, "is out of range", "use at most 1,024"),
        pytest.param("seed", 10**5_000, "cannot be saved", "use numbers", id="digits"),
        ("guards.hang_seconds", 1e300, "is out of range", "use at most 315,360,000"),
        ("optimizer.eps", math.nan, *NOT_FINITE),
        ("optimizer.eps", math.inf, *NOT_FINITE),
        ("parallel.exchange.eta", math.nan, *NOT_FINITE),
        ("optimizer.phi_bounds", (0.0, math.nan), "contains NaN", "use numbers only"),
        ("data.options.vocab", "\udcff", "is not UTF-8", "use text in UTF-8"),
        ("data.train_split", "x" * 10**6, "has 1,000,000 characters", "use at most 10,000"),
        ("optimizer.rules", _deep(), "cannot be saved", "use numbers, text, booleans"),
    ],
)
def test_values_that_no_run_can_use(key: str, value: Any, problem: str, remedy: str) -> None:
    config = _changed(key, value)
    name = "batch_rule.name" if key == "batch_rule" else key
    with rejected(f"config.{name}", problem=problem, remedy=remedy) as raised:
        parse(config)
    assert len(str(raised.value)) < 300


def test_infinite_bounds_and_numbers_of_custom_code_are_accepted() -> None:
    parse(_changed("optimizer.phi_bounds", (0.0, math.inf)))
    config = _changed("model.name", "my_module:Model")
    with config.unlocked():
        config.model.num_layers = 10**12
    parse(config)

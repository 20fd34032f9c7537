"""Configs of runs with a batch rule, by the rule's name; `tests.killing` runs them."""

from typing import Any

from ml_collections import ConfigDict

from tests import tiny

RULES: dict[str, dict[str, Any]] = {"noise_scale": {"decay": 0.5}, "simigrad": {"target": 0.5}}


def config(name: str) -> ConfigDict:
    rule = {"name": name, "lower": 32, "upper": 128, "interval": 3, "scaling": "sqrt"}
    return tiny.digits(
        accumulation_steps=4,
        duration="120 steps",
        batch_rule=ConfigDict(rule | RULES[name]),
        checkpoint__every="256 examples",
        checkpoint__keep=3,
        eval__every="2560 examples",
        log__every="96 examples",
    )

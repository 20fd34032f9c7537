"""Tests the config schema: every key has a description and a default, and its bounds are checked."""

import math
from typing import Any

import pytest

from lamb_tpu import config as config_lib
from lamb_tpu import spec_keys
from lamb_tpu.spec import parse
from tests import tiny
from tests.raising import rejected

KEYS = {key.path: key for key in spec_keys.keys()}


@pytest.mark.parametrize("path", KEYS)
def test_a_key_says_what_it_is(path: str) -> None:
    text = KEYS[path].details.text
    assert text.endswith(".") and text[0].isupper()


def test_the_base_config_has_the_defaults() -> None:
    flat = config_lib.flatten(config_lib.base_config())
    simple = {path: key for path, key in KEYS.items() if path in flat}
    assert len(simple) > 60
    for path, key in simple.items():
        assert flat[path] == (list(key.default) if isinstance(key.default, tuple) else key.default)


def bounded() -> list[tuple[str, Any, Any]]:
    """Returns for each bound the key, a valid value and an invalid value."""
    actual: list[tuple[str, Any, Any]] = []
    for path, key in KEYS.items():
        details, one = key.details, 1 if key.kind is int else 0.5
        if details.least > -math.inf:
            actual.append((path, key.kind(details.least), key.kind(details.least) - one))
        if details.most < math.inf:
            actual.append((path, key.kind(details.most), key.kind(details.most) + one))
        if details.below < math.inf:
            actual.append((path, key.kind(details.below) - one, key.kind(details.below)))
        if details.known:
            actual += [(path, word, "neither") for word in details.known]
    return actual


@pytest.mark.parametrize("path, good, bad", bounded())
def test_bounds(path: str, good: Any, bad: Any) -> None:
    parse(tiny.digits(**{path.replace(".", "__"): good}))
    problem = "is unknown" if bad == "neither" else "is out of range"
    with rejected(f"config.{path}", bad, problem, "use "):
        parse(tiny.digits(**{path.replace(".", "__"): bad}))

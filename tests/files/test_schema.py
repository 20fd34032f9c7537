"""The error for a value that violates a schema names the file, the key, the value and valid values."""

from typing import Annotated, Any, Literal

import msgspec
import pytest

from lamb_tpu.errors import shown
from lamb_tpu.files.schema import convert
from tests.raising import rejected


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(gt=0, le=9)]
    word: Annotated[str, msgspec.Meta(max_length=3)] = ""
    side: Literal["left", "right"] = "left"


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    items: Annotated[list[Inner], msgspec.Meta(max_length=2)]
    one: Inner | None = None


@pytest.mark.parametrize(
    "value, message",
    [
        ([], ("content", [], "is not valid", "use a section of keys")),
        ({}, ("items", ..., "is missing", "add it")),
        ({"items": [], "more": 1}, ("more", ..., "is unknown", "use items or one")),
        ({"items": [{}]}, ("items[1].count", ..., "is missing", "add it")),
        (
            {"items": [{"count": 1}, {"count": 10}]},
            ("items[2].count", 10, "is not valid", "use at most 9"),
        ),
        ({"items": [{"count": 0}]}, ("items[1].count", 0, "is not valid", "use at least 1")),
        (
            {"items": [{"count": True}]},
            ("items[1].count", True, "is not valid", "use the type int"),
        ),
        (
            {"items": [{"count": 10**5_000}]},
            ("items[1].count", 10**5_000, "is not valid", "use at most 9"),
        ),
        ({"items": [{"count": 1}] * 3}, ("items", ..., "is not valid")),
        ({"items": 5}, ("items", 5, "is not valid", "use a list")),
        (
            {"items": [], "one": {"count": 1, "word": "abcd"}},
            ("one.word", "abcd", "is not valid", "use at most 3 characters"),
        ),
        (
            {"items": [], "one": {"count": 1, "side": "up"}},
            ("one.side", "up", "is unknown", "use left or right"),
        ),
        (
            {"items": [], "one": {"count": 1, "sid": "up"}},
            ("one.sid", ..., "is unknown", "use count, word or side"),
        ),
    ],
)
def test_errors(value: Any, message: tuple[Any, ...]) -> None:
    key, *others = message
    with rejected(f"a.toml: {key}", *others):
        convert(value, Outer, "a.toml")


def test_values_in_messages() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[[[...]]]" and shown({"a": (1,)}) == "{'a': (1,)}"
    assert len(shown("x" * 10**6)) == 100 and shown(float("nan")) == "nan"
    assert len(shown([10**3_000] * 1_000)) == 100


@pytest.mark.parametrize(
    "value", [{"items": [{"count": 1, "side": "a\ud800"}]}, {"items": [], "a\ud800": 1}]
)
def test_half_a_character_is_named(value: Any) -> None:
    message = ("a.json: one", ..., "has a lone surrogate, '\\ud800', which is not a character")
    with rejected(*message):
        convert(value, Outer, "a.json", "one")

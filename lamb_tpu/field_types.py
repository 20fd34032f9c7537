"""Types of config keys and component fields: converting text, checking values, describing types."""

import ast
import collections.abc
import inspect
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from lamb_tpu.errors import UserError, shown

TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
_NAMES = {"inf": math.inf, "nan": math.nan, "true": True, "false": False, "none": None}
UNFIT: Any = object()  # the result of `fit` for a value of another type


def convert(where: str, text: str, kind: Any, default: Any = inspect.Parameter.empty) -> Any:
    """Converts text from the command line to a value of the type `kind`.

    Ignores types that a config cannot hold, such as the schedule in `float | Schedule`. The error
    names the key `where` and gives `default` as an example.

    >>> convert("config.optimizer.phi_bounds", "(0, inf)", tuple[float, float])
    (0.0, inf)
    """
    alternatives = members(kind)
    # If only text is valid, 1e-3 stays text. For other types, try a Python literal before the text.
    candidates: list[Any] = (
        [text] if str in alternatives and set(alternatives) <= {str, type(None)} else []
    )
    if text.lower() == "none":
        candidates.insert(0, None)
    try:
        tree = _Names().visit(ast.parse(text.strip(), mode="eval"))
        candidates.append(ast.literal_eval(tree))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass  # not a literal; deeply nested brackets raise the last two
    for candidate in [*candidates, text]:
        for member in alternatives:
            value = fit(candidate, member)
            if value is not UNFIT:
                return value
    raise UserError(where, text, "has the wrong type", f"use {describe(kind, default)}")


def check(where: str, value: Any, kind: Any, default: Any = inspect.Parameter.empty) -> None:
    """Rejects a config value that does not have the type of its key or field; see `convert`.

    Checks numbers, text, booleans and tuples of them; the component checks other types. None is
    valid if `default` is None.
    """
    if value is None and default is None:
        return
    # A config cannot hold functions or other objects.
    alternatives = [each for each in members(kind) if not _is_object(each)]
    if not alternatives or not all(map(_is_plain, alternatives)):
        return
    if all(fit(value, each) is UNFIT for each in alternatives):
        raise UserError(where, value, "has the wrong type", f"use {describe(kind, default)}")


def describe(kind: Any, default: Any = inspect.Parameter.empty) -> str:
    """Describes the values of a type, with the default as an example.

    >>> describe(int | None), describe(float, 0.9)
    ('a whole number or None', 'a number, such as 0.9')
    """
    # Simple types first: 'a number or a tuple of numbers'.
    alternatives = sorted(members(kind), key=lambda each: (each is type(None), is_sequence(each)))
    text = " or ".join(dict.fromkeys(filter(None, map(describe_type, alternatives)))) or "text"
    has_example = default is not inspect.Parameter.empty and default not in (None, "", ())
    return f"{text}, such as {shown(default)}" if has_example else text


def _is_object(kind: Any) -> bool:
    if kind is Any or kind in TYPES or is_sequence(kind):
        return False
    return isinstance(kind, type) or typing.get_origin(kind) is collections.abc.Callable


def _is_plain(kind: Any) -> bool:
    """Returns whether `check` supports a type: numbers, text and sequences of them."""
    if is_sequence(kind):
        inner = [k for k in typing.get_args(kind) if k is not Ellipsis]
        return all(_is_plain(member) for k in inner for member in members(k))
    return kind in TYPES


class _Names(ast.NodeTransformer):
    """Replaces words that Python parses as names, such as inf and true, with their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        word = node.id.lower()
        return ast.copy_location(ast.Constant(_NAMES[word]), node) if word in _NAMES else node


def members(kind: Any) -> list[Any]:
    """Returns a union's types, with int before float and None last; for any other type, only that type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        alternatives = [each for member in typing.get_args(kind) for each in members(member)]
        # int comes first, so that 3 stays an int for int | float.
        return sorted(alternatives, key=lambda each: (each is type(None), each is float))
    return [Any] if isinstance(kind, str) or kind is inspect.Parameter.empty else [kind]


def is_sequence(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str


def fit(value: Any, kind: Any) -> Any:
    """Returns a value converted to a type, or `UNFIT` if the value does not have that type."""
    if kind is Any:
        return value
    # Use type(), not isinstance(): True is an int.
    if kind is float:
        return float(value) if type(value) in (int, float) else UNFIT
    if kind in TYPES:
        return value if type(value) is kind else UNFIT
    if isinstance(value, (tuple, list)) and is_sequence(kind):
        inner = typing.get_args(kind) or (Any,)
        # Sequence[X] and tuple[X, ...] have any length.
        if typing.get_origin(kind) is not tuple or inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        if len(inner) != len(value):
            return UNFIT
        fitted = tuple(
            next((item for each in members(k) if (item := fit(v, each)) is not UNFIT), UNFIT)
            for v, k in zip(value, inner)
        )
        return UNFIT if any(item is UNFIT for item in fitted) else fitted
    if isinstance(value, dict) and typing.get_origin(kind) is Mapping:
        return value
    return UNFIT


def _describe_items(kind: Any, plural: str = "") -> str:
    """Describes a sequence type without the article 'a'.

    >>> _describe_items(tuple[tuple[int, int], ...])
    ' tuple of tuples of 2 whole numbers'
    """
    inner = [k for k in typing.get_args(kind) if k is not Ellipsis]
    fixed = typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind)
    what = f" tuple{plural}"
    if not inner:
        return what
    item = inner[0] if len(set(inner)) == 1 else Any
    nested = _describe_items(item, "s").strip() if is_sequence(item) else _PLURALS.get(item, "")
    if not fixed:
        return f"{what} of {nested}" if nested else what
    return f"{what} of {len(inner)} {nested or 'values'}"


def describe_type(kind: Any) -> str:
    """Describes a type for a message; returns '' for a type that a config cannot hold."""
    if is_sequence(kind):
        return f"a{_describe_items(kind)}"
    if typing.get_origin(kind) is Mapping:
        return "a dictionary"
    return TYPES.get(kind, "")

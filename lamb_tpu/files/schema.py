"""Checks the values of a file against a typed schema; errors name the file, the key and the value.

A schema is a `msgspec.Struct` with types and bounds, which msgspec checks.
"""

import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, TypeVar, cast

import msgspec

from lamb_tpu.errors import UserError, listed, shown, unknown

ValueT = TypeVar("ValueT")
_PROBLEM = re.compile(r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_PART = re.compile(r"\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "below", ">": "above"}
_LONGEST = 200  # characters of a key in a message
_TYPES = {"object": "a section of keys", "array": "a list", "int | float | str": "a number or text"}


def convert(value: Any, kind: type[ValueT] | UnionType, file: object, where: str = "") -> ValueT:
    """Converts a value from a file to an instance of a schema, or of any type that msgspec supports.

    Args:
      value: the parsed content of the file, or the part of it at the key `where`.
      kind: the schema or type.
      file: the file, for messages.
      where: key of the value in the file; '' for the full file. Messages count list items from 1.
    """
    try:
        return cast(ValueT, msgspec.convert(value, kind))
    except msgspec.ValidationError as error:
        raise _error(file, str(error), value, kind, where) from None
    except UnicodeEncodeError as error:  # JSON can escape a lone surrogate: "\\ud800"
        half = shown(error.object[error.start : error.end])
        problem = f"has a lone surrogate, {half}, which is not a character"
        raise UserError(f"{file}: {where or 'a text'}", ..., problem, "remove it") from None


def _error(file: object, text: str, value: Any, kind: Any, where: str) -> UserError:
    match = _PROBLEM.fullmatch(text)
    assert match is not None  # the pattern matches any text
    node, problem = msgspec.inspect.type_info(kind), match["text"]
    for part in _PART.finditer(match["path"] or ""):
        if part["name"] is not None:
            where, value = f"{where}.{part['name']}".lstrip("."), value[part["name"]]
        elif part["index"] is not None:
            where, value = f"{where}[{int(part['index']) + 1}]", value[int(part["index"])]
        else:  # msgspec does not name the key of a dictionary
            break
        node = _inner(node, part["name"])
    if matched := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", problem):
        key = f"{file}: {f'{where}.{matched[2]}'.lstrip('.')[:_LONGEST]}"
        if matched[1].startswith("missing"):
            return UserError(key, ..., "is missing", "add it")
        struct = _plain(node, msgspec.inspect.StructType)
        names = [field.encode_name for field in getattr(struct, "fields", ())]
        return UserError(key, ..., "is unknown", f"use {listed(names)}")
    if problem.startswith("Invalid enum value"):
        values: Sequence[Any] = getattr(_plain(node, msgspec.inspect.LiteralType), "values", ())
        return unknown(f"{file}: {where}", value, filter(None, values))
    return UserError(f"{file}: {where or 'content'}", value, "is not valid", _wanted(problem))


def _wanted(problem: str) -> str:
    if matched := re.fullmatch(r"Expected `(.*)`, got `.*`", problem):
        return f"use {_TYPES.get(matched[1], f'the type {matched[1]}')}"
    if matched := re.fullmatch(r"Expected `(\w+)` of length (<=|>=|<|>) (\d+)", problem):
        unit = "characters" if matched[1] == "str" else "items"
        return f"use {_BOUNDS[matched[2]]} {matched[3]} {unit}"
    if matched := re.fullmatch(r"Expected `(?:int|float)` (<=|>=|<|>) (.*)", problem):
        return f"use {_BOUNDS[matched[1]]} {float(matched[2]):.15g}"
    return f"correct it ({problem})"  # msgspec's text, for messages not covered above


def _inner(node: Any, name: str | None) -> Any:
    """Returns the type of a struct's field, or of a list's items if `name` is None."""
    if name is None:
        return getattr(_plain(node, msgspec.inspect.ListType), "item_type", None)
    fields = getattr(_plain(node, msgspec.inspect.StructType), "fields", ())
    return next((field.type for field in fields if field.encode_name == name), None)


def _plain(node: Any, kind: type) -> Any:
    """Returns a union's first member of type `kind`; returns other nodes unchanged."""
    members = getattr(node, "types", ())
    return next((member for member in members if isinstance(member, kind)), node)

"""Messages for errors in a config file: the line, the key, the value, and the known keys."""

import traceback
from types import FrameType
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu import field_types
from lamb_tpu.errors import UserError, unknown_key
from lamb_tpu.spec_checks import has_named_fields


def failure(path: str, error: BaseException) -> UserError:
    """Turns an exception that the config file `path` raised into a UserError."""
    # Show the innermost line within the config file. After a syntax error, no frame belongs
    # to the file, but the exception has the line.
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    line = getattr(error, "lineno", lines[-1] if lines else None)
    where = f"the config file {path} fails{f' at line {line}' if line else ''}"
    if (of_key := _of_key(path, error)) is not None:
        return of_key.at(where)
    text = " ".join(str(error.args[0] if error.args else "").split())
    return UserError(where, problem=f": {type(error).__name__}: {text}")


def _of_key(path: str, error: BaseException) -> UserError | None:
    """Returns the error for a key that a ConfigDict rejected; None for other exceptions.

    ConfigDict's message does not name the section, so the section is read from the method's stack frame.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = frames[-1].f_locals if frames else {}
    section, key = last.get("self"), last.get("key", last.get("attribute"))
    if not isinstance(section, ConfigDict) or not isinstance(key, str):
        return None
    where, config = _find(section, [frame for frame in frames if frame.f_code.co_filename == path])
    if config is None:
        return None
    if isinstance(error, TypeError) and key in section and "value" in last:
        old, value = section[key], last["value"]
        if isinstance(old, ConfigDict):
            return UserError(f"{where}.{key}", value, "is not a section", "use a ConfigDict")
        # A default of None is a placeholder for text.
        remedy = f"use {field_types.describe(str if old is None else type(old), old)}"
        return UserError(f"{where}.{key}", value, "has the wrong type", remedy)
    if key in section or not isinstance(error, (AttributeError, KeyError)):
        return None
    owner, known, remedy = "", list(section), ""
    if has_named_fields(where) and "value" in last:
        name, fields = _fields(where, config)
        if key in fields:
            # The base config has only the name in this section, so the user must replace the section.
            replacement = {**section.to_dict(), key: last["value"]}
            return UserError(
                f"{where}.{key}",
                problem="is not set in the base config, which is locked",
                remedy=f"set the section with {where} = ConfigDict({replacement!r}), or give "
                f"--{where}.{key}={last['value']!r} on the command line",
            )
        if fields:
            owner, known = repr(name), fields
        if "name" in section:
            remedy = (
                f"; to use another name, replace the section: {where} = ConfigDict({{'name': ...}})"
            )
    unknown = unknown_key(where, key, known, owner)
    if "did you mean" not in unknown.remedy:
        unknown = UserError(unknown.key, problem=unknown.problem, remedy=unknown.remedy + remedy)
    return unknown


def _find(section: ConfigDict, frames: list[FrameType]) -> tuple[str, ConfigDict | None]:
    """Returns a section's dotted name, such as config.task, and the config that contains it."""
    roots = [
        value
        for frame in reversed(frames)
        for value in frame.f_locals.values()
        if isinstance(value, ConfigDict) and "batch_size" in value
    ]
    named = ((_path(root, section, "config"), root) for root in roots)
    return next(((name, root) for name, root in named if name), ("", None))


def _path(node: ConfigDict, section: ConfigDict, name: str) -> str | None:
    if node is section:
        return name
    below = (
        _path(value, section, f"{name}.{key}")
        for key, value in node.items()
        if isinstance(value, ConfigDict)
    )
    return next(filter(None, below), None)


def _fields(where: str, config: ConfigDict) -> tuple[Any, list[str]]:
    """Returns the name and fields of a section's component; no fields if the component is unknown."""
    from lamb_tpu.run.categories import REGISTRIES  # late: it imports all components

    registry = REGISTRIES.get(where.removeprefix("config."))
    if registry is None:
        return None, []
    name = registry.name_of(config)
    try:
        return name, list(registry.fields(name))
    except UserError:
        return name, []

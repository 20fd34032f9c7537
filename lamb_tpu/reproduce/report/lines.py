"""The lines of a table's figures: their names, their styles, and their division among axes."""

from collections.abc import Mapping
from typing import Any, TypeVar

from lamb_tpu import style

T = TypeVar("T")


def panels(lines: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Splits lines among axes, keyed by title, so that all lines in the same axes look different.

    Lines are grouped by optimizer, the first word of their names.
    """
    if len(lines) <= style.MOST:
        return {"": dict(lines)}
    groups: dict[str, list[str]] = {}
    for name in lines:
        groups.setdefault(name.partition("-")[0], []).append(name)
    if len(groups) > len(lines) / 2:  # the first words do not form groups
        groups = {"": list(lines)}
    result: dict[str, dict[str, T]] = {}
    for group, names in groups.items():
        title = optimizer_name(group) if group else "cells"
        result |= chunks(title, {name: lines[name] for name in names})
    return result


def chunks(title: str, lines: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Splits lines among as few axes as possible, keyed by title, such as 'LAMB, 1 of 2'."""
    split = style.chunks(list(lines))
    ends = [f", {number} of {len(split)}" for number in range(1, len(split) + 1)]
    return {
        title + (end if len(split) > 1 else ""): {name: lines[name] for name in names}
        for end, names in zip(ends, split)
    }


def optimizer_name(optimizer: str) -> str:
    """Returns an optimizer's name as figures and pages show it."""
    look = style.OPTIMIZERS.get(optimizer.removesuffix("_tf"))
    return optimizer if look is None else look.name


def looks(optimizers: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Returns `style.looks` of lines, given the optimizer of each line."""
    return style.looks(
        {name: optimizer.removesuffix("_tf") for name, optimizer in optimizers.items()}
    )

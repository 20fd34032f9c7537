"""Reads checkpoints in which fields of the state have the names of earlier versions."""

from collections.abc import Mapping
from typing import Any

import jax

from lamb_tpu.types import PyTree

# Current name of a NamedTuple's field -> its name in checkpoints of checkouts before 0.2.0.
_EARLIER = {"diagnostics": "readings"}


def as_stored(abstract: PyTree, stored: Mapping[str, Any]) -> Any:
    """Returns `abstract` with the field names of a checkpoint, so that Orbax can restore it.

    A NamedTuple that has a renamed field becomes a dict.

    Args:
      abstract: pytree in which NamedTuples have the current names of their fields.
      stored: Orbax's metadata of the checkpoint, as nested dicts and lists.
    """

    def convert(path: tuple[Any, ...], node: Any) -> Any:
        if not _has_renamed(node):
            return node
        there = _at(stored, path)
        return {
            _EARLIER[name] if _EARLIER.get(name) in there and name not in there else name: value
            for name, value in node._asdict().items()
        }

    return jax.tree_util.tree_map_with_path(convert, abstract, is_leaf=_has_renamed)


def as_now(loaded: Any, abstract: PyTree) -> Any:
    """Converts `loaded`, which was read with `as_stored(abstract, ...)`, to the types of `abstract`."""

    def convert(node: Any, there: Any) -> Any:
        if not _has_renamed(node) or not isinstance(there, dict):
            return there
        earlier = {name: there.get(_EARLIER.get(name)) for name in node._fields}
        return type(node)(**(earlier | {n: there[n] for n in node._fields if n in there}))

    return jax.tree.map(convert, abstract, loaded, is_leaf=_has_renamed)


def _has_renamed(node: Any) -> bool:
    return not _EARLIER.keys().isdisjoint(getattr(node, "_fields", ()))


def _at(stored: Any, path: tuple[Any, ...]) -> Any:
    """Returns the subtree of Orbax's metadata at a JAX key path; an empty dict if there is none."""
    for key in path:
        name = jax.tree_util.keystr((key,), simple=True)
        if isinstance(stored, list | tuple) and name.isdecimal() and int(name) < len(stored):
            stored = stored[int(name)]
        elif isinstance(stored, Mapping) and name in stored:
            stored = stored[name]
        else:
            return {}
    return stored if isinstance(stored, Mapping) else {}

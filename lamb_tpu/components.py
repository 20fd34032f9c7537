"""Registries of components: models, tasks, data sets, optimizers, schedules, batch rules, exchanges.

A component is a class or function with a docstring and typed arguments. A config names it, either
by its shipped name or as 'package.module:Name', and sets its arguments as fields of a section.
"""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from lamb_tpu import custom, field_types, spec_keys
from lamb_tpu.errors import UserError, hint, listed, unknown_key

Component = Callable[..., Any]
MISSING = inspect.Parameter.empty  # the default of a field that a config must set


class Field(NamedTuple):
    """A field of a component: its declared type and its default."""

    type: Any
    default: Any = MISSING


class Registry(dict[str, Any]):
    """The components of one category: shipped components by name, and custom components by import.

    >>> def square(size: int = 2): "A square."
    >>> shapes = Registry("shape", {"square": square})
    >>> shapes.fields("square")
    {'size': Field(type=<class 'int'>, default=2)}
    >>> shapes.check("square", {"szie": 3})
    Traceback (most recent call last):
    lamb_tpu.errors.UserError: config.shape.szie is unknown; shape 'square' has: name, size; did you mean \
    config.shape.size?

    Args:
      noun: word for a component in messages, such as 'model'.
      shipped: the components by name.
      section: config section with the component's fields; '': the section's name is `noun`.
      name_key: config key that names the component; '': the key `name` of the section.
      hidden: arguments that only the trainer sets.
      fields: function that returns the fields of a component, in place of `fields_of`.
      prefixes: components by the prefix of their names, such as 'tfds:'.
      default_name: name to use if the config has none; None means that the config must have one.
      none_is_default: whether None as the value of a field stands for the field's default.
    """

    def __init__(
        self,
        noun: str,
        shipped: Mapping[str, Any],
        *,
        section: str = "",
        name_key: str = "",
        hidden: Collection[str] = (),
        fields: Callable[[Any], dict[str, Field]] | None = None,
        prefixes: Mapping[str, Any] | None = None,
        default_name: str | None = None,
        none_is_default: bool = False,
    ) -> None:
        super().__init__(shipped)
        self.noun, self.section = noun, section or noun
        self.name_key = name_key or f"{self.section}.name"
        self.prefixes, self.default_name = dict(prefixes or {}), default_name
        self.none_is_default = none_is_default
        self._fields = fields or (lambda made: fields_of(made, hidden))

    @property
    def named_in_section(self) -> bool:
        """True if the section with the fields also has the key `name`; False for data and schedules."""
        return self.name_key == f"{self.section}.name"

    def is_custom(self, name: object) -> bool:
        """Returns whether a name refers to a custom component, 'package.module:Name'."""
        return custom.is_custom(name) and not str(name).startswith(tuple(self.prefixes))

    def find(self, name: Any) -> Any:
        """Looks up a component by name; imports the module of a custom component.

        Call `trust.check` first for a stored config, which may come from someone else.
        """
        if self.is_custom(name):
            return custom.find(name, f"config.{self.name_key}")
        if isinstance(name, str):
            if name in self:
                return self[name]
            for prefix, component in self.prefixes.items():
                if name.startswith(prefix):
                    return component
        key, form = f"config.{self.name_key}", f"'package.module:Name' for a custom {self.noun}"
        remedy = f"use {listed([*self, *(f'{each}NAME' for each in self.prefixes), form])}"
        if name is None:
            raise UserError(key, ..., "is missing", remedy)
        raise UserError(key, name, "is unknown", remedy + hint(str(name), self, f"{key}="))

    def fields(self, name: Any) -> dict[str, Field]:
        """Returns the fields of a component, with their types and defaults."""
        return self._fields(self.find(name))

    def keys_of(self, name: Any) -> dict[str, Field]:
        """Returns the keys of a component's section: `name`, if the section has it, and the fields."""
        first = {"name": Field(str, self.default_name or MISSING)} if self.named_in_section else {}
        return first | self.fields(name)

    def name_of(self, *configs: Mapping[str, Any] | None) -> Any:
        """Returns the component's name from the first of `configs` that has it, or the default name."""
        for node in configs:
            value: Any = node
            for part in self.name_key.split("."):
                value = value.get(part) if hasattr(value, "get") else None
            if value is not None:
                return value
        return self.default_name

    def name_in(self, section: spec_keys.Component) -> Any:
        """Returns the name in a parsed section, or the default name."""
        return section.name if section.has_name else self.default_name

    def check(self, name: Any, given: Mapping[str, Any]) -> None:
        """Rejects unknown fields, values of the wrong type, and missing required fields."""
        known = self.fields(name)
        for key, value in given.items():
            if key not in known:
                raise self.unknown(key, name)
            if value is not None or not self.none_is_default:
                field_types.check(f"config.{self.section}.{key}", value, *known[key])
        missing = [
            f"config.{self.section}.{key}"
            for key, field in known.items()
            if field.default is MISSING and key not in given
        ]
        if missing:
            is_, it = ("is", "it") if len(missing) == 1 else ("are", "them")
            remedy = f"set {it}, because {self.noun} {name!r} has no default for {it}"
            raise UserError(" and ".join(missing), ..., f"{is_} missing", remedy)

    def unknown(self, key: str, name: Any, where: str = "") -> UserError:
        """Returns the error for a field that a component does not have.

        `where` is the full key of the section, if it is not 'config.SECTION'.
        """
        owner = f"{self.noun} {name!r}"
        return unknown_key(where or f"config.{self.section}", key, self.keys_of(name), owner)

    def make(self, name: Any, given: Mapping[str, Any], **fixed: Any) -> Any:
        """Checks the fields that a config sets, and builds the component; the trainer sets `fixed`."""
        self.check(name, given)
        made = self.find(name)
        with self.making(name):
            return made(**fixed, **given)

    def making(self, name: Any) -> contextlib.AbstractContextManager[None]:
        """Turns an error in the block into a UserError if the component `name` is custom."""
        if self.is_custom(name):
            return custom.making(name, f"config.{self.name_key}")
        return contextlib.nullcontext()


def fields_of(made: Component, hidden: Collection[str] = ()) -> dict[str, Field]:
    """Returns the arguments of a class or function, or a dataclass's fields, except those in `hidden`."""
    read: Iterable[tuple[str, Any, Any]]
    if isinstance(made, type) and dataclasses.is_dataclass(made):
        read = [(f.name, f.type, _default(f)) for f in dataclasses.fields(made) if f.init]
    else:
        read = [(p.name, p.annotation, p.default) for p in parameters(made)]
    return {
        name: Field(_resolved(kind, made), _plain(default))
        for name, kind, default in read
        if name not in hidden
    }


def parameters(made: Component) -> list[inspect.Parameter]:
    """Returns the named parameters of a function, or of a class's `__init__`."""
    init = inspect.getattr_static(made, "__init__")
    has_init = isinstance(made, type) and init is not object.__init__
    # Read `__init__`, because NNX's metaclass hides the signature of a class.
    try:
        listed = list(inspect.signature(init if has_init else made).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        return []
    # The first parameter of `__init__` is self.
    return [
        parameter
        for parameter in listed[1 if has_init else 0 :]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    """Replaces named tuples, which a config cannot hold, with plain tuples."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _resolved(kind: Any, made: Component) -> Any:
    """Returns an annotation as a type; `Any` if the annotation is missing or cannot be resolved."""
    if isinstance(kind, str):  # under `from __future__ import annotations`
        module = sys.modules.get(getattr(made, "__module__", None) or "")
        try:
            kind = eval(kind, dict(vars(module)) if module else {})
        except Exception:
            # The annotation may name a class that is imported for type checkers only.
            return Any
    return Any if kind is MISSING else kind

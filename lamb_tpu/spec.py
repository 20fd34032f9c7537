"""Parsing of configs into typed, frozen values.

Users write a `ConfigDict`, which commands first convert with `parse`. All other code takes a
`Spec`, or only the section that it needs. `as_dict` converts a `Spec` back to nested
dictionaries, and `flatten` converts it to the form of config.json.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from lamb_tpu import field_types, spec_checks
from lamb_tpu.errors import UserError, unknown_key
from lamb_tpu.spec_keys import Component, Spec

# A config in any form that the public functions accept.
Config: TypeAlias = Spec | ConfigDict | Mapping[str, Any]


def parse(config: Config) -> Spec:
    """Returns the typed and frozen form of a config; returns a `Spec` unchanged.

    Does not check the fields of model, task, optimizer, data set, batch rule and exchange; these are
    checked when the components are built.

    Raises:
      UserError: a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    if isinstance(config, Spec):
        return config
    nested = as_dict(config)
    spec_checks.check_keys(nested)
    spec_checks.check_values(nested)
    return _parsed(nested, Spec)


def _parsed(nested: Mapping[str, Any], section: type) -> Any:
    values = {}
    for field in dataclasses.fields(section):
        value = nested[field.name]
        if "details" not in field.metadata:
            assert isinstance(field.type, type)  # a section
            values[field.name] = _parsed(value, field.type)
        elif field.type is Component:
            fields = dict(value)
            name = fields.pop("name", "")
            values[field.name] = Component(name, _frozen(fields), "name" in value)
        else:
            # Lists become tuples here, but not in the fields of components, which may need lists.
            values[field.name] = _frozen(value) if isinstance(value, dict) else _tupled(value)
    return section(**values)


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType({name: _frozen(each) for name, each in value.items()})
    return value


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (list, tuple)) else value


def as_dict(config: Any) -> dict[str, Any]:
    """Returns a config, or a section of a `Spec`, as plain nested dictionaries."""
    if isinstance(config, Component):
        return config.as_dict()
    if isinstance(config, ConfigDict):
        return config.to_dict()
    if isinstance(config, Mapping):
        return {
            key: as_dict(value) if _is_section(value) else value for key, value in config.items()
        }
    return {
        field.name: as_dict(value) if _is_section(value) else value
        for field in dataclasses.fields(config)
        for value in [getattr(config, field.name)]
    }


def _is_section(value: Any) -> bool:
    return isinstance(value, (Mapping, ConfigDict)) or dataclasses.is_dataclass(value)


def flatten(config: Config) -> dict[str, Any]:
    """Flattens a config to {'optimizer.name': 'lamb', ...}, sorted, with tuples as lists."""
    return spec_checks.flatten(as_dict(config))


def of_flat(flat: Mapping[str, Any]) -> Spec:
    """Inverts `flatten` and parses the result; missing keys get their defaults."""
    return parse(nested(flat))


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Inverts `flatten` without parsing; missing keys get their defaults."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, key = path.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    base = as_dict(Spec())
    _overlay(base, tree, "config")
    return base


def _overlay(base: dict[str, Any], overlay: Mapping[str, Any], path: str) -> None:
    for key, value in overlay.items():
        old, where = base.get(key), f"{path}.{key}"
        if isinstance(old, dict) and not isinstance(value, dict):
            raise UserError(where, value, "is not a section", "use a ConfigDict")
        # Replace a component's section, so that no field of the default component remains.
        if isinstance(old, dict) and not spec_checks.has_named_fields(where):
            _overlay(old, value, where)
            continue
        try:  # JSON has no tuples
            base[key] = tuple(value) if isinstance(old, tuple) else value
        except TypeError:
            remedy = f"use {field_types.describe(tuple)}"
            raise UserError(where, value, "has the wrong type", remedy) from None


def changed(spec: Spec, changes: Mapping[str, Any]) -> Spec:
    """Returns a config with the values or sections that `changes` gives for dotted keys.

    >>> changed(Spec(), {"checkpoint.keep": 5, "model": {"name": "lenet"}}).checkpoint.keep
    5
    """
    tree = as_dict(spec)
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = tree
        for number, name in enumerate(sections):
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                where = ".".join(["config", *sections[: number + 1]])
                raise unknown_key(where, ".".join([*sections[number + 1 :], last]), [])
        node[last] = as_dict(value) if _is_section(value) else value
    return parse(tree)


def section_of(config: Any, key: str) -> Any:
    """Returns the section that contains a dotted key; for a top-level key, the config."""
    node: Any = config
    where = "config"
    for part in key.split("."):
        keys = list(node) if isinstance(node, (Mapping, ConfigDict)) else []
        if part not in keys:
            raise unknown_key(where, part, keys)
        section, node, where = node, node[part], f"{where}.{part}"
    return section


def value_of(spec: Spec, key: str) -> Any:
    """Returns the value of a dotted key, such as 'optimizer.learning_rate'."""
    return section_of(as_dict(spec), key)[key.rpartition(".")[2]]

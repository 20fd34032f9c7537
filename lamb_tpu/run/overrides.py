"""Command-line overrides for every argument of the optimizer, model, task, data and other sections.

ml_collections overrides only keys that a config has, and a config file writes down only what
differs from the defaults. Here every argument of the named optimizer, model, task, data set, batch
rule or exchange is a key of its section, see `SECTIONS`, whether or not the file sets it, with
values of the argument's type. Giving a default adds no key, so a run's config is the same whether a
default was given or left out.
"""

import ast
import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu import models, tasks
from lamb_tpu.config import section_of
from lamb_tpu.data.registry import option_fields
from lamb_tpu.errors import UserError
from lamb_tpu.optim import factory, presets
from lamb_tpu.run import batches, exchanges
from lamb_tpu.run.recipe import naming, optimizer_of

SECTIONS = ("optimizer", "model", "task", "data.options", "batch_rule", "parallel.exchange")
_FLAG = re.compile(
    r"-{1,2}(?P<no>no)?config\.(phases\.(?P<phase>[^.=]+)\.)?"
    r"(?P<section>optimizer|model|task|data\.options|batch_rule|parallel\.exchange)"
    r"\.(?P<field>[^=]+)(=(?P<text>.*))?",
    re.DOTALL,
)
_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    type(None): "None",
}
_NAMES = {"inf": math.inf, "nan": math.nan, "true": True, "false": False, "none": None}
_UNFIT: Any = object()  # a value that is not of the type


class Override(NamedTuple):
    """One flag of the command line, such as --config.optimizer.b2=0.98.

    Attributes:
      phase: name of the phase that the override changes; '' for the whole config.
      section: one of `SECTIONS`.
      field: the key in the section.
      text: the value as written on the command line.
    """

    phase: str
    section: str
    field: str
    text: str

    @property
    def key(self) -> str:
        """The full key, as in error messages."""
        return f"{self.where}.{self.field}"

    @property
    def where(self) -> str:
        """The full key of the section."""
        return (
            f"config.phases.{self.phase}.{self.section}"
            if self.phase
            else (f"config.{self.section}")
        )


class Field(NamedTuple):
    """An argument: its declared type and its default."""

    kind: Any
    default: Any


def take(argv: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Splits a command line into the overrides of `SECTIONS` and the rest."""
    found, rest, items = [], [], list(argv)
    while items:
        item = items.pop(0)
        match = _FLAG.fullmatch(item)
        if match is None:
            rest.append(item)
            continue
        text = match["text"]
        if match["no"]:
            text = "False"
        elif text is None:  # absl's other forms: --flag value, and --flag for True
            text = items.pop(0) if items and not items[0].startswith("--") else "True"
        found.append(Override(match["phase"] or "", match["section"], match["field"], text))
    return found, rest


def apply(config: ConfigDict, overrides: Sequence[Override]) -> None:
    """Applies overrides to a config; a phase's section is created if it is missing.

    Raises:
      UserError: a field is unknown (the message lists the known ones), or a value has another type.
    """
    # Of several flags for one key the last one counts, as in absl.
    last = {override[:3]: override for override in overrides}.values()
    # First names, which decide what the other fields are; then presets, which decide the defaults.
    first = [o for o in last if o.field == "name"] + [o for o in last if _is_preset(o)]
    for override in first:
        _apply(config, override)
    # A new name on the command line keeps the file's fields, which must all be fields of it.
    for override in last:
        if override.field == "name":
            _check_file_fits(config, override, {other.key for other in last})
    for override in last:
        if override not in first:
            _apply(config, override)


def kind_of(config: ConfigDict, key: str) -> Any:
    """Returns the type that the values of a dotted key have, as `convert` takes it.

    Raises:
      UserError: the config has no such key, or it is a section; the message lists the known ones.
    """
    own, _ = take([f"--config.{key}="])
    if own and own[0].field == "name":
        return str
    if own:
        return _find(config, own[0])[2].kind
    value = section_of(config, key)[key.rpartition(".")[2]]
    if isinstance(value, ConfigDict):
        raise UserError(
            f"config.{key} is a section; name one of its keys: {', '.join(value) or 'none'}"
        )
    # A value of None is a placeholder for text.
    return str | None if value is None else type(value)


def own_fields(section: str, name: Any) -> dict[str, Field]:
    """Returns the fields of the named optimizer, model, task, data set or batch rule.

    Args:
      section: one of `SECTIONS`.
      name: the section's name in the config, such as config.optimizer.name.

    Raises:
      UserError: the name is unknown.
    """
    with naming(f"config.{section}"):
        if section == "batch_rule":
            return {key: Field(*each) for key, each in batches.rule_fields(name).items()}
        if section == "optimizer":
            arguments = factory.own_arguments(optimizer_of(name))
            del arguments["axis_name"]  # config.parallel decides it
            found = {key: Field(p.annotation, p.default) for key, p in arguments.items()}
            return {"learning_rate": Field(float, inspect.Parameter.empty), **found}
        read = {
            "model": models.own_fields,
            "task": tasks.own_fields,
            "data.options": option_fields,
            "parallel.exchange": exchanges.exchange_fields,
        }
        return {key: Field(f.type, _default(f)) for key, f in read[section](name).items()}


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    missing = field.default is dataclasses.MISSING
    return inspect.Parameter.empty if missing else _plain(field.default)


def _plain(value: Any) -> Any:
    """Returns a value with named tuples replaced by plain tuples, which a config can hold."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def describe(config: ConfigDict) -> str:
    """Returns lines `config.KEY = VALUE` for every key, including those left at defaults."""
    flat = {f"config.{key}": f"{value!r}" for key, value in _leaves(config)}
    for section in SECTIONS:
        fields = _section(config, section)
        name = config.data.name if section == "data.options" else name_of(section, fields)
        phases = [_section(phase, section) for phase in _section(config, "phases").values()]
        for key, value in defaults(section, fields, name).items():
            if phases and all(key in phase for phase in phases):
                continue  # every config sets this argument itself
            flat[f"config.{section}.{key}"] = f"{value!r}  # default of {name}"
    return "\n".join(f"{key} = {text}" for key, text in sorted(flat.items()))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def name_of(section: str, fields: Mapping[str, Any]) -> Any:
    """Returns the name among the fields of a section; None without one, but for the batch rule."""
    return fields.get("name", "constant" if section == "batch_rule" else None)


def defaults(section: str, fields: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """Returns the defaults of all arguments that `fields`, a section of a config, leaves out."""
    found = {key: field.default for key, field in own_fields(section, name).items()}
    if section == "optimizer" and fields.get("preset"):
        # A preset takes the place of the optimizer's own defaults.
        with naming("config.optimizer"):
            found |= presets.preset(name, fields["preset"])
    missing = inspect.Parameter.empty
    return {k: v for k, v in found.items() if k not in fields and v is not missing}


def _is_preset(override: Override) -> bool:
    return override.section == "optimizer" and override.field == "preset"


def _apply(config: ConfigDict, override: Override) -> None:
    section, field, key = override.section, override.field, override.key
    fields, name, (kind, default) = _find(config, override)
    value = convert(key, override.text, kind, default)
    # The value in force without this flag. Giving the same one must add no key. Types are compared
    # too, because 1 == 1.0 == True.
    if section == "optimizer" and field in ("name", "preset"):
        # The two may not fit each other yet, so that there are no defaults of a preset.
        before = fields.get(field, default)
    else:
        before = (defaults(section, fields, name) | fields).get(field, _UNFIT)
    if type(value) is type(before) and value == before:
        return
    # A value may replace one of another type, such as a number None.
    with config.unlocked(), config.ignore_type():
        phase = _phase(config, override.phase)
        node = config if phase is None else phase
        for part in section.split("."):
            if part not in node:
                node[part] = ConfigDict()
            node = node[part]
        node[field] = value


def _find(config: ConfigDict, override: Override) -> tuple[dict[str, Any], Any, Field]:
    """Returns the fields in force, the name that decides which there are, and the one changed."""
    section, field, phase = override.section, override.field, _phase(config, override.phase)
    # A phase's fields lie over those of the whole config.
    fields = _section(config, section) | _section(phase, section)
    # The options of a data set belong to config.data.name.
    if section == "data.options":
        data = _section(config, "data") | _section(phase, "data")
        name = data["name"]
    elif field == "name":
        name = override.text
    else:
        name = name_of(section, fields)
        if name is None:
            raise UserError(f"config.{section} has no name; give config.{section}.name")
    known = own_fields(section, name)
    if section != "data.options":
        known = {"name": Field(str, inspect.Parameter.empty), **known}
    if field not in known:
        listed = ", ".join(known) or "none"
        raise UserError(f"{override.key} is unknown; {_noun(section)} {name!r} has: {listed}")
    kind, default = known[field]
    # None means the default of a data set's option.
    return fields, name, Field(kind | None if section == "data.options" else kind, default)


def _phase(config: ConfigDict, name: str) -> ConfigDict | None:
    """Returns the phase of that name; None if the name is ''."""
    if not name:
        return None
    phases = _section(config, "phases")
    if not isinstance(phases.get(name), ConfigDict):
        listed = ", ".join(phases) or "none"
        raise UserError(f"config.phases.{name} is unknown; config.phases has: {listed}")
    return phases[name]


def _section(config: ConfigDict | None, section: str) -> dict[str, Any]:
    """Returns the fields in a section of a config or a phase; none if the section is missing."""
    node: Any = config
    for part in section.split("."):
        node = node[part] if isinstance(node, ConfigDict) and part in node else None
    return dict(node.items()) if isinstance(node, ConfigDict) else {}


def _check_file_fits(config: ConfigDict, override: Override, given: Collection[str]) -> None:
    """Rejects a name from the command line that does not have all fields of the file's section.

    Args:
      config: with the name and the preset of the command line in place.
      override: of the name.
      given: every key of the command line.
    """
    phase = _phase(config, override.phase)
    fields = _section(config if phase is None else phase, override.section)
    name = name_of(override.section, fields)
    known = own_fields(override.section, name)
    strange = [key for key in fields if key not in known and key != "name"]
    other = ", ".join(presets.PRESETS.get(name, {}))
    preset = fields.get("preset") if override.section == "optimizer" else None
    # A wrong preset on the command line has a message of its own.
    misfit = f"{override.where}.preset" not in given and preset and preset not in other.split(", ")
    if misfit and not strange:
        raise UserError(
            f"{override.key} is {name!r} on the command line, and the config file sets "
            f"{override.where}.preset={preset!r}, a preset of another optimizer; add "
            f"--{override.where}.preset=''" + (f", or one of {name}'s: {other}" if other else "")
        )
    if strange:
        if misfit:
            strange.append("preset")
        kept = {key: value for key, value in fields.items() if key not in strange}
        raise UserError(
            f"{override.key} is {name!r} on the command line, and the config file sets "
            f"{', '.join(strange)}; {_noun(override.section)} {name!r} has: {', '.join(known)}; "
            f'replace them all, as by --{override.where}="{kept}"'
        )


def _noun(section: str) -> str:
    return "data set" if section == "data.options" else section


def convert(where: str, text: str, kind: Any, default: Any = inspect.Parameter.empty) -> Any:
    """Converts text from the command line to a value of type `kind`.

    >>> convert("config.optimizer.phi_bounds", "(0, inf)", tuple[float, float])
    (0.0, inf)

    Args:
      where: the key, for error messages.
      text: the value as written on the command line.
      kind: a type, a union of types, or a tuple or Sequence of one. Types that a config cannot hold
        are ignored, such as a schedule in a union with a float.
      default: the argument's default, as an example in error messages.

    Raises:
      UserError: `text` is not a value of that type.
    """
    kinds = _members(kind)
    # For text alone, 1e-3 stays text. Other types are read as a Python literal first, and as the
    # text itself last.
    candidates: list[Any] = [text] if str in kinds and set(kinds) <= {str, type(None)} else []
    if text.lower() == "none":
        candidates.insert(0, None)
    try:
        tree = _Names().visit(ast.parse(text.strip(), mode="eval"))
        candidates.append(ast.literal_eval(tree))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # Not a literal. Deeply nested brackets raise the last two.
        pass
    for candidate in [*candidates, text]:
        for own in kinds:
            value = _fit(candidate, own)
            if value is not _UNFIT:
                return value
    wanted = " or ".join(dict.fromkeys(filter(None, map(_describe, kinds)))) or "text"
    such = "" if default in (inspect.Parameter.empty, None) else f", such as {default!r}"
    raise UserError(f"{where} is {text!r}; it must be {wanted}{such}")


class _Names(ast.NodeTransformer):
    """Replaces words such as inf and true, which Python parses as names, by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        word = node.id.lower()
        return ast.copy_location(ast.Constant(_NAMES[word]), node) if word in _NAMES else node


def _members(kind: Any) -> list[Any]:
    """Returns the types of a union, with narrower number types first, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        found = [own for member in typing.get_args(kind) for own in _members(member)]
        # So that 3 stays an int for int | float.
        return sorted(found, key=lambda own: (own is type(None), own is float))
    return [Any] if isinstance(kind, str) or kind is inspect.Parameter.empty else [kind]


def _is_sequence(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str


def _fit(value: Any, kind: Any) -> Any:
    """Returns `value` converted to type `kind`, or `_UNFIT`."""
    if kind is Any:
        return value
    # type() and not isinstance(), because True is an int.
    if kind is float:
        return float(value) if type(value) in (int, float) else _UNFIT
    if kind in _KINDS:
        return value if type(value) is kind else _UNFIT
    if isinstance(value, (tuple, list)) and _is_sequence(kind):
        inner = typing.get_args(kind) or (Any,)
        # Sequence[X] and tuple[X, ...] have any number of values.
        if typing.get_origin(kind) is not tuple or inner[-1] is Ellipsis:
            inner = inner[:1] * len(value)
        if len(inner) != len(value):
            return _UNFIT
        fitted = tuple(
            next((fit for own in _members(k) if (fit := _fit(v, own)) is not _UNFIT), _UNFIT)
            for v, k in zip(value, inner)
        )
        return _UNFIT if any(item is _UNFIT for item in fitted) else fitted
    if isinstance(value, dict) and typing.get_origin(kind) is Mapping:
        return value
    return _UNFIT


def _describe(kind: Any) -> str:
    """Returns a description of a type for a message; '' for a type that a config cannot hold."""
    if _is_sequence(kind):
        inner = [k for k in typing.get_args(kind) if k is not Ellipsis]
        fixed = typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind)
        return f"a tuple of {len(inner)} values" if fixed and inner else "a tuple"
    if typing.get_origin(kind) is Mapping:
        return "a dictionary"
    return _KINDS.get(kind, "")

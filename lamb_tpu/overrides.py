"""Command-line overrides for all arguments of components, such as the optimizer's.

ml_collections overrides only keys that are in a config. With this module, the command line can set
every argument. An override that repeats a default adds no key, so that a run's config does not
depend on whether the override was given.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu import cli, field_types
from lamb_tpu.components import MISSING, Field
from lamb_tpu.errors import UserError, listed, naming, unknown_key
from lamb_tpu.optim import presets
from lamb_tpu.run.categories import REGISTRIES
from lamb_tpu.spec import Spec, parse, section_of

SECTIONS = tuple(REGISTRIES)
_FLAG = re.compile(
    r"-{1,2}(?P<no>no)?config\.(phases\.(?P<phase>[^.=]+)\.)?"
    rf"(?P<section>{'|'.join(map(re.escape, SECTIONS))})"
    r"\.(?P<field>[^=]+)(=(?P<text>.*))?",
    re.DOTALL,
)


class Override(NamedTuple):
    """A flag of the command line, such as --config.optimizer.b2=0.98.

    `phase` is '' for the top level of the config, and `text` is the value as written.
    """

    phase: str
    section: str
    field: str
    text: str

    @property
    def key(self) -> str:
        """The full key, for messages."""
        return f"{self.where}.{self.field}"

    @property
    def where(self) -> str:
        """The full key of the section."""
        phase = f"phases.{self.phase}." if self.phase else ""
        return f"config.{phase}{self.section}"


def load(recipe: str, changes: Mapping[str, Any] = {}) -> Spec:
    """Returns the config of a recipe with changed values.

    `changes` maps dotted keys to values. For keys in `SECTIONS`, a value may also be text, as on the
    command line.
    """
    config = cli.load_recipe(recipe)
    taken, rest = take([flag(key, value) for key, value in changes.items()])
    apply(config, taken)
    for item in rest:
        key = item.partition("=")[0].removeprefix("--config.")
        section, last = section_of(config, key), key.rpartition(".")[2]
        try:
            section[last] = _tuples(changes[key])
        except TypeError:
            remedy = f"use {field_types.describe(type(section[last]), section[last])}"
            raise UserError(f"config.{key}", changes[key], "has the wrong type", remedy) from None
    return parse(config)


def with_argument(recipe: str, argument: str) -> str:
    """Appends an argument to a recipe.

    >>> with_argument("digits", "smoke"), with_argument("digits:smoke", "batch=64")
    ('digits:smoke', 'digits:smoke,batch=64')
    """
    return f"{recipe}{',' if ':' in recipe else ':'}{argument}"


def flag(key: str, value: Any) -> str:
    """Returns the flag that sets a config key.

    >>> flag("parallel.backend", "jit"), flag("model.hidden_sizes", [4, 4])
    ('--config.parallel.backend=jit', '--config.model.hidden_sizes=(4, 4)')
    """
    return f"--config.{key}={_tuples(value)}"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def take(argv: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Splits a command line into the overrides of `SECTIONS` and the remaining words."""
    overrides, rest, items = [], [], list(argv)
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
        overrides.append(Override(match["phase"] or "", match["section"], match["field"], text))
    return overrides, rest


def apply(config: ConfigDict, overrides: Sequence[Override]) -> None:
    """Applies overrides to a config; creates a phase's section if it is missing."""
    # If several flags set one key, the last one counts, as in absl.
    last = {override[:3]: override for override in overrides}.values()
    # Names come first, because they determine the fields; then presets, which change the defaults.
    first = [o for o in last if o.field == "name"] + [o for o in last if _is_preset(o)]
    for override in first:
        _apply(config, override)
    # A new name keeps the file's fields, so the new component must have all of them.
    for override in last:
        if override.field == "name":
            _check_file_fits(config, override, {other.key for other in last})
    for override in last:
        if override not in first:
            _apply(config, override)


def kind_of(config: Mapping[str, Any], key: str) -> Any:
    """Returns the type of a dotted key, for `field_types.convert`; rejects an unknown key."""
    taken, _ = take([f"--config.{key}="])
    if taken and taken[0].field == "name":
        return str
    if taken:
        return _find(config, taken[0])[2].type
    value = section_of(config, key)[key.rpartition(".")[2]]
    if isinstance(value, (Mapping, ConfigDict)):
        remedy = f"name one of its keys: {', '.join(value) or 'none'}"
        raise UserError(f"config.{key}", problem="is a section", remedy=remedy)
    # A default of None is a placeholder for text.
    return str | None if value is None else type(value)


def describe(config: ConfigDict) -> str:
    """Returns lines `config.KEY = VALUE` for all keys, including components' defaults."""
    flat = {f"config.{key}": f"{value!r}" for key, value in _leaves(config)}
    for section in SECTIONS:
        fields = _section(config, section)
        name = REGISTRIES[section].name_of(config)
        phases = [_section(phase, section) for phase in _section(config, "phases").values()]
        for key, value in defaults(section, fields, name).items():
            if phases and all(key in phase for phase in phases):
                continue  # the default is not used, because every phase sets this argument
            flat[f"config.{section}.{key}"] = f"{value!r}  # default of {name}"
    return "\n".join(f"{key} = {text}" for key, text in sorted(flat.items()))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def defaults(section: str, fields: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """Returns the defaults of all arguments that `fields`, a config section, leaves out."""
    values = {key: field.default for key, field in _keys_of(section, name).items()}
    if section == "optimizer" and fields.get("preset"):
        # A preset replaces the optimizer's defaults.
        with naming("config.optimizer"):
            values |= presets.preset(name, fields["preset"])
    return {k: v for k, v in values.items() if k not in fields and v is not MISSING}


def _keys_of(section: str, name: Any) -> dict[str, Field]:
    """Returns the fields of a component, and the key `name` if it has a default."""
    registry = REGISTRIES[section]
    return registry.fields(name) if registry.default_name is None else registry.keys_of(name)


def defaults_of_stored(section: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of all arguments that a section of a flat, stored config leaves out.

    Never imports a custom component, because a stored config may come from someone else and
    importing runs code. Returns {} for a custom or unknown component.
    """
    start = len(section) + 1
    fields = {key[start:]: value for key, value in flat.items() if key.startswith(f"{section}.")}
    registry = REGISTRIES[section]
    name = flat.get(registry.name_key, registry.default_name)
    if not isinstance(name, str) or not isinstance(fields.get("preset", ""), str):
        return {}
    if registry.is_custom(name):
        return {}
    try:
        return defaults(section, fields, name)
    except UserError:
        return {}


def _is_preset(override: Override) -> bool:
    return override.section == "optimizer" and override.field == "preset"


def _apply(config: ConfigDict, override: Override) -> None:
    section, field, key = override.section, override.field, override.key
    fields, name, (kind, default) = _find(config, override)
    value = field_types.convert(key, override.text, kind, default)
    # Add no key if the flag repeats the effective value. Compare types too: 1 == 1.0 == True.
    if section == "optimizer" and field in ("name", "preset"):
        # Do not look up the preset's defaults: name and preset may not fit each other yet.
        before = fields.get(field, default)
    else:
        before = (defaults(section, fields, name) | fields).get(field, field_types.UNFIT)
    if type(value) is type(before) and value == before:
        return
    # The new value may have another type than the old value, which may be None.
    with config.unlocked(), config.ignore_type():
        phase = _phase(config, override.phase)
        node = config if phase is None else phase
        for part in section.split("."):
            if part not in node:
                node[part] = ConfigDict()
            node = node[part]
        node[field] = value


def _find(config: Mapping[str, Any], override: Override) -> tuple[dict[str, Any], Any, Field]:
    """Returns the section's effective fields, the component's name, and the field that an override sets."""
    section, field, phase = override.section, override.field, _phase(config, override.phase)
    registry = REGISTRIES[section]
    # A phase's fields override those at the top level.
    fields = _section(config, section) | _section(phase, section)
    names_it = registry.named_in_section and field == "name"
    name = override.text if names_it else registry.name_of(phase, config)
    known = registry.keys_of(name)
    if field not in known:
        raise registry.unknown(field, name, override.where)
    kind, default = known[field]
    return fields, name, Field(kind | None if registry.none_is_default else kind, default)


def _phase(config: Mapping[str, Any], name: str) -> Any:
    """Returns the phase called `name`; None if `name` is ''."""
    if not name:
        return None
    phases = _section(config, "phases")
    if not isinstance(phases.get(name), (Mapping, ConfigDict)):
        raise unknown_key("config.phases", name, phases)
    return phases[name]


def _section(config: Mapping[str, Any] | None, section: str) -> dict[str, Any]:
    """Returns the fields in a section of a config or phase; {} if the section is missing."""
    node: Any = config
    for part in section.split("."):
        node = node[part] if isinstance(node, (Mapping, ConfigDict)) and part in node else None
    return dict(node.items()) if isinstance(node, (Mapping, ConfigDict)) else {}


def _check_file_fits(config: ConfigDict, override: Override, given: Collection[str]) -> None:
    """Rejects a component named on the command line if it lacks fields that the file sets.

    Call this after names and presets are applied; `given` has the keys of all overrides.
    """
    phase = _phase(config, override.phase)
    fields = _section(config if phase is None else phase, override.section)
    registry = REGISTRIES[override.section]
    name = registry.name_of(config if phase is None else phase)
    known = registry.keys_of(name)
    misfits = [key for key in fields if key not in known]
    other = ", ".join(presets.PRESETS.get(name, {}))
    preset = fields.get("preset") if override.section == "optimizer" else None
    # Another check reports a wrong preset on the command line.
    misfit = f"{override.where}.preset" not in given and preset and preset not in other.split(", ")
    if misfit and not misfits:
        problem = (
            f"does not fit {override.where}.preset={preset!r} of the config file, a preset of "
            "another optimizer"
        )
        remedy = f"add --{override.where}.preset=''"
        remedy += f", or give a preset of {name}: {other}" if other else ""
        raise UserError(override.key, name, problem, remedy)
    if misfits:
        if misfit:
            misfits.append("preset")
        fitting = {key: value for key, value in fields.items() if key not in misfits}
        problem = (
            f"does not fit the config file, which sets {listed(misfits, 'and')}; "
            f"{registry.noun} {name!r} has: {', '.join(known)}"
        )
        remedy = f'replace the section, for example with --{override.where}="{fitting}"'
        raise UserError(override.key, name, problem, remedy)

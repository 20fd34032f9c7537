"""Configs as users write them: the base config, recipes, and the argument of a config file."""

import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict, config_dict

from lamb_tpu import field_types, spec, spec_keys
from lamb_tpu.errors import UserError, unknown
from lamb_tpu.spec import flatten as flatten

# Keys that may change when a run is resumed: file locations, reports, checks, when to stop, and how
# the work is distributed. They change the trained weights by rounding at most.
FREE_KEYS = (
    "data.dir",
    "data.prepared_dir",
    "data.options.vocab",
    "data.options.threads",
    "eval.batch_size",
    "checkpoint.",
    "log.",
    "loop.",
    "guards.",
    "statistics.",
    "mesh.",
    "parallel.backend",
    "parallel.rules",
    "parallel.optimizer_state",
    "init_from",
    "init.unfinished",
    "target.stop",
)
# Keys that may change in `lamb_tpu.evaluate`.
EVAL_FREE_KEYS = (*FREE_KEYS, "data.eval_split")


def base_config() -> ConfigDict:
    """Returns a config with every key at its default, for a recipe to change.

    configs/keys.md lists the keys, and `lamb_tpu.spec_keys` declares them. A duration is a string:
    '30 epochs', '1000 steps', '50000 examples' or '5 percent' (of the run). The sections of model,
    task, optimizer, data options, batch rule and exchange each hold the arguments of one component;
    to use another component, assign a new `ConfigDict` to the section. A custom component is written
    'my_package.my_module:Name'. The config is locked: assigning a misspelt key raises an error.
    """
    return unflatten({})


def recipe_folder() -> pathlib.Path:
    """Returns the folder of the shipped recipes: in the installed package or in the checkout."""
    package = pathlib.Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe_path(name: str) -> str:
    """Returns the path of the shipped recipe called `name`; returns any other name unchanged."""
    shipped = recipe_folder() / f"{name.removesuffix('.py')}.py"
    # A file with this name in the current folder takes precedence over a shipped recipe.
    if os.path.exists(name) or not re.fullmatch(r"\w+(\.py)?", name) or not shipped.exists():
        return name
    return str(shipped)


def parse_argument(argument: str | None, **defaults: Any) -> ConfigDict:
    """Parses the text after the colon of `configs/x.py:batch=4096,smoke`.

    A key without a value is True. `defaults` has every known key with its default; each value gets
    the type of its key's default. Raises a `UserError` for an unknown key or a value of another type.
    """
    values = dict(defaults)
    for item in (argument or "").split(","):
        if not item.strip():
            continue
        key, has_value, text = (part.strip() for part in item.partition("="))
        if key not in defaults:
            raise unknown("the config's argument", key, defaults)
        values[key] = _convert(key, text if has_value else "true", defaults[key])
    return ConfigDict(values)


def check_argument(key: str, value: Any, known: Collection[Any]) -> None:
    """Rejects a value of the key `key` in a config's argument if the value is not in `known`."""
    if value not in known:
        raise unknown(f"the config's argument {key}", value, known)


def _convert(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    # Compare words, because bool('False') is True.
    if kind is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    try:
        if kind is bool:
            raise ValueError
        return kind(text)
    except ValueError:
        remedy = f"use {field_types.describe(kind, default)}"
        raise UserError(
            f"the config's argument {key}", text, "has the wrong type", remedy
        ) from None


def unflatten(flat: Mapping[str, Any]) -> ConfigDict:
    """Inverts `flatten` and returns a locked config; missing keys get their defaults."""
    config = ConfigDict(spec.nested(flat))
    for key in spec_keys.keys():
        if key.default is None:
            section, last = spec.section_of(config, key.path), key.path.rpartition(".")[2]
            if section[last] is None:
                section[last] = config_dict.placeholder(str)
    return config.lock()


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], free_keys: tuple[str, ...] = FREE_KEYS
) -> list[str]:
    """Returns a line for each key that differs between two flattened configs, except free keys."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        # A free key is also free within a phase.
        free = re.sub(r"^phases\.[^.]+\.", "", key).startswith(free_keys)
        if old.get(key) != new.get(key) and not free:
            lines.append(f"{key}: {old.get(key)!r} there, {new.get(key)!r} now")
    return lines

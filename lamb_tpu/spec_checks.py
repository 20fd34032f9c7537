"""The checks of `spec.parse`: the config's keys, and the types and ranges of their values."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lamb_tpu import field_types, limits, spec_keys
from lamb_tpu.errors import UserError, out_of_range, unknown, unknown_key


def check_keys(config: Mapping[str, Any]) -> None:
    """Rejects unknown keys, missing keys, and values of the wrong type; skips fields of components."""
    _compare_keys(config, spec_keys.Spec, "config")
    for section in _NAMED:
        fields = config["parallel"]["exchange"] if "." in section else config[section]
        if "name" not in fields:
            if section in ("batch_rule", "parallel.exchange"):  # checked when they are built
                continue
            raise UserError(f"config.{section}.name", problem="is missing", remedy="set it")
        if not isinstance(fields["name"], str):
            problem, remedy = "is not a name", "use the name of a component, as text"
            raise UserError(f"config.{section}.name", fields["name"], problem, remedy)
    if "learning_rate" not in config["optimizer"]:
        remedy = "set it to the learning rate of the base batch size"
        raise UserError("config.optimizer.learning_rate", problem="is missing", remedy=remedy)
    # `flatten` rejects values that config.json cannot hold.
    for key, value in flatten(config).items():
        _check_length(key, value)


# Sections whose key `name` determines their other fields.
_NAMED = ("task", "model", "optimizer", "batch_rule", "parallel.exchange")
# Sections with arbitrary fields, which are checked elsewhere.
_OPEN = {
    f"config.{key.path}"
    for key in spec_keys.keys()
    if isinstance(key.default, (spec_keys.Component, Mapping))
}


def _compare_keys(config: Mapping[str, Any], section: type, path: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(section)}
    for key in config:
        if key not in fields:
            raise unknown_key(path, key, sorted(fields))
    for key, field in sorted(fields.items()):
        if key not in config:
            remedy = "start from lamb_tpu.config.base_config()"
            raise UserError(f"{path}.{key}", problem="is missing", remedy=remedy)
        value, where = config[key], f"{path}.{key}"
        is_section = "details" not in field.metadata
        if is_section or has_named_fields(where):
            if not isinstance(value, Mapping):
                raise UserError(where, value, "is not a section", "use a ConfigDict")
            if is_section:
                assert isinstance(field.type, type)
                _compare_keys(value, field.type, where)
        elif field.default is not None or value is not None:
            kind = str if field.default is None else type(field.default)
            field_types.check(where, value, kind, field.default)


def _check_length(key: str, value: Any) -> None:
    """Rejects texts and lists that are longer than `limits` allows."""
    for each in _items(value):
        for kind, most, what in (
            (list, limits.MAX_ITEMS, "items"),
            (str, limits.MAX_TEXT, "characters"),
        ):
            if isinstance(each, kind) and len(each) > most:
                problem, remedy = f"has {len(each):,} {what}", f"use at most {most:,}"
                raise UserError(f"config.{key}", problem=problem, remedy=remedy)


def _items(value: Any) -> Iterator[Any]:
    """Yields a value and all items of nested lists, without recursion, because lists may be deep."""
    level = [value]
    while level:
        yield from level
        level = [inner for each in level if isinstance(each, list) for inner in each]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a config, see `spec.flatten`; rejects a value that JSON cannot hold."""
    flat: dict[str, Any] = {}
    for key in sorted(config):
        value = config[key]
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            # Convert to JSON and back, so that the value equals the one read from config.json: a
            # tuple becomes a list.
            try:
                flat[prefix + key] = json.loads(json.dumps(value))
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"config.{prefix}{key}", value, "is not UTF-8", "use text in UTF-8"
                ) from None
            except (TypeError, ValueError, RecursionError):
                raise UserError(
                    f"config.{prefix}{key}",
                    value,
                    "cannot be saved",
                    "use numbers, text, booleans, None, or lists of these; give a dtype by its name, "
                    "such as 'bfloat16'",
                ) from None
    return flat


def has_named_fields(section: str) -> bool:
    """Returns whether a section, such as 'config.task', has arbitrary fields."""
    return section in _OPEN


def check_values(config: Mapping[str, Any]) -> None:
    """Rejects values out of range, in a config that has passed `check_keys`."""
    flat = flatten(config)
    for declared in spec_keys.keys():
        if declared.path in flat:
            _check_details(declared, flat[declared.path])
    if not math.isfinite(value := config["target"]["value"]):
        raise UserError("config.target.value", value, "is not finite", "use a finite number")
    # Without a metric, neither a target value nor the log of the time to reach it has an effect.
    if not config["target"]["metric"]:
        for key, off in (("target.value", 0.0), ("log.mlperf", False)):
            if flat[key] != off:
                raise UserError(
                    f"config.{key}",
                    flat[key],
                    "has no effect while config.target.metric is ''",
                    "set config.target.metric to a metric of the evaluation, such as 'accuracy', or give "
                    f"config.{key}={off}",
                )
    pattern = config["init"]["new_parameters"]
    try:
        re.compile(pattern)
    except re.error as error:
        problem = f"is not a valid regular expression ({error})"
        raise UserError("config.init.new_parameters", pattern, problem, "correct it") from None
    # `check_keys` skips the optimizer's fields, so check the learning rate's type here.
    rate = config["optimizer"]["learning_rate"]
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise out_of_range("config.optimizer.learning_rate", rate, "a number of at least 0")
    for key, value in flat.items():
        if not _is_custom(flat, key):
            _check_size(key, value)


def _check_details(key: spec_keys.Key, value: Any) -> None:
    """Rejects a value that violates the bounds of its key."""
    details, least = key.details, f"{key.details.least:g}"
    name = f"config.{key.path}"
    if details.known and value not in details.known:
        raise unknown(name, value, details.known)
    if details.is_path and value == "":  # an empty path would mean the current folder
        remedy = "give a path, or None"
        raise UserError(name, problem="is empty", remedy=remedy)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if details.most < math.inf and not details.least <= value <= details.most:
        raise out_of_range(name, value, f"{least} to {details.most:.0f}")
    if details.below < math.inf and not details.least <= value < details.below:
        at_least = f"at least {least} and " if details.least > -math.inf else ""
        raise out_of_range(name, value, f"{at_least}below {details.below:.0f}")
    if details.least > -math.inf and not details.least <= value < math.inf:
        a_number = "" if key.kind is int else "a number of "
        raise out_of_range(name, value, f"{a_number}at least {least}")


def _is_custom(flat: Mapping[str, Any], key: str) -> bool:
    """Returns whether a key is a field of a custom component; `limits` does not apply to such fields."""
    section = key.rpartition(".")[0]
    keys = {"data.options": "data.name", "schedule.options": "schedule.decay"}
    name = flat.get(keys.get(section, f"{section}.name"))
    return isinstance(name, str) and ":" in name


def _check_size(key: str, value: Any) -> None:
    """Rejects a number above its limit in `limits`, for a key and value from `flatten`."""
    most = limits.CONFIG.get(key.rpartition(".")[2], limits.MAX_COUNT)
    seconds = limits.MAX_SECONDS if key.endswith("_seconds") else math.inf
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config.{key}", value, "is not finite", "use a finite number")
    for each in _items(value):
        if isinstance(each, float) and math.isnan(each):
            raise UserError(f"config.{key}", value, "contains NaN", "use numbers only")
        if isinstance(each, float) and each > seconds:
            raise out_of_range(f"config.{key}", value, f"at most {seconds:,}")
        if isinstance(each, int) and abs(each) > most:
            valid = f"at most {most:,}" if each > 0 else f"at least -{most:,}"
            raise out_of_range(f"config.{key}", value, valid)

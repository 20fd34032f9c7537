"""What a recipe may say: the keys of a config, its argument and its checks."""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from lamb_tpu.errors import UserError

# Keys that may differ when a workdir is used again: where files lie and what is told, never what is
# computed.
FREE_KEYS = ("data.dir", "data.prepared_dir", "checkpoint.", "log.", "mesh.")


def base_config() -> ConfigDict:
    """Every key that every config has, with its default; a recipe changes values.

    A duration is one string: '30 epochs', '1000 steps', '50000 examples' or '5 percent' (of the
    run). Model, task, optimizer and rules have their own fields beside `name`; assign a new
    `ConfigDict` to replace one. The result is locked: a misspelt key raises where it is written.
    """
    config = ConfigDict()
    config.seed = 0
    config.batch_size = 128  # global, in examples an update
    config.duration = "1 epochs"
    config.data = ConfigDict()
    config.data.name = "digits"
    config.data.train_split = "train"
    config.data.eval_split = "test"
    config.data.dir = placeholder(str)  # folder with the original files; None: download
    config.data.prepared_dir = placeholder(str)  # where TFDS keeps prepared sets; None: its default
    config.task = ConfigDict({"name": "classification"})
    config.model = ConfigDict({"name": "mlp"})
    config.optimizer = ConfigDict({"name": "lamb", "learning_rate": 0.001})
    config.schedule = ConfigDict()
    config.schedule.scaling = "identity"  # identity | linear | sqrt | legw
    config.schedule.base_batch_size = 128  # the batch optimizer.learning_rate is meant for
    config.schedule.warmup = "0 steps"  # legw: the warm-up at the base batch
    config.schedule.decay = "constant"  # constant | polynomial | cosine
    config.schedule.power = 1.0  # of the polynomial
    config.schedule.end_factor = 0.0  # last learning rate / peak
    config.schedule.decay_from = "warmup"  # 'warmup': its end; 'zero': update 0
    config.eval = ConfigDict({"every": "1 epochs", "batch_size": 1024})
    config.checkpoint = ConfigDict({"every": "1 epochs", "keep": 3})
    config.log = ConfigDict({"every": "10 steps", "tensorboard": True})
    config.mesh = ConfigDict({"data": -1})
    return config.lock()


def parse_argument(argument: str | None, **defaults: Any) -> ConfigDict:
    """Reads the text after the colon of `configs/x.py:batch=4096,smoke`.

    Args:
      argument: comma-separated `key=value` items; a bare `key` means true.
      **defaults: the known keys with their defaults, whose types the values take.

    Returns:
      The values, with defaults where the argument is silent.

    Raises:
      UserError: an unknown key or a value of another type.
    """
    values = dict(defaults)
    for item in (argument or "").split(","):
        if not item.strip():
            continue
        key, has_value, text = (part.strip() for part in item.partition("="))
        if key not in defaults:
            raise UserError(
                f"the config's argument {item!r} has the unknown key {key!r}; "
                f"known: {', '.join(defaults)}"
            )
        values[key] = _convert(key, text if has_value else "true", defaults[key])
    return ConfigDict(values)


def _convert(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    if kind is bool and text.lower() in ("true", "false", "1", "0"):
        return text.lower() in ("true", "1")
    try:
        if kind is bool:
            raise ValueError
        return kind(text)
    except ValueError:
        raise UserError(
            f"the config's argument {key}={text!r} must be of type {kind.__name__}, "
            f"such as {default!r}"
        ) from None


def check_keys(config: ConfigDict) -> None:
    """Refuses keys that `base_config` does not have, and missing ones, naming the known keys.

    Model, task and optimizer check their own fields when they are built.
    """
    base = base_config()
    _compare_keys(config, base, "config")
    for section in ("task", "model", "optimizer"):
        if "name" not in config[section]:
            raise UserError(f"config.{section} has no name; give config.{section}.name")
    if "learning_rate" not in config.optimizer:
        raise UserError("config.optimizer has no learning_rate; give config.optimizer.learning_rate")


def _compare_keys(config: Mapping[str, Any], base: Mapping[str, Any], path: str) -> None:
    for key in config:
        if key not in base:
            raise UserError(f"{path}.{key} is unknown; {path} has: {', '.join(base)}")
    for key in base:
        if key not in config:
            raise UserError(f"{path}.{key} is missing; start from lamb_tpu.config.base_config()")
        if path == "config" and key in ("task", "model", "optimizer", "mesh"):
            continue
        if isinstance(base[key], ConfigDict):
            if not isinstance(config[key], ConfigDict):
                raise UserError(f"{path}.{key} is {config[key]!r}; it must be a ConfigDict")
            _compare_keys(config[key], base[key], f"{path}.{key}")


def check_positive(config: ConfigDict, *keys: str) -> None:
    """Refuses values that are not whole numbers of at least 1; keys such as 'eval.batch_size'."""
    for key in keys:
        value = config
        for part in key.split("."):
            value = value[part]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"config.{key} is {value!r}; it must be a whole number of at least 1")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{'optimizer.name': 'lamb', ...}, in sorted order, with tuples as lists as JSON has them."""
    flat: dict[str, Any] = {}
    for key in sorted(config):
        value = config[key]
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.loads(json.dumps(value))
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value differs between two flattened configs, free keys aside."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(FREE_KEYS):
            lines.append(f"{key}: {old.get(key)!r} there, {new.get(key)!r} now")
    return lines

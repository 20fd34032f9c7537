"""Config schema: keys, defaults and checks, and the argument of a config file."""

import json
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from lamb_tpu.errors import UserError

# Keys that may differ when a workdir is used again. They change where files lie and what is
# reported, never what is computed.
FREE_KEYS = (
    "data.dir",
    "data.prepared_dir",
    "data.options.vocab",
    "data.options.threads",
    "eval.batch_size",
    "checkpoint.",
    "log.",
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
# Keys that `lamb_tpu.evaluate` may change.
EVAL_FREE_KEYS = (*FREE_KEYS, "data.eval_split")


def base_config() -> ConfigDict:
    """Returns a config with every key and its default; a recipe changes values.

    A duration is one string: '30 epochs', '1000 steps', '50000 examples' or '5 percent' (of the
    run). Model, task, optimizer, data set, batch rule and exchange have fields of their own beside
    `name`; assign a new `ConfigDict` to replace one. A name such as 'my_package.my_module:Name' is
    a user's own. The result is locked: assigning a misspelt key raises an error.
    """
    config = ConfigDict()
    config.seed = 0
    config.batch_size = 128  # examples in an update, over all devices
    config.accumulation_steps = 1  # number of microbatches that a device's part is cut into
    config.duration = "1 epochs"
    # Rule of a batch that changes, {"name": "ramp", ...} with the fields of the rule, see
    # lamb_tpu.batching; empty: every batch has batch_size examples. batch_size is then the batch
    # for which schedule and durations are given, and batches are whole numbers of microbatches of
    # batch_size / accumulation_steps examples. Its field scaling says how the rate follows:
    # identity | linear | sqrt.
    config.batch_rule = ConfigDict()
    config.data = ConfigDict()
    config.data.name = "digits"
    config.data.train_split = "train"
    config.data.eval_split = "test"
    config.data.dir = placeholder(str)  # folder with the original files; None: download
    config.data.prepared_dir = placeholder(str)  # where TFDS keeps prepared sets; None: its default
    config.data.options = ConfigDict()  # options of the data set, such as sequence_length of text
    config.task = ConfigDict({"name": "classification"})
    config.model = ConfigDict({"name": "mlp"})
    config.optimizer = ConfigDict({"name": "lamb", "learning_rate": 0.001})
    # Initial weights: the workdir of a run (its newest checkpoint is read), a folder with
    # config.json and model.safetensors of Hugging Face's or timm's, or a .safetensors file of
    # timm's or torchvision's; None: random weights.
    config.init_from = placeholder(str)
    config.init = ConfigDict()
    config.init.optimizer_state = "reset"  # reset | keep: take moments and counts of that run
    # Regex over paths of parameters that may be missing there, or have another shape; '': none.
    config.init.new_parameters = ""
    config.init.unfinished = False  # take the newest checkpoint of a run that has not ended
    config.prng = "threefry2x32"  # threefry2x32 | rbg: generator of dropout's masks
    # Runs one after the other, each from the weights of the one before: name -> the keys that the
    # phase changes. Phases run in the order of their names. See lamb_tpu.run.phases.
    config.phases = ConfigDict()
    config.schedule = ConfigDict()
    config.schedule.scaling = "identity"  # identity | linear | sqrt | random_matrix | legw
    config.schedule.base_batch_size = 128  # the batch size that optimizer.learning_rate is for
    config.schedule.weight_decay_scaling = "identity"  # timescale: keep AdamW's timescale
    config.schedule.warmup = "0 steps"  # under legw: the warm-up at the base batch size
    config.schedule.warmup_power = 1.0
    config.schedule.start_factor = 0.0  # learning rate at the start of the warm-up / peak
    config.schedule.hold = "0 steps"  # time at the peak, between warm-up and decay
    config.schedule.decay = "constant"  # constant | polynomial | cosine | exponential | step
    config.schedule.decay_from = "warmup"  # warmup: count from its and the hold's end | zero
    config.schedule.power = 1.0  # power of the polynomial
    # Polynomial and cosine: last learning rate / peak; exponential: its lower bound / peak.
    config.schedule.end_factor = 0.0
    config.schedule.decay_factor = 1.0  # exponential and step: factor of each drop
    config.schedule.decay_every = "0 steps"  # exponential: time between drops
    config.schedule.staircase = True  # exponential: constant between drops; False: continuous
    config.schedule.boundaries = ""  # step: '30 epochs, 60 epochs, 80 epochs', from update 0
    config.schedule.min_factor = 0.0  # lower bound of the learning rate / peak
    config.schedule.first_step = 0  # schedule step of the first update; 1 skips a rate of 0
    config.eval = ConfigDict({"every": "1 epochs", "batch_size": 1024})
    # A value to reach. Wall time and update of the first evaluation that reaches it are recorded.
    config.target = ConfigDict()
    config.target.metric = ""  # metric of the evaluation, such as 'ema_accuracy'; '': no target
    config.target.value = 0.0
    config.target.mode = "max"  # max | min: reached at or above the value, or at or below it
    config.target.stop = True  # end the run there; False: go on
    config.checkpoint = ConfigDict()
    config.checkpoint.every = "1 epochs"
    config.checkpoint.keep = 3  # number of newest checkpoints to keep
    config.checkpoint.keep_every = "0 steps"  # further checkpoints, kept for good; 0: none
    # Name of an evaluation's metric, such as 'accuracy' or 'ema_accuracy'. The state is then saved
    # after each evaluation too, and the checkpoint of the best one is kept. '': none.
    config.checkpoint.best = ""
    config.checkpoint.best_mode = "max"  # max | min: whether larger or smaller values are better
    config.log = ConfigDict({"every": "10 steps", "tensorboard": True})
    config.log.heartbeat_seconds = 60.0  # time between lines of each process but the first; 0: none
    config.log.lipschitz_rows = 0  # rows of the local Lipschitz estimate in each record; 0: none
    config.log.mlperf = False  # write mlperf.log, with the time to config.target, into the workdir
    # Statistics of gradients in the records, see lamb_tpu.batching.
    config.statistics = ConfigDict()
    config.statistics.noise_scale = False  # from the gradients of the parts of each batch
    config.statistics.preconditioned = False  # the noise scale in the geometry of Adam or LAMB
    config.statistics.decay = 0.99  # of the noise scale's averages over updates
    config.statistics.halves = False  # cosine of the gradients of two halves of each batch
    # (name, regex over paths) of modules with a cosine of their own; the first that matches decides
    config.statistics.modules = ()
    config.statistics.per_example = 0  # examples whose gradients are taken one by one; 0: none
    config.statistics.interval = 100  # updates from one such measurement to the next
    config.ema = ConfigDict({"decay": 0.0})  # moving average of the weights, evaluated too; 0: none
    config.guards = ConfigDict()
    config.guards.max_skipped = 0  # updates with a non-finite gradient that a run may skip
    # False: an evaluation with a metric that is not finite ends the run as diverged | True: warn
    config.guards.allow_nonfinite_eval = False
    config.guards.spike_factor = 10.0  # report a loss above this many recent medians; 0: none
    config.guards.spike_floor = 1.0  # report no loss below this, whatever the recent median
    config.guards.desync_every = "0 steps"  # compare the devices' parameters; 0: never
    config.guards.hang_seconds = 1800.0  # end a process without progress after this; 0: never
    # The batch is split over data and fsdp. If fsdp is not 1, ZeRO-1 and the rule 'fsdp' split over
    # it alone, so that on a large mesh their gathers stay among neighbours.
    config.mesh = ConfigDict({"data": -1, "fsdp": 1, "model": 1, "sequence": 1})
    config.parallel = ConfigDict()
    config.parallel.backend = "jit"  # jit | shard_map: collectives by the compiler, or explicit
    config.parallel.rules = ()  # (regex over paths, replicated | fsdp | mesh axis of each axis)
    config.parallel.optimizer_state = "replicated"  # replicated | zero1: split over fsdp, or data
    # What gradients are sent as, {"name": "bfloat16", ...} with the options of the exchange, see
    # lamb_tpu.parallel. Its field full_precision has regexes over paths of parameters whose
    # gradients stay in float32.
    config.parallel.exchange = ConfigDict({"name": "float32"})
    return config.lock()


def recipe_folder() -> pathlib.Path:
    """Returns the folder of the shipped recipes: the installed package's own, else configs."""
    package = pathlib.Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def recipe_path(name: str) -> str:
    """Returns the file of a recipe: a path as it is, or the shipped recipe of that name."""
    shipped = recipe_folder() / f"{name.removesuffix('.py')}.py"
    # A file of that name in the current folder comes before a shipped recipe.
    if os.path.exists(name) or not re.fullmatch(r"\w+(\.py)?", name) or not shipped.exists():
        return name
    return str(shipped)


def parse_argument(argument: str | None, **defaults: Any) -> ConfigDict:
    """Parses the text after the colon of `configs/x.py:batch=4096,smoke`.

    Args:
      argument: comma-separated `key=value` items; a bare `key` means true.
      **defaults: the known keys with their defaults. A value gets the type of its default.

    Returns:
      The values, with the defaults of keys that the argument leaves out.

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


def check_argument(key: str, value: Any, known: Collection[Any]) -> None:
    """Raises a UserError if a config's argument is not one of the known values."""
    if value not in known:
        raise UserError(
            f"the config's argument {key}={value!r} is unknown; known: {', '.join(map(str, known))}"
        )


def _convert(key: str, text: str, default: Any) -> Any:
    kind = type(default)
    # bool('False') is True, so the words are compared.
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
    """Refuses keys that `base_config` does not have, missing keys, and values of another type.

    Model, task, optimizer, data set, batch rule and exchange check their own fields when they are
    built.
    """
    _compare_keys(config, base_config(), "config")
    for section in ("task", "model", "optimizer"):
        if "name" not in config[section]:
            raise UserError(f"config.{section} has no name; give config.{section}.name")
    if "learning_rate" not in config.optimizer:
        raise UserError("config.optimizer.learning_rate is missing; give the base batch's rate")
    # Raises for a value that config.json cannot hold.
    flatten(config)


_CHOICES = {
    "parallel.backend": ("jit", "shard_map"),
    "parallel.optimizer_state": ("replicated", "zero1"),
    "checkpoint.best_mode": ("max", "min"),
    "target.mode": ("max", "min"),
    "init.optimizer_state": ("reset", "keep"),
    "prng": ("threefry2x32", "rbg"),
}
# Sections with fields of their own, which are checked elsewhere.
_OWN_FIELDS = (
    "config.task",
    "config.model",
    "config.optimizer",
    "config.mesh",
    "config.data.options",
    "config.phases",
    "config.batch_rule",
    "config.parallel.exchange",
)
_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    tuple: "a tuple",
}


def _compare_keys(config: Mapping[str, Any], base: Mapping[str, Any], path: str) -> None:
    for key in config:
        if key not in base:
            raise UserError(f"{path}.{key} is unknown; {path} has: {', '.join(base)}")
    for key in base:
        if key not in config:
            raise UserError(f"{path}.{key} is missing; start from lamb_tpu.config.base_config()")
        value, default = config[key], base[key]
        if isinstance(default, ConfigDict):
            if not isinstance(value, ConfigDict):
                raise UserError(f"{path}.{key} is {value!r}; it must be a ConfigDict")
            if f"{path}.{key}" not in _OWN_FIELDS:
                _compare_keys(value, default, f"{path}.{key}")
        elif default is not None or value is not None:
            # A default of None is a placeholder for text.
            kind = str if default is None else type(default)
            # type() and not isinstance(), because True is an int.
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise UserError(f"{path}.{key} is {value!r}; it must be {_KINDS[kind]}")


def check_values(config: ConfigDict) -> None:
    """Refuses values out of range, in a config that has passed `check_keys`."""
    flat = flatten(config)
    for key in (
        "batch_size",
        "eval.batch_size",
        "checkpoint.keep",
        "schedule.base_batch_size",
        "accumulation_steps",
    ):
        if flat[key] < 1:
            raise UserError(f"config.{key} is {flat[key]}; it must be at least 1")
    for key in (
        "guards.max_skipped",
        "guards.spike_factor",
        "guards.spike_floor",
        "guards.hang_seconds",
        "log.heartbeat_seconds",
        "log.lipschitz_rows",
    ):
        if not 0 <= flat[key] < math.inf:
            raise UserError(f"config.{key} is {flat[key]}; it must be a number of at least 0")
    if flat["schedule.first_step"] >= 2**31:  # updates are counted by 32 bits
        raise UserError(
            f"config.schedule.first_step is {flat['schedule.first_step']}; it must be below {2**31}"
        )
    for key in ("init_from", "data.dir", "data.prepared_dir"):
        if flat[key] == "":  # an empty path would be the current folder
            raise UserError(f"config.{key} is empty; give a path, or leave it out for none")
    for key, known in _CHOICES.items():
        if flat[key] not in known:
            raise UserError(f"config.{key} is {flat[key]!r}; known: {', '.join(known)}")
    if not math.isfinite(config.target.value):
        raise UserError(f"config.target.value is {config.target.value}; it must be finite")
    # Without a metric a target value, or a log of the time to it, would have no effect.
    if not config.target.metric:
        for key, off in (("target.value", 0.0), ("log.mlperf", False)):
            if flat[key] != off:
                raise UserError(
                    f"config.{key} is {flat[key]}, and config.target.metric is ''; give the metric "
                    "of the evaluation that is to reach config.target.value, such as 'accuracy', "
                    f"or config.{key}={off}"
                )
    if not 0 <= config.ema.decay < 1:
        raise UserError(f"config.ema.decay is {config.ema.decay}; it must be in [0, 1)")
    if not 0 <= config.seed < 2**32:  # JAX' random keys keep 32 bits of a seed
        raise UserError(f"config.seed is {config.seed}; it must lie in 0..{2**32 - 1}")
    try:
        re.compile(config.init.new_parameters)
    except re.error as error:
        raise UserError(
            f"config.init.new_parameters is {config.init.new_parameters!r}, which is not a valid "
            f"regular expression ({error})"
        ) from None
    for key in ("start_factor", "end_factor", "min_factor"):
        factor = config.schedule[key]
        if not 0 <= factor <= 1:
            raise UserError(f"config.schedule.{key} is {factor}; it must lie in 0..1")
    # The optimizer has fields of its own, so `check_keys` has not compared the rate's type.
    rate = config.optimizer.learning_rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise UserError(
            f"config.optimizer.learning_rate is {rate!r}; it must be a number of at least 0"
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a config to {'optimizer.name': 'lamb', ...}, sorted, with lists for tuples.

    Raises:
      UserError: a value that JSON cannot hold.
    """
    flat: dict[str, Any] = {}
    for key in sorted(config):
        value = config[key]
        if isinstance(value, (Mapping, ConfigDict)):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            # Through JSON and back, so that the value compares equal to what config.json holds: a
            # tuple becomes a list.
            try:
                flat[prefix + key] = json.loads(json.dumps(value))
            except (TypeError, ValueError):
                raise UserError(
                    f"config.{prefix}{key} is {value!r}; a config holds numbers, text, booleans, "
                    "None and lists of them only (a dtype by its name, such as 'bfloat16')"
                ) from None
    return flat


# Keys of older versions, and those that have taken their place.
_RENAMED = {"parallel.gradient_dtype": "parallel.exchange.name"}


def renamed(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flattened config of any version with the keys of this one."""
    found = {}
    for key, value in flat.items():
        own = re.sub(r"^phases\.[^.]+\.", "", key)  # within a phase too
        found[key.removesuffix(own) + _RENAMED.get(own, own)] = value
    return found


def unflatten(flat: Mapping[str, Any]) -> ConfigDict:
    """Returns the locked config that `flatten` flattened; missing keys get their defaults."""
    nested: dict[str, Any] = {}
    for path, value in renamed(flat).items():
        *sections, key = path.split(".")
        section = nested
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    config = base_config()
    with config.unlocked():
        _overlay(config, nested, "config")
    return config


def _overlay(config: ConfigDict, nested: Mapping[str, Any], path: str) -> None:
    for key, value in nested.items():
        old = config.get(key)
        if isinstance(old, ConfigDict) and not isinstance(value, dict):
            raise UserError(f"{path}.{key} is {value!r}; it must be a ConfigDict")
        if isinstance(old, ConfigDict) and f"{path}.{key}" not in _OWN_FIELDS:
            _overlay(old, value, f"{path}.{key}")
        elif isinstance(value, dict):
            # A section with fields of its own is replaced whole, so that none of base_config's
            # stay.
            config[key] = ConfigDict(value)
        else:  # JSON has no tuples
            try:
                config[key] = tuple(value) if isinstance(old, tuple) else value
            except TypeError:
                raise UserError(
                    f"{path}.{key} is {value!r}; it must have the type of {old!r}"
                ) from None


def section_of(config: ConfigDict, key: str) -> ConfigDict:
    """Returns the section of a config, or the config itself, that has a dotted key's last part.

    Raises:
      UserError: there is no such key; the message lists the known ones.
    """
    node: Any = config
    where = "config"
    for part in key.split("."):
        if not isinstance(node, ConfigDict) or part not in node:
            known = ", ".join(node) if isinstance(node, ConfigDict) else "no keys"
            raise UserError(f"{where}.{part} is unknown; {where} has: {known}")
        section, node, where = node, node[part], f"{where}.{part}"
    return section


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], free_keys: tuple[str, ...] = FREE_KEYS
) -> list[str]:
    """Returns a line for each key that differs between two flattened configs, but for free keys."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        # A free key is free within a phase too.
        free = re.sub(r"^phases\.[^.]+\.", "", key).startswith(free_keys)
        if old.get(key) != new.get(key) and not free:
            lines.append(f"{key}: {old.get(key)!r} there, {new.get(key)!r} now")
    return lines

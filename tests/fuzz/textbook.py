"""Schedules, rules and optimizers in NumPy, written from their formulas and not from the package.

The oracle is the package itself on one device, so it has the errors that one device has too. These
formulas find such errors. They cover the common optimizers with their default arguments.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Leaves = dict[str, np.ndarray]
# Learning rate schedule: number of completed updates -> rate; a fraction if batches differ.
Schedule = Callable[[float], float]
DEFAULTS = {"momentum": 0.9, "b1": 0.9, "b2": 0.999}
OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "lamb", "lion")
_DECAYS = {"adamw": 0.01, "lamb": 0.01, "lion": 1e-3}
_ARGUMENTS = {"name", "learning_rate", "rules", "weight_decay", "clip_global_norm", "l2"}


def covers(optimizer: Mapping[str, Any]) -> bool:
    """Returns whether the formulas cover an optimizer of a case."""
    return optimizer["name"] in OPTIMIZERS and set(optimizer) <= _ARGUMENTS


def updates_of(duration: str, batch_size: int, examples: int) -> float:
    """Returns the number of updates of a duration such as '16 examples'."""
    number, unit = duration.split()
    each = {"steps": 1.0, "examples": 1 / batch_size, "epochs": examples / batch_size}
    return float(number) * each[unit]


def schedule(keys: Mapping[str, Any], rate: float, examples: int, total: int) -> Schedule:
    """Returns the learning rate from the flat keys of a config."""

    def key(name: str) -> Any:
        return keys[f"schedule.{name}"]

    batch = keys["batch_size"]
    factor, scaling = batch / key("base_batch_size"), key("scaling")
    powers = {"identity": 0.0, "linear": 1.0, "sqrt": 0.5, "legw": 0.5}
    peak = rate * factor ** powers[scaling]
    # LEGW's warm-up is given for the base batch; k times the batch has k times as many epochs.
    of_warmup = key("base_batch_size") if scaling == "legw" else batch
    warmup = updates_of(key("warmup"), of_warmup, examples)
    start = key("start_factor") * peak
    begins = warmup if key("decay_from") == "warmup" else 0.0
    times = [
        updates_of(each.strip(), batch, examples) for each in key("boundaries").split(",") if each
    ]

    def fraction(t: float) -> float:
        left = min(max((total - t) / (total - begins), 0.0), 1.0) if total > begins else 0.0
        end = key("end_factor")
        if key("decay") == "polynomial":
            return end + (1 - end) * left ** key("power")
        if key("decay") == "cosine":
            return end + (1 - end) * (1 - math.cos(math.pi * left)) / 2
        if key("decay") == "exponential":
            drops = (t - begins) / updates_of(key("decay_every"), batch, examples)
            drops = math.floor(max(drops, 0) + 1e-6) if key("staircase") else max(drops, 0)
            return max(key("decay_factor") ** drops, end)
        if key("decay") == "step":
            return key("decay_factor") ** sum(t >= time for time in times)
        return 1.0

    def of(update: float) -> float:
        t = update + key("first_step")
        if t < warmup:
            return start + (peak - start) * (t / warmup) ** key("warmup_power")
        return peak * fraction(t)

    return of


def batch_sizes(rule: Mapping[str, Any] | None, batch: int, total: int) -> list[int]:
    """Returns the size of each batch: constant, or steps at numbers of examples seen (`ramp`)."""
    sizes: list[int] = []
    while (seen := sum(sizes)) < total:
        points = [(0, batch)] if rule is None else rule["points"]
        size = [size for begins, size in points if begins <= seen][-1]
        sizes.append(min(size, total - seen))
    return sizes


def rates(
    rule: Mapping[str, Any] | None, schedule: Schedule, starts: Any, sizes: list[int]
) -> list[float]:
    """Returns the learning rate of each update; `starts` counts batches of the config's size."""
    scaling = (rule or {}).get("scaling", "identity")
    power = {"identity": 0.0, "linear": 1.0, "sqrt": 0.5}[scaling]
    base = sizes[0]
    return [
        schedule(start) * (size / base) ** power for start, size in zip(starts, sizes, strict=True)
    ]


def decays_and_adapts(rules: Any, path: str) -> tuple[bool, bool]:
    """Returns whether a leaf decays, and whether its layer adapts the step."""
    *modules, last = path.split("/")
    in_norm = any("norm" in module for module in modules)
    if not isinstance(rules, str):  # the rules of a scanned stack
        rules = "no_bias_no_norm"
    excluded = {
        "all": False,
        "no_bias_no_norm": last in ("bias", "scale"),
        "no_bias_no_norm_decay": last in ("bias", "scale"),
        "resnet": in_norm,
    }[rules]
    return not excluded, not excluded or rules == "no_bias_no_norm_decay"


def layers(path: str, value: np.ndarray, is_stacked: bool) -> np.ndarray:
    """Returns the l2 norm of each layer of a leaf, broadcast to the leaf."""
    stacks = is_stacked and re.match("encoder/layers/", path)
    axes = tuple(range(1, value.ndim)) if stacks else None
    return np.sqrt(np.sum(value**2, axes, keepdims=True))


class Optimizer:
    """An optimizer with its moments; `step` returns the new parameters."""

    def __init__(self, fields: Mapping[str, Any], rates: list[float], is_stacked: bool) -> None:
        self._fields, self._rates, self._is_stacked = fields, rates, is_stacked
        self._first: Leaves = {}
        self._second: Leaves = {}
        self._count = 0

    def step(self, params: Leaves, grads: Leaves) -> Leaves:
        """Makes an update with the gradients of the loss."""
        fields, rate = self._fields, self._rates[self._count]
        self._count += 1
        rules = {path: decays_and_adapts(fields["rules"], path) for path in params}
        if "l2" in fields:
            grads = {
                path: grad + fields["l2"] * params[path] * rules[path][0]
                for path, grad in grads.items()
            }
        if "clip_global_norm" in fields:
            norm = math.sqrt(sum(float(np.sum(grad**2)) for grad in grads.values()))
            scale = min(1.0, fields["clip_global_norm"] / norm)
            grads = {path: grad * scale for path, grad in grads.items()}
        return {
            path: param - rate * self._direction(path, param, grads[path], *rules[path])
            for path, param in params.items()
        }

    def _direction(
        self, path: str, param: np.ndarray, grad: np.ndarray, decays: bool, adapts: bool
    ) -> np.ndarray:
        name, t = self._fields["name"], self._count
        decay = self._fields.get("weight_decay", _DECAYS.get(name, 0.0)) * decays * param
        m, v = self._first.get(path, 0 * grad), self._second.get(path, 0 * grad)
        if name in ("sgd", "momentum", "nesterov", "adam"):
            grad = grad + decay
        if name == "sgd":
            return grad
        if name in ("momentum", "nesterov"):
            self._first[path] = m = 0.9 * m + grad
            return grad + 0.9 * m if name == "nesterov" else m
        if name == "lion":
            self._first[path] = 0.99 * m + 0.01 * grad
            return np.sign(0.9 * m + 0.1 * grad) + decay
        self._first[path] = m = 0.9 * m + 0.1 * grad
        self._second[path] = v = 0.999 * v + 0.001 * grad**2
        eps = 1e-6 if name == "lamb" else 1e-8
        direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
        if name == "adam":
            return direction
        direction = direction + decay
        if name == "lamb" and adapts:
            weights, length = (layers(path, x, self._is_stacked) for x in (param, direction))
            ratio = np.where(
                (weights > 0) & (length > 0), weights / np.where(length > 0, length, 1), 1
            )
            direction = ratio * direction
        return direction


def averaged(average: np.ndarray, value: np.ndarray, decay: float, updates: int) -> np.ndarray:
    """Returns a moving average after one more update; `updates` counts those before it."""
    kept = min(decay, (1 + updates) / (10 + updates))
    return kept * average + (1 - kept) * value

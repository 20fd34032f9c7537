"""The gradient exchange that a config names, after all checks."""

import re
from typing import Any

import jax
from jax.sharding import Mesh

from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.optim import parameters
from lamb_tpu.parallel.exchange import (
    EXCHANGES,
    Exchange,
    ShardedExchange,
    exchange_over,
    make_exchange,
)
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.spec import Spec
from lamb_tpu.spec_keys import plain
from lamb_tpu.types import Params

_KEY = "config.parallel.exchange"
_WIDE = "full_precision"


def make(spec: Spec, mesh: Mesh) -> Exchange:
    """Returns the exchange of a config over a mesh."""
    name, options, patterns = _read(spec)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problem = f"has {pattern!r}, which is not a valid regular expression ({error})"
            raise UserError(f"{_KEY}.{_WIDE}", ABSENT, problem, "correct the expression") from None
    try:
        return exchange_over(mesh, EXCHANGES.find(name), options)
    except (ValueError, TypeError) as error:
        key = re.match(r"\w+", str(error))
        raise _error(error, "." if key is not None and key[0] in options else ": ") from error


def make_sharded(
    spec: Spec, layout: Layout, params: Params, stacked: str | None = None
) -> ShardedExchange | None:
    """Returns the exchange for given parameters after all checks; None under jit.

    Args:
      spec: the config.
      layout: the shardings of parameters and moments.
      params: the parameters, or their shapes.
      stacked: regex that matches the paths of parameters that stack layers along axis 0; the default
        of the exchange's option `stacked`.
    """
    if spec.parallel.backend != "shard_map":
        return None
    name, options, patterns = _read(spec)
    paths = parameters.leaf_paths(params)
    for pattern in patterns:
        if not any(parameters.matches(pattern, path) for path in paths):
            first = f"{', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
            problem = f"has the regex {pattern!r}, which matches no parameter"
            raise UserError(f"{_KEY}.{_WIDE}", ABSENT, problem, f"match one of {first}")
    if patterns and all(any(parameters.matches(p, path) for p in patterns) for path in paths):
        problem, remedy = "matches every parameter", f"use {_KEY}.name='float32'"
        raise UserError(f"{_KEY}.{_WIDE}", patterns, problem, remedy)
    if stacked is not None and "stacked" in EXCHANGES.fields(name):
        options.setdefault("stacked", (stacked,))
    exchange = make_exchange(layout, EXCHANGES.find(name), options, patterns)
    try:
        jax.eval_shape(exchange.init, params)
    except ValueError as error:
        raise _error(error, ".") from error
    return exchange


def describe(spec: Spec, exchange: ShardedExchange | None) -> str:
    """Returns a line about the exchange for the terminal; '' for None and for float32."""
    name, options, patterns = _read(spec)
    if exchange is None or name == "float32":
        return ""
    suffix = "".join(f", {key}={value!r}" for key, value in options.items())
    devices, inner = exchange.sizes
    line = f"exchange: {name}{suffix} between {devices} devices"
    if inner > 1:
        line += f", after sums in full precision within groups of {inner} devices"
    if patterns:
        line += f"; in float32: {', '.join(patterns)}"
    return line


def _read(spec: Spec) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    section = spec.parallel.exchange
    name = EXCHANGES.name_in(section)
    given = {key: _hashable(plain(value)) for key, value in section.fields.items()}
    EXCHANGES.check(name, given)
    patterns = given.pop(_WIDE, ())
    return name, given, patterns


def _hashable(value: Any) -> Any:
    """Replaces the lists in a value, which come from JSON, by tuples."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _error(error: Exception, separator: str) -> UserError:
    """Turns an error of an exchange into a UserError that names the config key."""
    if isinstance(error, UserError):
        return UserError(f"{_KEY}{separator}{error.key}", *error.args[1:])
    problem, _, remedy = " ".join(str(error).split()).partition("; ")
    if separator == ".":
        key, _, problem = problem.partition(" ")
        return UserError(f"{_KEY}.{key}", problem=problem, remedy=remedy)
    return UserError(_KEY, problem=f": {problem}", remedy=remedy)

"""The exchange of a config: its fields, and what it combines with."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from lamb_tpu import own
from lamb_tpu.errors import UserError
from lamb_tpu.optim import factory, parameters
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.optim.staged import Staged, leaves_devices_apart
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange import (
    EXCHANGES,
    Cast,
    Exchange,
    Placed,
    exchange_over,
    make_exchange,
)
from lamb_tpu.parallel.exchange.keeping import Kept
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.run.recipe import optimizer_of
from lamb_tpu.run.statistics import statistics_of

SECTION = "parallel.exchange"
_KEY = f"config.{SECTION}"
_WIDE = "full_precision"


def exchange_fields(name: Any) -> dict[str, dataclasses.Field]:
    """Returns the fields of config.parallel.exchange for an exchange, beside its name.

    Raises:
      UserError: the exchange is unknown.
    """
    found = own.fields(_class(name), ("axes", "num_devices"))
    if name != "float32":
        wide: Any = dataclasses.field(default=())
        wide.name, wide.type = _WIDE, tuple[str, ...]
        found[_WIDE] = wide
    return found


def _class(name: Any) -> Any:
    if own.is_own(name):
        return own.find(name, f"{_KEY}.name")
    if name not in EXCHANGES:
        raise UserError(
            f"{_KEY}.name is {name!r}; known: {', '.join(EXCHANGES)}, and one of your own, "
            f"{own.FORM}"
        )
    return EXCHANGES[name]


def check(config: ConfigDict, mesh: Mesh, training: bool = True) -> None:
    """Refuses an exchange with a wrong field, or that something else in a config rules out.

    Args:
      config: of the run.
      mesh: over all devices.
      training: False for an evaluation, which exchanges nothing.

    Raises:
      UserError: see above.
    """
    name, options, patterns = _read(config)
    exchange = _make(mesh, name, options)
    for pattern in patterns:
        _check_pattern(pattern)
    if name == "float32" or not training:
        return
    if config.parallel.backend != "shard_map":
        raise UserError(
            f"{_KEY}.name is {name!r}; under config.parallel.backend='jit' the compiler sends the "
            "gradients, so this needs 'shard_map'"
        )
    if isinstance(exchange, Cast):
        return
    if exchange.num_devices < 2:
        raise UserError(
            f"{_KEY}.name is {name!r}, and config.mesh splits the batch over 1 device, which has "
            "nothing to exchange; it must be 'float32', or there be more devices"
        )
    asked = statistics_of(config)
    for key in ("noise_scale", "preconditioned", "halves"):
        if getattr(asked, key):
            raise UserError(
                f"{_KEY}.name is {name!r}, and {_asking(config, key)} compares parts of the batch "
                "with their sum, which this exchange changes; leave that out, or take 'float32' or "
                "'bfloat16'"
            )


def _asking(config: ConfigDict, key: str) -> str:
    if config.statistics[key]:
        return f"config.statistics.{key}"
    return (
        "config.optimizer.agvm"
        if config.optimizer.get("agvm") is not None
        else (f"the rule config.batch_rule.name={config.batch_rule.name!r}")
    )


def check_optimizer(config: ConfigDict, tx: optax.GradientTransformation, mesh: Mesh) -> None:
    """Refuses an optimizer that its exchange, or what it sums over devices itself, rules out.

    Args:
      config: of the run.
      tx: its optimizer.
      mesh: over all devices.

    Raises:
      UserError: the exchange, the backend, or where the state lives, rules it out.
    """
    name, options, _ = _read(config)
    if _make(mesh, name, options).has_momentum:
        _check_momentum(config, name)
    if not isinstance(tx, Reducing):
        return
    told = f"config.optimizer.name is {config.optimizer.name!r}, which sums over devices by itself"
    several = mesh_lib.num_batch_shards(mesh) > 1
    if config.parallel.backend != "shard_map" and several:
        raise UserError(f"{told}; this needs config.parallel.backend='shard_map'")
    if leaves_devices_apart(tx):
        raise UserError(
            f"{told} at intervals, between which parameters of the devices would differ; "
            "config.optimizer.local_step_clipper must be 1"
        )
    if config.parallel.optimizer_state != "replicated":
        raise UserError(
            f"{told} and keeps its state whole; config.parallel.optimizer_state must be "
            "'replicated'"
        )
    if config.parallel.rules:
        raise UserError(f"{told} and needs whole parameters; config.parallel.rules must be empty")
    asked = statistics_of(config)
    if asked.noise_scale or asked.preconditioned or asked.halves:
        raise UserError(
            f"{told}, so that there is no gradient of the batch for statistics of its parts; leave "
            "out config.statistics, and a config.batch_rule that needs them"
        )
    # An optimizer of a user's own may have other reasons to sum by itself.
    if several and isinstance(tx, Staged) and config.parallel.exchange.name == "float32":
        raise UserError(
            f"{told} so that few bits are sent, and {_KEY}.name is 'float32'; set it to 'onebit'"
        )


def _check_momentum(config: ConfigDict, exchange: str) -> None:
    fields = config.optimizer.to_dict()
    arguments = factory.arguments_of({**fields, "name": optimizer_of(fields["name"])})
    for key in ("momentum", "b1", "beta"):
        if arguments.get(key):
            raise UserError(
                f"{_KEY}.name is {exchange!r}, which has the momentum, and config.optimizer.{key} "
                f"of {fields['name']!r} is {arguments[key]!r}, a second one; it must be 0, or "
                f"config.optimizer.name 'sgd', or {_KEY}.momentum 0"
            )


def placed(
    config: ConfigDict, layout: Layout, params: Any, stacked: str | None = None
) -> Placed | None:
    """Returns the exchange of a config that has passed `check`; None under jit.

    Args:
      config: of the run.
      layout: the shardings of parameters and moments.
      params: the parameters, or their shapes.
      stacked: regex over the paths of parameters that stack layers along their first axis, for an
        exchange with an option of this name that the config leaves out.

    Raises:
      UserError: `full_precision` or an option of the exchange does not fit the parameters.
    """
    if config.parallel.backend != "shard_map":
        return None
    name, options, patterns = _read(config)
    paths = parameters.leaf_paths(params)
    for pattern in patterns:
        if not any(parameters.matches(pattern, path) for path in paths):
            raise UserError(
                f"{_KEY}.{_WIDE} has the regex {pattern!r}, which matches no parameter; they are: "
                f"{', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
            )
    if patterns and all(any(parameters.matches(p, path) for p in patterns) for path in paths):
        raise UserError(
            f"{_KEY}.{_WIDE} is {patterns!r}, which matches every parameter; take {_KEY}.name="
            "'float32'"
        )
    if stacked is not None and "stacked" in exchange_fields(name):
        options.setdefault("stacked", (stacked,))
    found = make_exchange(layout, _class(name), options, patterns)
    try:
        jax.eval_shape(found.init, params)
    except ValueError as error:
        raise UserError(f"{_KEY}.{error}") from error
    return found


def parts(exchange: Placed | None, params: Any) -> tuple[Kept, ...]:
    """Returns the part of the state that an exchange keeps, if it may keep one."""
    if exchange is None or not exchange.keeps_residual:
        return ()
    return (Kept(exchange, params),)


def describe(config: ConfigDict, exchange: Placed | None) -> str:
    """Returns a line about the exchange for the terminal; '' for float32."""
    name, options, patterns = _read(config)
    if exchange is None or name == "float32":
        return ""
    told = "".join(f", {key}={value!r}" for key, value in options.items())
    devices, inner = exchange.sizes
    line = f"exchange: {name}{told} between {devices} devices"
    if inner > 1:
        line += f", after sums in full precision within {inner}"
    if patterns:
        line += f"; in float32: {', '.join(patterns)}"
    return line


def _read(config: ConfigDict) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Returns the name, the options and the regexes of leaves in full precision."""
    fields: Mapping[str, Any] = config.parallel.exchange.to_dict()
    if "name" not in fields:
        raise UserError(f"{_KEY} has no name; known: {', '.join(EXCHANGES)}")
    name = fields["name"]
    known = exchange_fields(name)
    given = {key: _hashable(value) for key, value in fields.items() if key != "name"}
    own.check(_KEY, "exchange", name, known, given)
    patterns = given.pop(_WIDE, ())
    if not isinstance(patterns, tuple) or not all(isinstance(p, str) for p in patterns):
        raise UserError(
            f"{_KEY}.{_WIDE} is {fields[_WIDE]!r}; it must be a tuple of regular expressions"
        )
    return name, given, patterns


def _hashable(value: Any) -> Any:
    """Returns a value with tuples for lists, as JSON has them."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _make(mesh: Mesh, name: str, options: Mapping[str, Any]) -> Exchange:
    try:
        return exchange_over(mesh, _class(name), options)
    except (ValueError, TypeError) as error:
        text = " ".join(str(error).split())
        key = re.match(r"\w+", text)
        dot = "." if key is not None and key[0] in options else ": "
        raise UserError(f"{_KEY}{dot}{text}") from error


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"{_KEY}.{_WIDE} has {pattern!r}, which is not a valid regular expression ({error})"
        ) from None

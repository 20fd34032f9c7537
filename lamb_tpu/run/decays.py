"""Learning-rate decays, selected by `config.schedule.decay`.

A shipped decay is a function of a `DecaySpan` and of keys of config.schedule. It returns arguments
of `optim.schedules.warmup`. A custom decay is a class or function whose arguments are keys of
config.schedule.options. It returns a function from the number of updates since the decay began to
a fraction of the peak learning rate, see `schedules.warmup`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lamb_tpu.components import Field, Registry, fields_of, parameters
from lamb_tpu.errors import UserError, naming
from lamb_tpu.optim import schedules
from lamb_tpu.spec_keys import Schedule, plain


class DecaySpan(NamedTuple):
    """Properties of a run that a decay may depend on.

    Attributes:
      peak: learning rate at the end of the warm-up.
      decay_steps: updates from the start of the decay to the end of the run, at least 1; may be
        fractional. A custom decay may have an argument of this name.
      decay_from: config.schedule.decay_from.
      in_steps: function from a duration, such as '3 epochs', to updates.
    """

    peak: float
    decay_steps: float
    decay_from: str
    in_steps: Callable[[str], float]


def constant(run: DecaySpan) -> dict[str, Any]:
    """Keeps the learning rate at the peak."""
    return dict(decay="constant")


def polynomial(run: DecaySpan, power: float, end_factor: float) -> dict[str, Any]:
    """Decays to `end_factor` times the peak, as a power of the remaining time."""
    return dict(decay="polynomial", power=power, end_value=end_factor * run.peak)


def cosine(run: DecaySpan, end_factor: float) -> dict[str, Any]:
    """Decays to `end_factor` times the peak, as half a period of a cosine."""
    return dict(decay="cosine", end_value=end_factor * run.peak)


def exponential(
    run: DecaySpan, decay_factor: float, decay_every: str, staircase: bool, end_factor: float
) -> dict[str, Any]:
    """Multiplies the rate by `decay_factor` per `decay_every`, a duration such as '2 epochs'."""
    _check_factor("exponential", decay_factor)
    with naming("config.schedule.decay_every"):
        decay = schedules.exponential_decay(decay_factor, run.in_steps(decay_every), staircase)
    return dict(decay=decay, end_value=end_factor * run.peak)


def step(run: DecaySpan, decay_factor: float, boundaries: str) -> dict[str, Any]:
    """Multiplies the rate by `decay_factor` at each boundary."""
    _check_factor("step", decay_factor)
    if run.decay_from != "zero":
        problem = "cannot be combined with the decay 'step', which counts boundaries from update 0"
        raise UserError("config.schedule.decay_from", run.decay_from, problem, "use 'zero'")
    with naming("config.schedule.boundaries"):
        edges = [run.in_steps(text) for text in boundaries.split(",")]
        return dict(decay=schedules.step_decay(edges, decay_factor))


_SHIPPED: dict[str, Callable[..., dict[str, Any]]] = {
    decay.__name__: decay for decay in (constant, polynomial, cosine, exponential, step)
}


def _options(decay: Any) -> dict[str, Field]:
    # The arguments of a shipped decay are keys of config.schedule.
    return {} if decay in _SHIPPED.values() else fields_of(decay, ("decay_steps",))


DECAYS = Registry(
    "decay", _SHIPPED, section="schedule.options", name_key="schedule.decay", fields=_options
)
# Keys of config.schedule that each decay reads; keys of other decays must have their defaults.
KEYS = {name: tuple(fields_of(decay, ("run",))) for name, decay in _SHIPPED.items()}


def arguments(schedule: Schedule, run: DecaySpan) -> dict[str, Any]:
    """Returns the decay of config.schedule as arguments of `schedules.warmup`."""
    name, options = schedule.decay, plain(schedule.options)
    DECAYS.check(name, options)
    is_custom = DECAYS.is_custom(name)
    keys = ("end_factor",) if is_custom else KEYS[name]
    given, defaults = vars(schedule), vars(Schedule())
    # A key of another decay would be ignored silently.
    for key in sorted({key for each in KEYS.values() for key in each}):
        if key not in keys and given[key] != defaults[key]:
            problem = f"has no effect on the decay {name!r}"
            remedy = f"use {defaults[key]!r}"
            raise UserError(f"config.schedule.{key}", given[key], problem, remedy)
    if is_custom:
        end_value = schedule.end_factor * run.peak
        return dict(decay=_custom(name, options, run.decay_steps), end_value=end_value)
    return DECAYS[name](run, **{key: given[key] for key in keys})


def _custom(name: str, options: Mapping[str, Any], decay_steps: float) -> Callable[..., Any]:
    """Returns a custom decay after checking that it maps an array of counts to as many numbers."""
    takes = {parameter.name for parameter in parameters(DECAYS.find(name))}
    given = {"decay_steps": decay_steps} if "decay_steps" in takes else {}
    part: Callable[..., Any] = DECAYS.make(name, options, **given)
    if not callable(part):
        remedy = "return a function from the updates since the decay began to a fraction of the peak rate"
        raise UserError("config.schedule.decay", name, f"returns {part!r}", remedy)
    with DECAYS.making(name):
        output = jax.eval_shape(part, jax.ShapeDtypeStruct((2,), jnp.float32))
    shape = getattr(output, "shape", None)
    if shape != (2,) or not jnp.issubdtype(output.dtype, jnp.floating):
        problem = f"returns a function that returns {output!r} for 2 counts"
        raise UserError("config.schedule.decay", name, problem, "return 2 floating-point numbers")
    return part


def _check_factor(name: str, factor: float) -> None:
    if not 0 < factor < 1:
        problem = f"is out of range for the decay {name!r}"
        remedy = "use a number between 0 and 1, such as 0.1"
        raise UserError("config.schedule.decay_factor", factor, problem, remedy)

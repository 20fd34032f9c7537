"""Every transform of the library, under a name, for the tests that send all of them through."""

import functools
import inspect
from collections.abc import Callable

import optax

from lamb_tpu import optim
from lamb_tpu.optim import clipping, rounding
from lamb_tpu.optim.factory import OPTIMIZERS
from lamb_tpu.optim.presets import PRESETS

Build = Callable[..., optax.GradientTransformation]  # (learning_rate, **arguments)


def _trust_ratio_chain(learning_rate, rules="all", axis_name=None, collect=False):
    return optax.chain(
        optim.scale_by_trust_ratio(rules, axis_name=axis_name, collect=collect),
        optax.scale_by_learning_rate(learning_rate),
    )


def _clipped_lamb(learning_rate, rules="all", axis_name=None):
    return optax.chain(
        clipping.clip_global_norm(1.0, axis_name),
        optim.lamb(learning_rate, rules=rules, axis_name=axis_name),
    )


def _rounded_lamb(learning_rate, rules="all", axis_name=None):
    return rounding.stochastic_rounding(
        optim.lamb(learning_rate, rules=rules, axis_name=axis_name), seed=1, axis_name=axis_name)


# Each algorithm once, and what is built around one.
PLAIN: dict[str, Build] = {
    **OPTIMIZERS,
    "scale_by_trust_ratio": _trust_ratio_chain,
    "clip_global_norm, lamb": _clipped_lamb,
    "stochastic_rounding(lamb)": _rounded_lamb,
}


def takes(name: str, argument: str) -> bool:
    """Returns whether one of `PLAIN` has an argument."""
    return argument in inspect.signature(PLAIN[name]).parameters


# Those that need whole matrices, or whole leaves, inside shard_map.
WHOLE = ("apollo", "muon", "adafactor")
# Those that take leaves split inside shard_map, whichever they are.
SPLITTING = [name for name in PLAIN if takes(name, "axis_name") and name not in WHOLE]

# The same with other arguments.
TRANSFORMS: dict[str, Build] = {
    **PLAIN,
    **{
        f"{name} collecting": functools.partial(build, collect=True)
        for name, build in PLAIN.items()
        if takes(name, "collect")
    },
    **{
        f"{name} {preset}": functools.partial(OPTIMIZERS[name], **arguments)
        for name, presets in PRESETS.items()
        for preset, arguments in presets.items()
    },
}

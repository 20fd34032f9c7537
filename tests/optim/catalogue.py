"""A catalogue of every transform of the library by name, for tests that run all of them."""

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


def _lamb_of_links(learning_rate, rules="all", axis_name=None, collect=False):
    return optim.in_float32(
        optax.chain(
            optim.scale_by_lamb(rules=rules, axis_name=axis_name),
            optim.add_decayed_weights(0.01, rules),
            optim.scale_by_trust_ratio(rules, axis_name=axis_name, collect=collect),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def _lars_of_links(learning_rate, rules="all", axis_name=None, collect=False):
    return optim.in_float32(
        optax.chain(
            optim.add_decayed_weights(1e-4, rules),
            optim.scale_by_trust_ratio(
                rules, coefficient=0.001, axis_name=axis_name, collect=collect
            ),
            optim.scale_by_lars(0.9),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def _ratio_on_adam(learning_rate, rules="all", axis_name=None, collect=False):
    return optim.in_float32(
        optax.chain(
            optax.scale_by_adam(),
            optim.scale_by_trust_ratio(rules, axis_name=axis_name, collect=collect),
            optax.scale_by_learning_rate(learning_rate),
            optim.scale_by_rate_factors(rules),
        )
    )


def _clipped_lamb(learning_rate, rules="all", axis_name=None):
    return optax.chain(
        clipping.clip_global_norm(1.0, axis_name),
        optim.lamb(learning_rate, rules=rules, axis_name=axis_name),
    )


def _rounded_lamb(learning_rate, rules="all", axis_name=None):
    return rounding.stochastic_rounding(
        optim.lamb(learning_rate, rules=rules, axis_name=axis_name), seed=1, axis_name=axis_name
    )


def _lamb_under_agvm(learning_rate, rules="all", axis_name=None):
    return optim.agvm(
        optim.lamb(learning_rate, rules=rules, axis_name=axis_name), [""], axis_name=axis_name
    )


# Each algorithm once, and one example of each wrapper.
PLAIN: dict[str, Build] = {
    **OPTIMIZERS,
    "scale_by_trust_ratio": _trust_ratio_chain,
    "scale_by_lamb, scale_by_trust_ratio": _lamb_of_links,
    "scale_by_trust_ratio, scale_by_lars": _lars_of_links,
    "scale_by_adam, scale_by_trust_ratio": _ratio_on_adam,
    "clip_global_norm, lamb": _clipped_lamb,
    "stochastic_rounding(lamb)": _rounded_lamb,
    "agvm(lamb)": _lamb_under_agvm,
}


def takes(name: str, argument: str) -> bool:
    return argument in inspect.signature(PLAIN[name]).parameters


# Inside shard_map Muon and Adafactor need full leaves, and APOLLO needs the spec of a split leaf.
WHOLE = ("apollo", "muon", "adafactor")
# These optimizers sum over devices themselves, need full leaves, and must be the outermost transform.
REDUCING = ("onebit_adam", "onebit_lamb", "zero_one_adam")
# Transforms that support split leaves inside shard_map.
SPLITTING = [name for name in PLAIN if takes(name, "axis_name") and name not in WHOLE]

# The same transforms, also with `collect` and with every preset.
TRANSFORMS: dict[str, Build] = {
    **PLAIN,
    **{
        f"{name} collecting": functools.partial(build, collect=True)
        for name, build in PLAIN.items()
        if takes(name, "collect")
    },
    **{
        f"{name} {preset}": functools.partial(
            OPTIMIZERS[name],
            **{
                # `discard_first` makes the first update 0, so tests could not compare anything.
                key: value
                for key, value in arguments.items()
                if key != "discard_first"
            },
        )
        for name, presets in PRESETS.items()
        for preset, arguments in presets.items()
    },
}

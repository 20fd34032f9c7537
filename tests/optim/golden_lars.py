"""Maps recorded implementations of LARS to arguments of `optim.lars`."""

import re
from collections.abc import Iterable
from typing import Any

import jax
import optax

from lamb_tpu import optim
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.presets import preset
from tests.optim.golden_common import (
    Settings,
    grouped,
    leaf_rules,
    mask,
    paths,
    patterns_without_decay,
    rate,
    unless,
)

NAMES = {
    "momentum": ("momentum", "beta"),
    "weight_decay": ("weight_decay",),
    "coefficient": ("trust_coefficient", "trust_coeff", "eta", "eeta"),
    "nesterov": ("nesterov", "use_nesterov"),
    "eps": ("eps", "epsilon"),
    "dampening": ("dampening",),
    "trust_clip": ("clip", "trust_clip"),
}
MOST = ("momentum", "weight_decay", "coefficient", "nesterov", "eps")


def transform(implementation: str, settings: Settings, params: Any) -> optax.GradientTransformation:
    """Returns the optimizer of an entry of the family 'lars'."""
    return IMPLEMENTATIONS[implementation](settings, params)


def _lars(
    settings: Settings, known: Iterable[str], preset_name: str, rules: Rules, **defaults: Any
) -> optax.GradientTransformation:
    """Returns `optim.lars` with a preset, overridden by `defaults` and by the `known` settings."""
    arguments = preset("lars", preset_name) | defaults | settings.renamed(NAMES, known)
    return optim.lars(learning_rate(settings), rules=rules, **arguments)


def learning_rate(settings: Settings) -> optax.ScalarOrSchedule:
    """Returns the learning rate, which may be a multiple of the polynomial schedule of MLPerf's train.py."""
    match = re.fullmatch(
        r"train\.py polynomial_learning_rate_fn\((\d+), (\d+) steps?/epoch, (\d+) epochs\)"
        r" \* ([\d.]+)",
        settings.get("lr_schedule", ""),
    )
    if match is None:
        return rate(settings)
    settings.take("lr_schedule")
    settings.take("lr")  # the multiple already contains the peak
    batch_size, steps_per_epoch, epochs = (int(number) for number in match.groups()[:3])
    base, warmup_epochs = next(
        (peak, warmup)
        for limit, peak, warmup in (
            (16384, 10.0, 5),
            (32768, 25.0, 5),
            (65536, 29.0, 18),
            (float("inf"), 23.080977304670448, 33),
        )
        if batch_size < limit
    )
    schedule = optim.warmup(
        base,
        total_steps=epochs * steps_per_epoch + 1,
        warmup_steps=warmup_epochs * steps_per_epoch,
        power=2.0,
        end_value=1e-4,
    )
    factor = float(match.group(4))
    return lambda count: factor * schedule(count)


def _tpu_efficientnet(settings, params):
    included = unless([re.escape(name) for name in settings.take("skip_list") or ()])
    return _lars(settings, MOST, "you2017", leaf_rules(params, decay=included, adapt=included))


def _mlperf_resnet_tf2(settings, params):
    # `epsilon or backend_config.epsilon()`, which is 1e-7 in Keras.
    eps = settings.take("eps")
    settings["eps"] = settings.take("epsilon", eps) or 1e-7
    return _tpu_efficientnet(settings, params)


def _flax_optim(settings, params):
    del params
    return _lars(settings, MOST, "you2017", "all", weight_decay=0.0)


def _mlperf_resnet_jax(settings, params):
    plain = optax.sgd(learning_rate(Settings(settings)), settings.get("momentum", 0.9))
    weights = _lars(settings, ("momentum", "weight_decay", "coefficient"), "you2017", "all")
    labels = ["plain" if "bias" in p or "scale" in p else "weights" for p in paths(params)]
    return optax.partition(
        {"weights": weights, "plain": plain}, jax.tree.structure(params).unflatten(labels)
    )


def _optax(settings, params):
    decay, adapt = (
        mask(settings.take(name, True)) for name in ("weight_decay_mask", "trust_ratio_mask")
    )
    return _lars(settings, MOST, "optax", leaf_rules(params, decay=decay, adapt=adapt))


def _simclr(settings, params):
    undecayed = settings.take("exclude_from_weight_decay")
    unadapted = settings.take("exclude_from_layer_adaptation") or undecayed
    rules = leaf_rules(params, decay=unless(undecayed), adapt=unless(unadapted))
    name = "optax" if settings.take("classic_momentum", True) else "simclr_popular"
    return _lars(settings, MOST[:-1], name, rules)


def _tf_contrib(settings, params):
    included = unless([re.escape(name) for name in settings.take("skip_list") or ()])
    l2 = settings.take("l2_in_loss", "none")
    weight_decay = settings.get("weight_decay", 1e-4)
    tx = _lars(settings, MOST, "unscaled", leaf_rules(params, decay=included, adapt=included))
    if l2 == "none":
        return tx
    if not l2.startswith("g + wd p fed by the caller"):
        raise ValueError(f"l2_in_loss={l2!r} must be 'none' or 'g + wd p fed by the caller'")
    mask = jax.tree.structure(params).unflatten([included(path) for path in paths(params)])
    return optax.chain(optax.add_decayed_weights(weight_decay, mask), tx)


def _timm(settings, params):
    settings.same_numbers("foreach")
    return _lars_of_torch(settings, "timm", grouped(settings, params, 0.0, tied=True))


def _apex_larc(settings, params):
    decay = unless(patterns_without_decay(settings))
    return _lars_of_torch(settings, "larc", leaf_rules(params, decay=decay))


def _lars_of_torch(settings, name, rules):
    if not settings.get("momentum"):
        settings.take(
            "dampening"
        )  # without momentum there is no buffer, so dampening has no effect
    return _lars(settings, NAMES, name, rules, momentum=0.0, weight_decay=0.0)


def _barlow_twins(settings, params):
    def filtered(name):
        excluded = settings.take(name, False)
        return lambda path: not excluded or paths(params)[path].ndim != 1

    rules = leaf_rules(
        params, decay=filtered("weight_decay_filter"), adapt=filtered("lars_adaptation_filter")
    )
    return _lars(settings, MOST[:-1], "barlow_twins", rules, weight_decay=0.0)


IMPLEMENTATIONS = {
    "apex_larc": _apex_larc,
    "barlowtwins_lars": _barlow_twins,
    "flax_optim_lars": _flax_optim,
    "mlperf_resnet_jax_lars": _mlperf_resnet_jax,
    "mlperf_resnet_tf2_lars": _mlperf_resnet_tf2,
    "optax_lars": _optax,
    "simclr_lars": _simclr,
    "tf_contrib_lars": _tf_contrib,
    "timm_lars": _timm,
    "tpu_efficientnet_lars": _tpu_efficientnet,
}

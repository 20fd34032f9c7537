"""Maps recorded implementations of RMSProp to arguments of `optim.rmsprop_tf`."""

from collections.abc import Iterable
from typing import Any

import optax

from lamb_tpu import optim
from lamb_tpu.optim.parameters import Rules
from tests.optim.golden_common import (
    Settings,
    group_without_decay,
    leaf_rules,
    rate,
    timm_decay,
    unless,
)

NAMES = {
    "b2": ("decay", "rho", "alpha"),
    "eps": ("eps", "epsilon"),
    "momentum": ("momentum",),
    "centered": ("centered",),
    "initial_scale": ("initial_scale",),
    "eps_in_root": ("eps_in_sqrt",),
    "bias_correction": ("bias_correction",),
    "nesterov": ("nesterov",),
    "lr_in_momentum": ("lr_in_momentum",),
    "cautious": ("caution",),
}
MOST = ("b2", "eps", "momentum", "centered")


def transform(implementation: str, settings: Settings, params: Any) -> optax.GradientTransformation:
    """Returns the optimizer of an entry of the family 'rmsprop_tf'."""
    return IMPLEMENTATIONS[implementation](settings, params)


def _rmsprop(
    settings: Settings, known: Iterable[str], rules: Rules = "all", **arguments: Any
) -> optax.GradientTransformation:
    """Returns `optim.rmsprop_tf` with `arguments`, overridden by the `known` settings."""
    arguments |= settings.renamed(NAMES, known)
    return optim.rmsprop_tf(rate(settings), rules=rules, **arguments)


def _timm(settings, params):
    del params
    settings.same_numbers("foreach")
    if not settings.get("momentum"):
        # timm ignores caution without momentum; our code would divide by the fraction of nonzero gradients.
        settings.take("caution")
    decay = timm_decay(settings)
    known = (*MOST, "lr_in_momentum", "cautious")
    return _rmsprop(
        settings, known, group_without_decay(settings), momentum=0.0, eps=1e-10, **decay
    )


def _tf1(settings, params):
    settings.same_numbers("use_locking")  # locks variables between threads
    weight_decay = 0.0
    if settings.take("l2_in_loss", False):
        weight_decay = settings.take("weight_decay", 1e-5)
    # The L2 term in EfficientNet's main.py covers all variables without this text in their names.
    rules = leaf_rules(params, decay=unless(["batch_normalization"]))
    return _rmsprop(settings, MOST, rules, momentum=0.0, eps=1e-10, weight_decay=weight_decay)


def _keras_legacy(settings, params):
    del params
    # The fused kernels, which are used with momentum, have eps inside the root.
    eps_in_root = settings.get("momentum", 0.0) > 0
    return _rmsprop(
        settings,
        MOST,
        momentum=0.0,
        eps=1e-7,
        initial_scale=0.0,
        eps_in_root=eps_in_root,
        clip_global_norm=settings.take("global_clipnorm"),
    )


def _optax(settings, params):
    del params
    if settings.get("momentum") is None:
        settings["momentum"] = 0.0
        settings.take("nesterov")  # has no effect without momentum
    known = (*MOST, "initial_scale", "eps_in_root", "bias_correction", "nesterov")
    return _rmsprop(settings, known, eps=1e-8, initial_scale=0.0)


IMPLEMENTATIONS = {
    "keras_legacy_rmsprop": _keras_legacy,
    "optax_rmsprop": _optax,
    "tf1_rmsprop": _tf1,
    "timm_rmsproptf": _timm,
}

"""Maps recorded implementations of NovoGrad to arguments of `optim.novograd`."""

from typing import Any

import optax

from lamb_tpu import optim
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.presets import preset
from tests.optim.golden_common import Settings, group_without_decay, rate, timm_decay

NAMES = {
    "b1": ("b1", "beta1", "beta_1"),
    "b2": ("b2", "beta2", "beta_2"),
    "eps": ("eps", "epsilon"),
    "eps_root": ("eps_root",),
    "weight_decay": ("weight_decay",),
    "amsgrad": ("amsgrad",),
    "bias_correction": ("bias_correction",),
    "init_zero": ("init_zero",),
}
MOST = ("b1", "b2", "eps", "weight_decay")


def transform(implementation: str, settings: Settings, params: Any) -> optax.GradientTransformation:
    """Returns the optimizer of an entry of the family 'novograd'."""
    del params
    return IMPLEMENTATIONS[implementation](settings)


def _novograd(
    settings: Settings,
    known: tuple[str, ...],
    preset_name: str,
    rules: Rules = "all",
    **arguments: Any,
) -> optax.GradientTransformation:
    """Returns `optim.novograd` with a preset, overridden by the `known` settings and by `arguments`."""
    taken = settings.renamed(NAMES, known)
    return optim.novograd(
        rate(settings), rules=rules, **preset("novograd", preset_name) | taken | arguments
    )


def _timm(settings):
    return _torch(settings, "paper", **timm_decay(settings))


def _jasper(settings):
    return _torch(settings, "jasper")


def _torch(settings, preset_name, **arguments):
    averaging = "all" if settings.take("grad_averaging", False) else "none"
    known = (*MOST, "amsgrad")
    excluded = group_without_decay(settings)
    return _novograd(
        settings,
        known,
        preset_name,
        excluded,
        grad_averaging=averaging,
        nu_dtype="float32",  # whatever the dtype of the parameters
        **arguments,
    )


def _optax(settings):
    return _novograd(settings, (*MOST, "eps_root"), "optax")


def _tfa(settings):
    averaging = "after_first" if settings.take("grad_averaging", False) else "none"
    known = (*MOST, "amsgrad")
    return _novograd(
        settings,
        known,
        "tfa",
        grad_averaging=averaging,
        clip_global_norm=settings.take("global_clipnorm"),
    )


def _apex(settings):
    arguments = {"grad_averaging": "all" if settings.take("grad_averaging", True) else "none"}
    if settings.take("reg_inside_moment", False):
        arguments |= {"normalise": "gradient", "decay": "momentum"}
    arguments["norm"] = {0: "linf", 2: "l2"}[settings.take("norm_type", 2)]
    settings.assume("amsgrad", False, why="apex's FusedNovoGrad rejects it")
    settings.same_numbers("set_grad_none")  # frees a gradient after its use
    excluded = group_without_decay(settings)
    return _novograd(
        settings, (*MOST, "bias_correction", "init_zero"), "apex", excluded, **arguments
    )


def _openseq2seq(settings):
    # The implementation never stores its second moments, so only the newest gradient counts: b2 is
    # 0. The eps is inside the root.
    eps_root = settings.take("epsilon", 1e-8)
    averaging = "all" if settings.take("grad_averaging", False) else "none"
    if not isinstance(settings.take("beta2", 0.98), float):
        raise NotImplementedError("beta2 must be a number, although it has no effect")
    settings.same_numbers("use_locking")  # locks variables between threads
    return _novograd(
        settings,
        ("b1", "weight_decay"),
        "paper",
        b2=0.0,
        eps=0.0,
        eps_root=eps_root,
        grad_averaging=averaging,
    )


IMPLEMENTATIONS = {
    "apex_fusednovograd": _apex,
    "nvidia_jasper_novograd": _jasper,
    "nvidia_openseq2seq_novograd": _openseq2seq,
    "optax_novograd": _optax,
    "tfa_novograd": _tfa,
    "timm_nvnovograd": _timm,
}

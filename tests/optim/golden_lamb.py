"""Maps recorded implementations of LAMB to arguments of `optim.lamb`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu import optim
from lamb_tpu.optim import trust_ratio
from lamb_tpu.optim.parameters import ParameterMetadata, Rules
from lamb_tpu.optim.presets import preset
from tests.optim.golden_common import (
    Settings,
    grouped,
    leaf_rules,
    mask,
    paths,
    rate,
    timm_decay,
    unless,
)

NAMES = {
    "b1": ("beta1", "beta_1"),
    "b2": ("beta2", "beta_2"),
    "eps": ("eps", "epsilon"),
    "weight_decay": ("weight_decay", "weight_decay_rate", "wd"),
}


def transform(
    implementation: str, settings: Settings, params: Any
) -> optax.GradientTransformation | None:
    """Returns the optimizer of an entry of the family 'lamb'; None for a bug that is not reproduced."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is unknown; add it to IMPLEMENTATIONS")
    return IMPLEMENTATIONS[implementation](settings, params)


def _arguments(settings: Settings, preset_name: str, **defaults: Any) -> dict[str, Any]:
    """Returns a preset, overridden by `defaults` and by the settings that all implementations have."""
    return preset("lamb", preset_name) | defaults | settings.renamed(NAMES)


def _lamb(settings: Settings, arguments: dict[str, Any], rules: Rules):
    return optim.lamb(rate(settings), rules=rules, **arguments)


# TensorFlow and JAX: exclusions by name.


def _listed(settings: Settings, params: Any) -> Rules:
    """Returns rules from the two lists of exclusions.

    If the list for adaptation is empty or missing, the list for decay is used for both.
    """
    undecayed = settings.take("exclude_from_weight_decay")
    unadapted = settings.take("exclude_from_layer_adaptation") or undecayed
    return leaf_rules(params, decay=unless(undecayed), adapt=unless(unadapted))


def _tfa(settings, params):
    rules = _listed(settings, params)
    return _keras_clipping(settings, _arguments(settings, "tfa"), rules)


def _albert(settings, params):
    arguments = _arguments(settings, "author", weight_decay=0.0, clip_global_norm=None)
    return _lamb(settings, arguments, _listed(settings, params))


def _mlperf_tf(settings, params):
    clips = settings.take("clip_by_global_norm_after_gradient_allreduce", False)
    arguments = _arguments(
        settings, "paper", weight_decay=0.0, clip_global_norm=1.0 if clips else None
    )
    return _lamb(settings, arguments, _listed(settings, params))


def _nvidia_tf_bert(settings, params):
    first = settings.take("first_global_step", 1)
    if first == 0:
        return None
    if first != 1:
        raise ValueError(f"first_global_step={first!r} must be 0 or 1")
    arguments = _arguments(
        settings, "paper", weight_decay=0.0, clip_global_norm=settings.take("global_clipnorm")
    )
    rules = leaf_rules(params, decay=unless(settings.take("exclude_from_weight_decay")))
    return _lamb(settings, arguments, rules)


def _nvidia_tf_txl(settings, params):
    arguments = _arguments(settings, "transformer_xl", weight_decay=0.01, ratio_eps=0.0)
    return _lamb(settings, arguments, "all")


def _keras(settings, params):
    arguments = _arguments(settings, "keras")
    if arguments["weight_decay"] is None:
        arguments["weight_decay"] = 0.0
    rules = leaf_rules(params, decay=unless(settings.take("exclude_from_weight_decay")))
    return _keras_clipping(settings, arguments, rules)


def _keras_clipping(settings: Settings, arguments: dict[str, Any], rules: Rules):
    """Returns LAMB preceded by a clipping option; every Keras optimizer has three such options."""
    arguments["clip_global_norm"] = settings.take("global_clipnorm")
    each, value = settings.take("clipnorm"), settings.take("clipvalue")
    tx = _lamb(settings, arguments, rules)
    if value is not None:
        tx = optax.chain(optax.clip(value), tx)
    if each is not None:

        def clip(grad, _):
            return grad * each / jnp.maximum(jnp.linalg.norm(grad.ravel()), each)

        tx = optax.chain(optax.stateless_with_tree_map(clip), tx)
    return tx


def _optax(settings, params):
    arguments = _arguments(
        settings,
        "paper",
        weight_decay=0.0,
        eps_root=settings.take("eps_root", 0.0),
        clip_global_norm=settings.take("global_clipnorm"),
    )
    rules = leaf_rules(params, decay=mask(settings.take("decay_mask")))
    return _lamb(settings, arguments, rules)


def _flax_optim(settings, params):
    # The ratio is 1 only if both norms are 0; otherwise weights of 0 have the ratio 0 and never move.
    # A direction of 0, as without gradient and decay, is multiplied by infinity.
    arguments = _arguments(settings, "paper", weight_decay=0.0, zero_ratio=0.0)
    if arguments["weight_decay"] == 0:
        return None
    return _lamb(settings, arguments, "all")


def _mlperf_jax(settings, params):
    num_layers = settings.take("num_layers", 24)
    stacks = {
        path
        for path, leaf in paths(params).items()
        if leaf.ndim > 1 and leaf.shape[0] == num_layers
    }
    rules = leaf_rules(params, layer_axes=lambda path: (0,) if path in stacks else ())
    return _lamb(settings, _arguments(settings, "mlperf"), rules)


# PyTorch: exclusions by parameter groups.


def _timm(settings, params):
    settings.same_numbers("foreach")
    settings.setdefault("weight_decay", 0.01)
    rules = grouped(settings, params, 0.01, tied=True)
    arguments = _arguments(
        settings,
        "timm",
        **timm_decay(settings),
        bias_correction=_moments(settings),
        grad_averaging=settings.take("grad_averaging", True),
        cautious=settings.take("caution", False),
        clip_global_norm=settings.take("max_grad_norm", 1.0),
        ratio_bounds=(0.0, 1.0) if settings.take("trust_clip", False) else (0.0, float("inf")),
    )
    return _lamb(settings, arguments, rules)


def _apex(settings, params):
    settings.same_numbers("set_grad_none")
    settings.assume("amsgrad", False, why="apex's FusedLAMB rejects it")
    adapts = settings.take("use_nvlamb", False)
    settings["always_adapt"] = adapts
    rules = grouped(settings, params, 0.01, tied=True)
    norm = settings.take("max_grad_norm", 1.0)
    if isinstance(norm, str) and norm.startswith("off"):
        norm = None
    arguments = _arguments(
        settings,
        "apex",
        bias_correction=_moments(settings),
        decay="direction" if settings.take("adam_w_mode", True) else "gradient",
        grad_averaging=settings.take("grad_averaging", True),
        clip_global_norm=norm,
    )
    return _lamb(settings, arguments, rules)


def _moments(settings: Settings) -> str:
    return "moments" if settings.take("bias_correction", True) else "none"


def _deepspeed(settings, params):
    # The loss scale: the recorded gradients contain it, and the optimizer divides by it.
    if not settings.take("scale", 1.0) > 0:
        raise NotImplementedError("scale, the loss scale, must be above 0")
    norms = settings.take("grad_norms")
    if norms == "scalar":
        return None
    max_norm = settings.take("max_grad_norm", 0.0)
    if norms not in (None, "list") or (max_norm and norms is None):
        raise ValueError(f"grad_norms={norms!r} must be 'list' with max_grad_norm={max_norm!r}")
    settings.assume("amsgrad", False, why="DeepSpeed's FusedLamb rejects it")
    rules = grouped(settings, params, 0.0)
    arguments = _arguments(
        settings,
        "deepspeed",
        bias_correction="step" if settings.take("bias_correction", True) else "none",
        ratio_bounds=(settings.take("min_coeff", 0.01), settings.take("max_coeff", 10.0)),
        # `grad_norms` is a list that repeats the norm of all gradients for each parameter.
        clip_global_norm=max_norm or None,
    )
    if settings.take("eps_inside_sqrt", False):
        arguments["eps_root"], arguments["eps"] = arguments["eps"], 0.0
    return _lamb(settings, arguments, rules)


def _cybertronai(settings, params):
    rules = grouped(settings, params, 0.0, adapt=not settings.take("adam", False))
    return _lamb(settings, _arguments(settings, "transformer_xl", ratio_eps=0.0), rules)


def _torch_optimizer(settings, params):
    largest = settings.take("clamp_value", 10)
    # If the largest norm is 0, every norm is clipped to 0, so the ratio is 1.
    adapt = not settings.take("adam", False) and largest > 0
    rules = grouped(settings, params, 0.0, adapt=adapt)
    arguments = _arguments(
        settings,
        "transformer_xl",
        ratio_eps=0.0,
        phi_bounds=(0.0, largest),
        bias_correction="step" if settings.take("debias", False) else "none",
    )
    return _lamb(settings, arguments, rules)


def _nvidia_torch(settings, params):
    rules = grouped(settings, params, 0.0, adapt=not settings.take("adam", False))
    arguments = _arguments(settings, "transformer_xl")
    arguments["ratio_eps"] = arguments["eps"]
    return _lamb(settings, arguments, rules)


def _nvidia_jit(settings, params):
    """Computes and multiplies learning rate and ratio in float32, whatever the parameters' dtype."""
    settings.assume("adam", False, why="JITLamb has this argument, but its kernel does not read it")
    rules = grouped(settings, params, 0.0, adapt=False)
    arguments = _arguments(settings, "transformer_xl")
    schedule = rate(settings)
    direction = optim.lamb(1.0, rules=rules, **arguments)

    def update(grads, state, params):
        step = schedule(state.count) if callable(schedule) else schedule

        def scaled(update, param):
            norms = [trust_ratio.leaf_norm(leaf, ParameterMetadata()) for leaf in (param, update)]
            ratio = trust_ratio.LayerRatio(eps=arguments["eps"], phi_bounds=(0.0, 10.0)).of_norms(
                *norms
            )
            return update * (jnp.float32(step) * ratio.astype(jnp.float32))

        updates, state = direction.update(grads, state, params)
        return jax.tree.map(scaled, updates, params), state

    return optax.GradientTransformation(direction.init, update)


def _algoperf(settings, params):
    rules = grouped(settings, params, 0.0)
    return _lamb(settings, _arguments(settings, "paper", weight_decay=0.0, eps=1e-8), rules)


IMPLEMENTATIONS = {
    "algoperf_torch_lamb": _algoperf,
    "apex_fusedlamb": _apex,
    "cybertronai_lamb": _cybertronai,
    "deepspeed_fusedlamb": _deepspeed,
    "flax_optim_lamb": _flax_optim,
    "google_albert_lamb": _albert,
    "keras3_lamb": _keras,
    "mlperf_bert_jax_lamb": _mlperf_jax,
    "mlperf_bert_tf_lamb": _mlperf_tf,
    "nvidia_dle_bart_lamb": _nvidia_torch,
    "nvidia_dle_tf_bert_lamb": _nvidia_tf_bert,
    "nvidia_dle_tf_txl_lamb": _nvidia_tf_txl,
    "nvidia_dle_txl_jitlamb": _nvidia_jit,
    "nvidia_dle_txl_lamb": _nvidia_torch,
    "optax_lamb": _optax,
    "tfa_lamb": _tfa,
    "timm_lamb": _timm,
    "torch_optimizer_lamb": _torch_optimizer,
}

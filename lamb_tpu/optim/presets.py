"""Presets: arguments that make an optimizer reproduce a published implementation."""

from typing import Any

_DEEPSPEED_ONEBIT: dict[str, Any] = {
    "relative_floor": 0.0,
    "mask_unseen": False,
    "discard_first": True,
}


def _lamb(bias_correction: str, **more: Any) -> dict[str, Any]:
    return {"bias_correction": bias_correction, "weight_decay": 0.0, **more}


def _lars(denominator: str, accumulate: str, **more: Any) -> dict[str, Any]:
    given = {"denominator": denominator, "accumulate": accumulate}
    return given | {"coefficient": 0.001, "momentum": 0.9} | more


_LAMB = {"bias_correction": "moments", "weight_decay": 0.01, "eps": 1e-6}
# A preset has the arguments that reproduce an implementation's algorithm and default values. It has
# no rules, because the leaves that decay and adapt depend on the model.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # The README of the authors' package apollo-torch 1.0.3.
    "apollo": {
        "apollo": {"rank": 256, "scaling": "channel", "scale": 1.0, "update_gap": 200},
        "apollo_mini": {"rank": 1, "scaling": "tensor", "scale": 128.0, "update_gap": 200},
    },
    "lamb": {
        # Algorithm 2 of arXiv:1904.00962 in the ICLR version. optax.lamb, AlgoPerf's Lamb and the
        # LAMB of MLPerf's BERT in TensorFlow are the same algorithm with other defaults.
        "paper": _LAMB,
        # The authors' experiments: no bias correction, as in Google's ALBERT, and clipped
        # gradients. The parameters of norms, and in some experiments biases, neither decay nor
        # adapt.
        "author": _LAMB | {"bias_correction": "none", "clip_global_norm": 1.0},
        # tensorflow_addons.optimizers.LAMB. If its list of exclusions from adaptation is empty, it
        # uses the list of exclusions from decay instead.
        "tfa": _LAMB | {"weight_decay": 0.0},
        # apex.optimizers.FusedLAMB with use_nvlamb=True: every tensor adapts.
        "nvlamb": _LAMB | {"clip_global_norm": 1.0},
        # apex.optimizers.FusedLAMB without use_nvlamb: use rules by which a leaf adapts if and only
        # if it decays.
        "apex": _LAMB | {"clip_global_norm": 1.0},
        # deepspeed.ops.lamb.FusedLamb before its kernel corrected the moments.
        "deepspeed": _lamb("step", eps=1e-8, ratio_bounds=(0.01, 10.0)),
        # timm.optim.Lamb. Without always_adapt, a leaf adapts if and only if it decays.
        "timm": _LAMB | {"clip_global_norm": 1.0},
        # Lamb of NVIDIA's Transformer-XL and BART in PyTorch, where ratio_eps equals eps. There is
        # no ratio_eps in cybertronai/pytorch-lamb, from which this code comes, or in NVIDIA's
        # Transformer-XL in TensorFlow.
        "transformer_xl": _lamb("none", eps=1e-6, ratio_eps=1e-6, phi_bounds=(0.0, 10.0)),
        # keras.optimizers.Lamb of Keras 3.
        "keras": _lamb("moments", eps=1e-7, decay="decoupled"),
        # BertLAMB of Google's MLPerf v0.7 BERT in JAX: one ratio per layer of a stack, so use rules
        # with layer_axes=(0,) for the leaves of the stacks.
        "mlperf": _LAMB | {"weight_decay": 0.0},
        # The appendix of arXiv:1904.00962: Nesterov momentum in the first moment, or in both.
        "n_lamb": _LAMB | {"nesterov": "first"},
        "nn_lamb": _LAMB | {"nesterov": "both"},
    },
    "lars": {
        # The paper's form, as in tensorflow/tpu's EfficientNet, MLPerf's ResNet in TF2 and
        # flax.optim.
        "you2017": _lars("gradient", "steps", weight_decay=1e-4),
        # optax.lars, and SimCLR's lars_optimizer.py with classic momentum.
        "optax": _lars("decayed", "steps", weight_decay=0.0),
        # SimCLR's lars_optimizer.py with classic_momentum=False.
        "simclr_popular": _lars("momentum", "gradients", weight_decay=0.0),
        # tf.contrib.opt.LARSOptimizer of TensorFlow 1.15, which expects the L2 term in the loss;
        # tensorflow/tpu's ResNet and the MLPerf v0.6 and v0.7 submissions in TF import it.
        "unscaled": _lars("gradient", "gradients", l2_in_loss=True, weight_decay=1e-4),
        # Algorithm 1 of the LAMB paper, arXiv:1904.00962, with b1 = 0.9. If you override momentum,
        # set dampening to the same value.
        "lamb_paper": _lars(
            "momentum", "gradients", coefficient=1.0, dampening=0.9, weight_decay=0.01
        ),
        # apex.parallel.LARC; momentum and weight decay come from the wrapped SGD.
        "larc": {
            "denominator": "gradient",
            "accumulate": "adapted",
            "trust_clip": True,
            "skip_zero": True,
            "coefficient": 0.02,
            "eps": 1e-8,
            "dampen_first": False,
        },
        # timm.optim.Lars, with the momentum from timm's create_optimizer.
        "timm": _lars("gradient", "adapted", eps=1e-8, weight_decay=0.0, dampen_first=False),
        # Class LARS in main.py of facebookresearch/barlowtwins, with the weight decay of its
        # command.
        "barlow_twins": _lars("decayed", "adapted", weight_decay=1e-6),
    },
    # DeepSpeed's OnebitAdam, OnebitLamb and ZeroOneAdam. If momentum has one bit per value, elements
    # with small second moments make large steps. DeepSpeed only limits these steps by eps and by
    # exp_avg_mask (here masked_rows).
    "onebit_adam": {"deepspeed": _DEEPSPEED_ONEBIT},
    "onebit_lamb": {"deepspeed": _DEEPSPEED_ONEBIT},
    # DeepSpeed's local_step_clipper is 16, so between two exchanges its devices have different
    # parameters. This preset does not set local_step_clipper.
    "zero_one_adam": {"deepspeed": _DEEPSPEED_ONEBIT},
    "novograd": {
        # The paper, with the numbers of its code in OpenSeq2Seq, and timm's NvNovoGrad.
        "paper": {"b1": 0.95, "b2": 0.98, "eps": 1e-8, "weight_decay": 0.0},
        # Novograd in NVIDIA's Jasper for PyTorch, which by default does not average the norms.
        "jasper": {"b1": 0.95, "b2": 0.0, "eps": 1e-8, "weight_decay": 0.0},
        # optax.novograd.
        "optax": {"b1": 0.9, "b2": 0.25, "eps": 1e-6, "weight_decay": 0.0},
        # NovoGrad of TensorFlow Addons; for its grad_averaging=True use 'after_first'.
        "tfa": {"lr_in_momentum": True, "b1": 0.9, "b2": 0.999, "eps": 1e-7, "weight_decay": 0.0},
        # apex.optimizers.FusedNovoGrad; for its reg_inside_moment=True use normalise='gradient' and
        # decay='momentum'.
        "apex": {
            "normalise": "momentum",
            "decay": "decoupled",
            "grad_averaging": "all",
            "bias_correction": True,
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.0,
        },
    },
}


def preset(optimizer: str, name: str) -> dict[str, Any]:
    """Returns a copy of a preset's arguments.

    >>> preset('lars', 'optax') | {'weight_decay': 1e-4}
    {'denominator': 'decayed', 'accumulate': 'steps', 'coefficient': 0.001, 'momentum': 0.9, \
'weight_decay': 0.0001}

    Raises:
      ValueError: the optimizer has no presets, or no preset with this name.
    """
    if not isinstance(optimizer, str) or optimizer not in PRESETS:
        raise ValueError(
            f"optimizer={optimizer!r} has no presets, unlike {', '.join(PRESETS)}; use preset='' "
            f"instead of preset={name!r}"
        )
    if not isinstance(name, str) or name not in PRESETS[optimizer]:
        known = ", ".join(PRESETS[optimizer])
        raise ValueError(f"preset name={name!r} is unknown; for {optimizer} use one of {known}")
    return dict(PRESETS[optimizer][name])

"""Presets: the arguments with which an optimizer repeats a published implementation of it."""

from typing import Any

_DEEPSPEED_ONEBIT: dict[str, Any] = {
    "relative_floor": 0.0,
    "mask_unseen": False,
    "discard_first": True,
}

# They hold what an implementation computes, with its own defaults; which leaves decay and adapt is
# the model's business, and stands in rules.
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # The README of the authors' package apollo-torch 1.0.3.
    "apollo": {
        "apollo": {"rank": 256, "scaling": "channel", "scale": 1.0, "update_gap": 200},
        "apollo_mini": {"rank": 1, "scaling": "tensor", "scale": 128.0, "update_gap": 200},
    },
    "lamb": {
        # Algorithm 2 of arXiv:1904.00962 in the ICLR version. optax.lamb, AlgoPerf's Lamb and that
        # of MLPerf's BERT in TensorFlow compute the same, with other defaults.
        "paper": {"bias_correction": "moments", "weight_decay": 0.01, "eps": 1e-6},
        # What the authors' experiments ran: no bias correction, as in Google's ALBERT, and clipped
        # gradients. They exclude normalisation, and in part biases, from decay and adaptation.
        "author": {
            "bias_correction": "none",
            "weight_decay": 0.01,
            "eps": 1e-6,
            "clip_global_norm": 1.0,
        },
        # tensorflow_addons.optimizers.LAMB. An empty list of exclusions from adaptation means the
        # list of exclusions from decay.
        "tfa": {"bias_correction": "moments", "weight_decay": 0.0, "eps": 1e-6},
        # apex.optimizers.FusedLAMB with use_nvlamb=True: every tensor adapts.
        "nvlamb": {
            "bias_correction": "moments",
            "weight_decay": 0.01,
            "eps": 1e-6,
            "clip_global_norm": 1.0,
        },
        # The same without it: give rules by which exactly the leaves that decay adapt.
        "apex": {
            "bias_correction": "moments",
            "weight_decay": 0.01,
            "eps": 1e-6,
            "clip_global_norm": 1.0,
        },
        # deepspeed.ops.lamb.FusedLamb, as it was before its kernel corrected the moments.
        "deepspeed": {
            "bias_correction": "step",
            "weight_decay": 0.0,
            "eps": 1e-8,
            "ratio_bounds": (0.01, 10.0),
        },
        # timm.optim.Lamb. Without always_adapt exactly the leaves that decay adapt.
        "timm": {
            "bias_correction": "moments",
            "weight_decay": 0.01,
            "eps": 1e-6,
            "clip_global_norm": 1.0,
        },
        # Lamb of NVIDIA's Transformer-XL and BART in PyTorch, after cybertronai/pytorch-lamb. That
        # one and NVIDIA's Transformer-XL in TensorFlow have no ratio_eps. Here it is eps again.
        "transformer_xl": {
            "bias_correction": "none",
            "weight_decay": 0.0,
            "eps": 1e-6,
            "ratio_eps": 1e-6,
            "phi_bounds": (0.0, 10.0),
        },
        # keras.optimizers.Lamb of Keras 3.
        "keras": {
            "bias_correction": "moments",
            "weight_decay": 0.0,
            "eps": 1e-7,
            "decay": "decoupled",
        },
        # BertLAMB of Google's MLPerf v0.7 BERT in JAX: one ratio for each layer of a stack, so the
        # rules have to give the stacks' leaves layer_axes=(0,).
        "mlperf": {"bias_correction": "moments", "weight_decay": 0.0, "eps": 1e-6},
        # The appendix of arXiv:1904.00962: Nesterov's momentum in the first moment, or in both.
        "n_lamb": {
            "bias_correction": "moments",
            "weight_decay": 0.01,
            "eps": 1e-6,
            "nesterov": "first",
        },
        "nn_lamb": {
            "bias_correction": "moments",
            "weight_decay": 0.01,
            "eps": 1e-6,
            "nesterov": "both",
        },
    },
    "lars": {
        # The paper, as in tensorflow/tpu's EfficientNet, MLPerf's ResNet in TF2 and flax.optim.
        "you2017": {
            "denominator": "gradient",
            "accumulate": "steps",
            "coefficient": 0.001,
            "momentum": 0.9,
            "weight_decay": 1e-4,
        },
        # optax.lars; SimCLR's lars_optimizer.py with classic momentum is the same.
        "optax": {
            "denominator": "decayed",
            "accumulate": "steps",
            "coefficient": 0.001,
            "momentum": 0.9,
            "weight_decay": 0.0,
        },
        # SimCLR's lars_optimizer.py with classic_momentum=False.
        "simclr_popular": {
            "denominator": "momentum",
            "accumulate": "gradients",
            "coefficient": 0.001,
            "momentum": 0.9,
            "weight_decay": 0.0,
        },
        # tf.contrib.opt.LARSOptimizer of TensorFlow 1.15, which expects the L2 term in the loss;
        # tensorflow/tpu's ResNet and the MLPerf v0.6 and v0.7 submissions in TF import it.
        "unscaled": {
            "denominator": "gradient",
            "accumulate": "gradients",
            "l2_in_loss": True,
            "coefficient": 0.001,
            "momentum": 0.9,
            "weight_decay": 1e-4,
        },
        # Algorithm 1 of the LAMB paper, arXiv:1904.00962, with b1 = 0.9; keep dampening = momentum.
        "lamb_paper": {
            "denominator": "momentum",
            "accumulate": "gradients",
            "coefficient": 1.0,
            "momentum": 0.9,
            "dampening": 0.9,
            "weight_decay": 0.01,
        },
        # apex.parallel.LARC; momentum and weight decay are those of the SGD that it wraps.
        "larc": {
            "denominator": "gradient",
            "accumulate": "adapted",
            "trust_clip": True,
            "skip_zero": True,
            "coefficient": 0.02,
            "eps": 1e-8,
            "dampen_first": False,
        },
        # timm.optim.Lars, with the momentum that timm's create_optimizer gives it.
        "timm": {
            "denominator": "gradient",
            "accumulate": "adapted",
            "coefficient": 0.001,
            "eps": 1e-8,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "dampen_first": False,
        },
        # Class LARS in main.py of facebookresearch/barlowtwins, weight decay from its command line.
        "barlow_twins": {
            "denominator": "decayed",
            "accumulate": "adapted",
            "coefficient": 0.001,
            "momentum": 0.9,
            "weight_decay": 1e-6,
        },
    },
    # DeepSpeed's OnebitAdam, OnebitLamb and ZeroOneAdam. Elements with small second moments move
    # far in one bit: there eps is what bounds them, and exp_avg_mask, here masked_rows.
    "onebit_adam": {"deepspeed": _DEEPSPEED_ONEBIT},
    "onebit_lamb": {"deepspeed": _DEEPSPEED_ONEBIT},
    # There local_step_clipper is 16, which leaves the parameters of devices apart in between.
    "zero_one_adam": {"deepspeed": _DEEPSPEED_ONEBIT},
    "novograd": {
        # The paper, with the numbers of its code in OpenSeq2Seq; NvNovoGrad of timm is the same.
        "paper": {"b1": 0.95, "b2": 0.98, "eps": 1e-8, "weight_decay": 0.0},
        # Novograd in NVIDIA's Jasper for PyTorch, whose defaults keep no average of the norm.
        "jasper": {"b1": 0.95, "b2": 0.0, "eps": 1e-8, "weight_decay": 0.0},
        # optax.novograd.
        "optax": {"b1": 0.9, "b2": 0.25, "eps": 1e-6, "weight_decay": 0.0},
        # NovoGrad of TensorFlow Addons; its grad_averaging=True is 'after_first'.
        "tfa": {"lr_in_momentum": True, "b1": 0.9, "b2": 0.999, "eps": 1e-7, "weight_decay": 0.0},
        # apex.optimizers.FusedNovoGrad; with its reg_inside_moment=True, normalise is 'gradient'
        # and decay 'momentum'.
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
    """Returns a copy of one preset's arguments, to be passed on, overridden or printed.

    >>> preset('lars', 'optax') | {'weight_decay': 1e-4}
    {'denominator': 'decayed', 'accumulate': 'steps', 'coefficient': 0.001, 'momentum': 0.9, \
'weight_decay': 0.0001}

    Raises:
      ValueError: an optimizer without presets, or a preset that it does not have.
    """
    if not isinstance(optimizer, str) or optimizer not in PRESETS:
        raise ValueError(
            f"optimizer {optimizer!r} has no presets; known: {', '.join(PRESETS)}; leave the "
            f"preset {name!r} out, as by preset=''"
        )
    if not isinstance(name, str) or name not in PRESETS[optimizer]:
        known = ", ".join(PRESETS[optimizer])
        raise ValueError(f"the preset name {name!r} is unknown; {optimizer} has: {known}")
    return dict(PRESETS[optimizer][name])

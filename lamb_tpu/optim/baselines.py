"""Optax's optimizers as baselines, with this package's rules and with float32 moments."""

from typing import Any

import jax
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.chains import (
    add_decayed_weights,
    in_float32,
    reject_leaves,
    scale_by_rate_factors,
    under_rules,
)
from lamb_tpu.optim.parameters import Rules
from lamb_tpu.optim.trust_ratio import AxisName


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Plain SGD; the weight decay is added to the gradient, as for an L2 term in the loss."""
    checks.checked(sgd, locals())
    return _with_l2(optax.sgd(learning_rate), weight_decay, rules)


def momentum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with momentum; the learning rate multiplies the momentum. The weight decay is as in `sgd`."""
    # Inside this function the name `momentum` is the argument. `checked` only reads a signature, and
    # `nesterov` has the same signature.
    checks.checked(nesterov, locals())
    return _with_l2(optax.sgd(learning_rate, momentum), weight_decay, rules)


def nesterov(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with Nesterov momentum; the weight decay is as in `sgd`."""
    checks.checked(nesterov, locals())
    return _with_l2(optax.sgd(learning_rate, momentum, nesterov=True), weight_decay, rules)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adam with L2 regularisation: the weight decay is added to the gradient, as in `sgd`."""
    checks.checked(adam, locals())
    return _with_l2(optax.adam(learning_rate, b1, b2, eps), weight_decay, rules)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.01,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """AdamW: Adam with decoupled weight decay, which is multiplied by the learning rate."""
    checks.checked(adamw, locals())
    direction = optax.scale_by_adam(b1, b2, eps)
    return _decoupled(direction, learning_rate, weight_decay, rules)


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adagrad; the weight decay is as in `sgd`."""
    checks.checked(adagrad, locals())
    inner = optax.adagrad(learning_rate, initial_accumulator_value, eps)
    return _with_l2(inner, weight_decay, rules)


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Lion: steps along the sign of an interpolated momentum; the weight decay is as in `adamw`.

    References:
      Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675.
    """
    checks.checked(lion, locals())
    return _decoupled(optax.scale_by_lion(b1, b2), learning_rate, weight_decay, rules)


def adafactor(
    learning_rate: optax.ScalarOrSchedule,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    eps: float = 1e-30,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Adafactor: stores the second moments of a matrix as one row and one column.

    As in Optax by default, the decay of second moments at update t is 1 - t ** -0.8, and matrices
    with a side shorter than 128 have full second moments. As in Optax, the weight decay is not
    multiplied by the learning rate. Means are over full tensors, so stacks of layers (`layer_axes`)
    and leaves that are split inside `shard_map` are rejected. Under `jit` any sharding works.

    Args:
      learning_rate: `lamb_tpu.optim` describes all arguments that are not listed here.
      multiply_by_parameter_scale: whether the learning rate is multiplied by the root mean square of
        the tensor.
      clipping_threshold: the largest root mean square of a tensor's update, before the learning rate;
        None for no clipping.
      momentum: the decay of the momentum of updates, in [0, 1); None for no momentum buffer.
      eps: added to squared gradients.

    Raises:
      ValueError: from `init`, if a leaf is a stack of layers; from `update`, if a leaf is split. For
        other errors, see `lamb_tpu.optim`.

    References:
      Shazeer and Stern, Adafactor, arXiv:1804.04235.
    """
    checks.checked(adafactor, locals())
    if clipping_threshold is not None:
        checks.check_range("clipping_threshold", clipping_threshold)
        if not isinstance(clipping_threshold, jax.core.Tracer) and clipping_threshold == 0:
            raise ValueError("clipping_threshold=0 must be above 0, or None for no clipping")
    # Add the decay here instead of in `optax.adafactor`: rate factors must scale the step but not
    # this decay, so they are applied between the step and the decay.
    stepped = optax.adafactor(
        learning_rate,
        multiply_by_parameter_scale=multiply_by_parameter_scale,
        clipping_threshold=clipping_threshold,
        momentum=momentum,
        eps=eps,
    )
    # Like Optax, add the decay to the positive step, before the sign is flipped for descent.
    inner = in_float32(
        optax.chain(
            stepped,
            scale_by_rate_factors(rules),
            optax.scale(-1.0),
            add_decayed_weights(weight_decay, rules),
            optax.scale(-1.0),
        )
    )

    def stacked(path: str, leaf: Any, metadata: parameters.ParameterMetadata) -> str | None:
        text = "adafactor cannot treat the layers of a stack separately; leave out the layer_axes"
        return f"{text} of the parameter {path!r}" if metadata.layer_axes else None

    def split(path: str, *_: Any) -> str | None:
        text = "adafactor needs full tensors, so axis_name must be None for the parameter"
        return f"{text} {path!r}" if trust_ratio.axes_of(axis_name, path) else None

    # Check in `init`, because the rules show which leaves are stacks only with the parameters.
    def init_fn(params: optax.Params) -> optax.OptState:
        reject_leaves(params, rules, stacked)
        return inner.init(params)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        reject_leaves(params, rules, split)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_l2(
    inner: optax.GradientTransformation, weight_decay: optax.ScalarOrSchedule, rules: Rules
) -> optax.GradientTransformation:
    # Add the decay first, so it enters the moments like the gradient of an L2 term.
    return under_rules(optax.chain(add_decayed_weights(weight_decay, rules), inner), rules)


def _decoupled(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    rules: Rules,
) -> optax.GradientTransformation:
    # Add the decay between direction and rate: it does not enter the moments, and the rate scales
    # it.
    steps = optax.scale_by_learning_rate(learning_rate)
    return under_rules(
        optax.chain(direction, add_decayed_weights(weight_decay, rules), steps), rules
    )

"""Optax's own optimizers as baselines: under the same rules, with float32 moments.

`weight_decay` is a number, or a schedule of the count of completed updates, everywhere.
"""

from typing import Any

import jax
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.chains import (
    add_decayed_weights,
    check_numbers,
    in_float32,
    refuse_leaves,
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
    """Plain SGD; the decay is added to the gradient where the rules say so."""
    check_numbers(learning_rate, weight_decay)
    return _with_l2(optax.sgd(learning_rate), weight_decay, rules)


def momentum(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with momentum, the learning rate outside the buffer; decay as in `sgd`."""
    check_numbers(learning_rate, weight_decay, below_one={"momentum": momentum})
    return _with_l2(optax.sgd(learning_rate, momentum), weight_decay, rules)


def nesterov(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum; decay as in `sgd`."""
    check_numbers(learning_rate, weight_decay, below_one={"momentum": momentum})
    return _with_l2(optax.sgd(learning_rate, momentum, nesterov=True), weight_decay, rules)


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adam; decay as in `sgd`, that is L2 regularisation."""
    check_numbers(learning_rate, weight_decay, below_one={"b1": b1, "b2": b2}, eps=eps)
    return _with_l2(optax.adam(learning_rate, b1, b2, eps), weight_decay, rules)


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.01,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adam with decay outside the moments, times the learning rate, where the rules say so."""
    check_numbers(learning_rate, weight_decay, below_one={"b1": b1, "b2": b2}, eps=eps)
    direction = optax.scale_by_adam(b1, b2, eps)
    return _decoupled(direction, learning_rate, weight_decay, rules)


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Adagrad; decay as in `sgd`."""
    check_numbers(
        learning_rate, weight_decay, initial_accumulator_value=initial_accumulator_value, eps=eps
    )
    inner = optax.adagrad(learning_rate, initial_accumulator_value, eps)
    return _with_l2(inner, weight_decay, rules)


def lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    rules: Rules = parameters.DEFAULT_RULES,
) -> optax.GradientTransformation:
    """Lion: the sign of an interpolated momentum, with decay as in `adamw`.

    References:
      Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675.
    """
    check_numbers(learning_rate, weight_decay, below_one={"b1": b1, "b2": b2})
    return _decoupled(optax.scale_by_lion(b1, b2), learning_rate, weight_decay, rules)


def adafactor(
    learning_rate: optax.ScalarOrSchedule,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    rules: Rules = parameters.DEFAULT_RULES,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    """Adafactor: second moments of a matrix as a row and a column.

    The decay is not multiplied by the learning rate, as in Optax. Means run over whole tensors, so
    stacks of layers (`layer_axes`) are refused, and so is a leaf that `axis_name` splits inside
    `shard_map`; under `jit` tensors may be split in any way.

    Args:
      learning_rate: a number, or a schedule of the count of completed updates.
      min_dim_size_to_factor: matrices with a side shorter than this keep whole second moments.
      decay_rate: the exponent of the second moments' decay, 1 - t ** -decay_rate.
      decay_offset: subtracted from the count of updates in it, where a run goes on from another.
      multiply_by_parameter_scale: the rate is relative to a tensor's root mean square.
      clipping_threshold: of the root mean square of a tensor's update; None for no clipping.
      momentum: of the updates, in [0, 1); None for none, which keeps no buffer.
      eps: added to squared gradients.
      factored: False keeps whole second moments everywhere.
      weight_decay: a number, or a schedule of the count of completed updates.
      rules: which leaves decay, see `parameters.resolve`.
      axis_name: see `trust_ratio.scale_by_trust_ratio`.

    Raises:
      ValueError: for an argument that is out of range; from `init` and `update`, for a stack of
        layers, and for a leaf that is split.

    References:
      Shazeer and Stern, Adafactor, arXiv:1804.04235.
    """
    below_one = {} if momentum is None else {"momentum": momentum}
    check_numbers(learning_rate, weight_decay, below_one, decay_rate=decay_rate, eps=eps)
    for name, value in (
        ("min_dim_size_to_factor", min_dim_size_to_factor),
        ("decay_offset", decay_offset),
    ):
        checks.check_whole(name, value)
    checks.check_axis_name(axis_name)
    checks.check_flag("multiply_by_parameter_scale", multiply_by_parameter_scale)
    checks.check_flag("factored", factored)
    if clipping_threshold is not None:
        checks.check_range("clipping_threshold", clipping_threshold)
        if not isinstance(clipping_threshold, jax.core.Tracer) and clipping_threshold == 0:
            raise ValueError("clipping_threshold must be above 0, or None for no clipping, not 0")
    # Optax's own decay is left off: rate factors scale the step and not this decay, so they have to
    # stand between the two.
    stepped = optax.adafactor(
        learning_rate,
        min_dim_size_to_factor,
        decay_rate,
        decay_offset,
        multiply_by_parameter_scale,
        clipping_threshold,
        momentum,
        eps=eps,
        factored=factored,
    )
    # Optax adds the decay last, before the sign is turned.
    inner = in_float32(
        optax.chain(
            stepped,
            scale_by_rate_factors(rules),
            optax.scale(-1.0),
            add_decayed_weights(weight_decay, rules),
            optax.scale(-1.0),
        )
    )

    # Here and not when the optimizer is made: which leaves are stacks is known with the parameters.
    def init_fn(params: optax.Params) -> optax.OptState:
        refuse_leaves(
            params,
            rules,
            lambda path, leaf, facts: bool(facts.layer_axes),
            "adafactor takes a stack of layers for one tensor: the parameter {path!r} must have "
            "no layer_axes",
        )
        return inner.init(params)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)
        refuse_leaves(
            params,
            rules,
            lambda path, leaf, facts: bool(trust_ratio.axes_of(axis_name, path)),
            "adafactor needs whole tensors: axis_name must be None for {path!r}",
        )
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_l2(
    inner: optax.GradientTransformation, weight_decay: optax.ScalarOrSchedule, rules: Rules
) -> optax.GradientTransformation:
    # In front of the optimizer, so the decay goes through its moments as the gradient of an L2
    # term.
    return under_rules(optax.chain(add_decayed_weights(weight_decay, rules), inner), rules)


def _decoupled(
    direction: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule,
    rules: Rules,
) -> optax.GradientTransformation:
    # Behind the direction and in front of the rate: no moment holds the decay, and the rate scales
    # it.
    steps = optax.scale_by_learning_rate(learning_rate)
    return under_rules(
        optax.chain(direction, add_decayed_weights(weight_decay, rules), steps), rules
    )

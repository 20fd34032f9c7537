"""The gradient of an L2 term in the loss, in addition to the optimizer's weight decay."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.parameters import Rules


def add_l2(
    inner: optax.GradientTransformation, l2: float, rules: Rules = parameters.DEFAULT_RULES
) -> optax.GradientTransformationExtraArgs:
    r"""Adds the gradient of the term :math:`\frac{\lambda}{2} \|w\|^2` to the gradients for `inner`.

    This reproduces code that adds the term to the loss, such as tensorflow/tpu's EfficientNet with
    LARS; there, the term is part of every gradient norm that the optimizer computes. The state is
    `inner`'s state.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> tx = add_l2(optax.sgd(1.0), 0.1)
    >>> tx.update({'kernel': jnp.array([0., 2.])}, tx.init(params), params)[0]
    {'kernel': Array([-0.3, -2.4], dtype=float32)}

    Args:
      inner: the optimizer.
      l2: :math:`\lambda`, at least 0.
      rules: the term covers the leaves that decay by these rules, see `parameters.resolve`.

    References:
      models/official/efficientnet/main.py of tensorflow/tpu: `loss` in `model_fn`.
    """
    checks.check_transform("inner", inner)
    checks.check_range("l2", l2)
    parameters.check_rules(rules)
    inner = optax.with_extra_args_support(inner)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params = None, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)

        def add(
            metadata: parameters.ParameterMetadata, grad: jax.Array, param: jax.Array
        ) -> jax.Array:
            if not metadata.decay:
                return grad
            dtype = trust_ratio.compute_dtype(param)
            return jnp.asarray(grad, dtype) + l2 * jnp.asarray(param, dtype)

        updates = jax.tree.map(add, parameters.resolve(params, rules), updates, params)
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)

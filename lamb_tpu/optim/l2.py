"""The gradient of an L2 term of the loss, beside whatever decay an optimizer has of its own."""

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.parameters import Rules


def add_l2(
    inner: optax.GradientTransformation, l2: float, rules: Rules = parameters.DEFAULT_RULES
) -> optax.GradientTransformationExtraArgs:
    r"""Gives `inner` the gradient of the loss plus :math:`\frac{\lambda}{2} \|w\|^2`.

    For code that keeps the term in its loss, and with it in every norm that the optimizer takes of
    a gradient, as tensorflow/tpu's EfficientNet does under LARS. The state is that of `inner`.

    >>> import jax.numpy as jnp
    >>> from lamb_tpu import optim
    >>> params = {'kernel': jnp.array([3., 4.])}
    >>> tx = add_l2(optax.sgd(1.0), 0.1)
    >>> tx.update({'kernel': jnp.array([0., 2.])}, tx.init(params), params)[0]
    {'kernel': Array([-0.3, -2.4], dtype=float32)}

    Args:
      inner: the optimizer.
      l2: :math:`\lambda`.
      rules: the leaves that decay by these are in the term, see `parameters.resolve`.

    Raises:
      ValueError: `l2` is no number of at least 0, or rules that are not rules.

    References:
      models/official/efficientnet/main.py of tensorflow/tpu: `loss` in `model_fn`.
    """
    checks.check_transform("inner", inner)
    checks.check_range("l2", l2)
    parameters.check_rules(rules)
    inner = optax.with_extra_args_support(inner)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.gradient_leaves(updates, params)

        # The table of facts is the first tree, so its `decay` is at hand leaf by leaf.
        def add(facts: parameters.ParameterFacts, grad: jax.Array, param: jax.Array) -> jax.Array:
            if not facts.decay:
                return grad
            dtype = trust_ratio.compute_dtype(param)
            return jnp.asarray(grad, dtype) + l2 * jnp.asarray(param, dtype)

        updates = jax.tree.map(add, parameters.resolve(params, rules), updates, params)
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)

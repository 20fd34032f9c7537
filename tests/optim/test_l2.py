"""Tests an L2 term in the loss combined with an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.factory import OPTIMIZERS, make_optimizer
from tests.optim.catalogue import REDUCING

PARAMS = {
    "conv": {"kernel": jnp.linspace(-0.5, 1.0, 6).reshape(2, 3)},
    "norm": {"scale": jnp.array([1.0, 0.8, 1.2]), "bias": jnp.array([0.1, 0.0, -0.1])},
    "output": {"kernel": jnp.linspace(0.2, -0.4, 6).reshape(3, 2), "bias": jnp.array([0.5, -0.3])},
}


def loss(params: optax.Params) -> jax.Array:
    return sum(jnp.sum(jnp.sin(3 * leaf + 1)) for leaf in jax.tree.leaves(params))


def steps(tx: optax.GradientTransformation, l2: float) -> optax.Params:
    """Returns the weights after three updates with the L2 term in the loss."""

    def full(params: optax.Params) -> jax.Array:
        kept = [params["conv"]["kernel"], *params["output"].values()]  # without the norm
        return loss(params) + l2 / 2 * sum(jnp.sum(leaf**2) for leaf in kept)

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        updates, state = tx.update(jax.grad(full)(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REDUCING])
def test_is_the_gradient_of_the_term(name: str) -> None:
    config = {"name": name, "rules": "no_bias_no_norm", "clip_global_norm": 1.5}
    plain = make_optimizer(config, 0.1)
    actual = steps(make_optimizer(config | {"l2": 0.3, "l2_rules": "resnet"}, 0.1), 0.0)
    expected = steps(plain, 0.3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected
    )
    without = steps(plain, 0.0)
    if name != "lion":  # so small a term changes no sign
        assert np.abs(without["conv"]["kernel"] - expected["conv"]["kernel"]).max() > 1e-5


def gradient(shape: tuple[int, ...], step: int) -> np.ndarray:
    size = int(np.prod(shape))
    return np.cos(np.arange(size) + size + step).reshape(shape)


def test_lars_of_tensorflow_tpus_efficientnet() -> None:
    """Computes the expected steps in float64, by the formulas of lars_optimizer.py and main.py's loss."""
    rate, decay, l2, momentum = 5.0, 0.02, 0.3, 0.9
    tx = optim.add_l2(
        optim.lars(rate, weight_decay=decay, rules="efficientnet", momentum=momentum), l2, "resnet"
    )
    params, state = PARAMS, tx.init(PARAMS)
    weights = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.float64(leaf)
        for path, leaf in jax.tree.leaves_with_path(PARAMS)
    }
    buffers = {path: np.zeros_like(leaf) for path, leaf in weights.items()}
    for step in range(3):
        grads = jax.tree.map(lambda leaf: jnp.asarray(gradient(leaf.shape, step)), PARAMS)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for path, w in weights.items():
            grad, factor = gradient(w.shape, step), rate
            if "norm" not in path:
                grad = grad + l2 * w
            if "kernel" in path:  # the skip list has batch_normalization, bias, beta, gamma
                norms = np.linalg.norm(w), np.linalg.norm(grad)
                factor *= 0.001 * norms[0] / (norms[1] + decay * norms[0])
                grad = grad + decay * w
            buffers[path] = momentum * buffers[path] + factor * grad
            weights[path] = w - buffers[path]
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(leaf, weights[name], rtol=1e-5)


def test_narrow_dtypes_and_extra_arguments() -> None:
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append((jax.tree.map(lambda leaf: leaf.dtype, updates), extra))
        return updates, state

    tx = optim.add_l2(optax.GradientTransformationExtraArgs(lambda params: (), update), 0.5)
    params = {"w": jnp.ones(2, jnp.bfloat16), "v": jnp.ones(2)}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params, value=3)
    assert seen == [({"w": jnp.float32, "v": jnp.float32}, {"value": 3})]
    np.testing.assert_array_equal(updates["w"], [0.5, 0.5])


def test_state_is_that_of_the_optimizer() -> None:
    plain = optim.lars(0.1)
    assert jax.tree.structure(optim.add_l2(plain, 0.1).init(PARAMS)) == jax.tree.structure(
        plain.init(PARAMS)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"l2": -0.1}, "l2=-0.1 must be at least 0"),
        ({"l2": "much"}, "l2='much' must be at least 0"),
        ({"l2_rules": "resnet"}, "l2_rules='resnet' has no effect without l2"),
        ({"l2": 0.1, "l2_rules": "resnets"}, "resnets"),
        ({"l2": 0.1, "l2_rules": [["nothing", {}]]}, "no rule matches the parameter 'conv/kernel'"),
    ],
)
def test_errors(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer({"name": "lars", **config}, 0.1, PARAMS)
    tx = optim.add_l2(optax.sgd(0.1), 0.1)
    with pytest.raises(ValueError, match="params is None"):
        tx.update(PARAMS, tx.init(PARAMS))

"""NNX modules that are adapted to the functions `init` and `apply`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lamb_tpu.models import Model
from lamb_tpu.models.dropout import example_positions
from lamb_tpu.models.nnx import functions


class Network(nnx.Module):
    """Twelve layers in a list, one of which is applied twice; BatchNorm, dropout, and a sown value."""

    def __init__(self, width: int = 3, rate: float = 0.5, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(12)])
        self.tied = self.layers[1]
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.dropouts = nnx.List([nnx.Dropout(rate, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(self.tied(x))
        self.sow(nnx.Intermediate, "seen", x)
        first, second = (dropout(jnp.ones_like(x)) for dropout in self.dropouts)
        return jnp.stack([x, first, second])


X = jax.random.normal(jax.random.key(1), (64, 3))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*functions(Network))


@pytest.fixture(scope="module")
def variables(model: Model) -> Any:
    return model.init(jax.random.key(0), X)


def test_variables_are_plain(variables: Any) -> None:
    assert set(variables) == {"params", "state"}
    assert set(variables["params"]) == {"layers", "norm"}  # a tied layer appears once
    assert set(variables["params"]["layers"]) == {str(number) for number in range(12)}
    assert set(variables["state"]["norm"]) == {"mean", "var"}
    assert all(type(leaf) is not nnx.Param for leaf in jax.tree.leaves(variables))
    other = Model(*functions(Network)).init(jax.random.key(1), X)
    kernel = lambda tree: tree["params"]["layers"]["3"]["kernel"]  # noqa: E731
    assert not np.allclose(kernel(variables), kernel(other))


def test_outputs_are_those_of_the_module(model: Model, variables: Any) -> None:
    module = Network(rngs=nnx.Rngs(jax.random.key(0)))
    module.eval()
    outputs, state = model.apply(variables, X, train=False)
    np.testing.assert_array_equal(outputs, module(X))
    jax.tree.map(np.testing.assert_array_equal, state, {"state": variables["state"]})
    module.train()
    outputs, state = jax.jit(lambda v, x, key: model.apply(v, x, train=True, key=key))(
        variables, X, jax.random.key(2)
    )
    np.testing.assert_allclose(outputs[0], module(X)[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["state"]["norm"]["mean"], module.norm.mean[...], rtol=1e-4)
    assert not np.allclose(state["state"]["norm"]["mean"], variables["state"]["norm"]["mean"])
    assert jax.tree.structure(state) == jax.tree.structure({"state": variables["state"]})


def test_dropout_follows_the_key(model: Model, variables: Any) -> None:
    def drawn(seed: int) -> np.ndarray:
        return np.asarray(model.apply(variables, X, train=True, key=jax.random.key(seed))[0][1:])

    first, second = drawn(0)
    assert set(np.unique(first)) == {0, 2} and not np.array_equal(first, second)
    np.testing.assert_array_equal(drawn(0), [first, second])
    assert not np.array_equal(drawn(1)[0], first)
    with example_positions(jnp.arange(64, 128)):  # another microbatch
        assert not np.array_equal(drawn(0)[0], first)
    hardware = model.apply(variables, X, train=True, key=jax.random.key(0, impl="rbg"))[0]
    assert set(np.unique(hardware[1:])) == {0, 2}


def test_gradients_reach_every_parameter(model: Model, variables: Any) -> None:
    state = {"state": variables["state"]}
    grads = jax.grad(
        lambda p: jnp.sum(model.apply({"params": p, **state}, X, train=False)[0][0] ** 3)
    )(variables["params"])
    assert jax.tree.structure(grads) == jax.tree.structure(variables["params"])
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_a_function_that_returns_no_module_is_rejected() -> None:
    with pytest.raises(TypeError, match="the argument rngs must return an nnx.Module, not "):
        functions(lambda rngs: jnp.zeros(3))

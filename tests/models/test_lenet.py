"""LeNet and LeNet-5: shapes, initial values, and invalid fields."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models
from lamb_tpu.models.lenet import LeNet, LeNet5
from tests.raising import rejected

KEY = jax.random.key(0)


@pytest.mark.parametrize("module, count", [(LeNet, 3_274_634), (LeNet5, 61_706)])
def test_count_of_the_docstring(module: type[nn.Module], count: int) -> None:
    assert f"{count:,}" in module.__doc__
    model = models.linen(module())
    variables = jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct((1, 28, 28, 1), jnp.float32))
    assert set(variables) == {"params"}
    assert sum(leaf.size for leaf in jax.tree.leaves(variables)) == count


@pytest.mark.long
def test_dropout_only_in_training() -> None:
    model = models.build("lenet")
    images = jax.random.uniform(KEY, (4, 8, 8, 1))
    variables = model.init(KEY, images)
    keys = jax.random.split(KEY)

    def logits(train: bool, key: jax.Array | None) -> np.ndarray:
        return np.asarray(model.apply(variables, images, train=train, key=key)[0])

    still = logits(False, None)
    assert still.shape == (4, 10)
    np.testing.assert_array_equal(logits(False, keys[0]), still)
    first, second = (logits(True, key) for key in keys)
    np.testing.assert_array_equal(logits(True, keys[0]), first)
    assert np.abs(first - still).max() > 0.01 and np.abs(first - second).max() > 0.01
    none = models.build("lenet", dropout_rate=0.0)
    np.testing.assert_array_equal(none.apply(variables, images, train=True, key=keys[0])[0], still)


@pytest.mark.parametrize(
    "module, height, message",
    [
        (LeNet5(), 8, ("the network LeNet-5", ..., "cannot process images of shape (8, 8, 1)")),
        (LeNet(), 10, ("the network LeNet", ..., "cannot process images of shape (10, 8, 1)")),
        (LeNet(dropout_rate=1.0), 8, ("dropout_rate", 1.0, "is out of range")),
    ],
)
def test_invalid_input(module: nn.Module, height: int, message: tuple[Any, ...]) -> None:
    image = jax.ShapeDtypeStruct((1, height, 8, 1), jnp.float32)
    with rejected(*message):
        jax.eval_shape(models.linen(module).init, KEY, image)


@pytest.mark.long
def test_kernels_begin_as_in_keras() -> None:
    variables = models.build("lenet5").init(KEY, jnp.zeros((1, 28, 28, 1)))
    kernel = variables["params"]["dense1"]["kernel"]
    limit = np.sqrt(6 / (400 + 120))  # Glorot's uniform
    assert 0.99 * limit < float(jnp.abs(kernel).max()) <= limit
    assert not jnp.any(variables["params"]["dense1"]["bias"])

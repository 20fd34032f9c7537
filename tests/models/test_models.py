"""Models by name, and Linen modules as two functions."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models
from lamb_tpu.errors import UserError


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("lennet", {}, "config.model.name is 'lennet'; known models: lenet, lenet5, mlp"),
        ("mlp", {"depth": 3}, "config.model.depth is no field .*; known: num_classes, "),
        ("mlp", {"parent": None}, "config.model.parent is no field"),
        ("mlp", {"num_classes": 2.0}, "config.model.num_classes is 2.0; it must be a whole number"),
    ],
)
def test_mistakes(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.build(name, **fields)


def test_statistics_are_state_in_training_and_fixed_otherwise() -> None:
    class Normalised(nn.Module):
        @nn.compact
        def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, momentum=0.5)(inputs)

    model = models.linen(Normalised())
    x = jnp.array([[1.0], [3.0]])
    variables = model.init(jax.random.key(0), x)
    assert set(variables) == {"params", "batch_stats"}
    outputs, state = model.apply(variables, x, train=True)
    np.testing.assert_allclose(outputs, [[-1], [1]], atol=1e-4)
    assert set(state) == {"batch_stats"}
    np.testing.assert_allclose(jax.tree.leaves(state), [[1.0], [1.0]])  # half of mean 2, var 1
    outputs, unchanged = model.apply(variables, x, train=False)
    np.testing.assert_allclose(outputs, x, atol=1e-4)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a is b, unchanged["batch_stats"], variables["batch_stats"])
    )

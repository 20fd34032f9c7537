"""The fully connected network."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models

KEY = jax.random.key(0)


def test_is_dense_layers_with_relu_between() -> None:
    model = models.build("mlp", hidden_sizes=(5, 4), num_classes=3)
    x = jax.random.normal(KEY, (2, 3, 2, 1))
    variables = model.init(KEY, x)
    logits, state = model.apply(variables, x, train=True, key=KEY)
    assert state == {}
    hidden = x.reshape(2, 6)
    for name in ("hidden0", "hidden1"):
        layer = variables["params"][name]
        hidden = np.maximum(hidden @ layer["kernel"] + layer["bias"], 0)
    layer = variables["params"]["output"]
    np.testing.assert_allclose(logits, hidden @ layer["kernel"] + layer["bias"], atol=1e-6)


@pytest.mark.parametrize("sizes", [(0,), (8, -1), (2.5,), "abc"])
def test_sizes_that_cannot_be(sizes: object) -> None:
    model = models.build("mlp", hidden_sizes=sizes)
    with pytest.raises(ValueError, match="hidden_sizes must be whole numbers of at least 1, not"):
        jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct((1, 4), jnp.float32))

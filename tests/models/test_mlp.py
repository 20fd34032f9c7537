"""The fully connected network; BatchNorm and dropout give the same results with every sharding."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu import models
from lamb_tpu.models.dropout import example_positions
from tests.marks import some
from tests.raising import rejected

KEY = jax.random.key(0)
BATCH, DEVICES = 32, 8


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


@pytest.mark.long
def test_batch_norm_comes_before_the_relu_in_groups() -> None:
    fields = {"hidden_sizes": (5, 4), "batch_norm": True}
    model = models.build("mlp", group_size=3, **fields)
    x = 2 + jax.random.normal(KEY, (6, 7))
    variables = model.init(KEY, x)
    params = variables["params"]
    assert sorted(params) == ["hidden0", "hidden1", "norm0", "norm1", "output"]
    assert set(params["hidden0"]) == {"kernel"} and set(params["norm0"]) == {"scale", "bias"}
    logits, state = model.apply(variables, x, train=True, key=KEY)
    hidden = np.asarray(x, np.float64)
    for name in ("hidden0", "hidden1"):
        hidden = (hidden @ params[name]["kernel"]).reshape(2, 3, -1)
        centred = hidden - hidden.mean(1, keepdims=True)
        hidden = centred / np.sqrt(hidden.var(1, keepdims=True) + 1e-5)
        hidden = np.maximum(hidden.reshape(6, -1), 0)
    np.testing.assert_allclose(logits, hidden @ params["output"]["kernel"], rtol=1e-4, atol=1e-5)
    moved = 0.01 * np.mean(x @ params["hidden0"]["kernel"], 0)
    np.testing.assert_allclose(state["batch_stats"]["norm0"]["mean"], moved, rtol=1e-5, atol=1e-7)
    # Evaluation uses the running averages, initially 0 and 1.
    logits, _ = model.apply(variables, x, train=False)
    plain = models.build("mlp", hidden_sizes=(5, 4))
    no_bias = {name: {**params[name], "bias": 0.0} for name in ("hidden0", "hidden1")}
    no_bias["hidden0"]["bias"], no_bias["hidden1"]["bias"] = np.zeros(5), np.zeros(4)
    expected, _ = plain.apply({"params": no_bias | {"output": params["output"]}}, x, train=False)
    np.testing.assert_allclose(logits, expected, rtol=1e-4)


def test_dropout_comes_after_the_relu() -> None:
    model = models.build("mlp", hidden_sizes=(200,), num_classes=1, dropout_rate=0.25)
    x = jax.random.normal(KEY, (3, 7))
    params = model.init(KEY, x)["params"]
    hidden = np.maximum(x @ params["hidden0"]["kernel"], 0)

    # The gradient of the last kernel shows which of its inputs were not dropped, and their factor.
    def total(params: Any) -> jax.Array:
        return jnp.sum(model.apply({"params": params}, x[:1], train=True, key=KEY)[0])

    seen = jax.grad(total)(params)["output"]["kernel"][:, 0]
    mask = np.asarray(seen != 0)
    np.testing.assert_allclose(seen, mask * hidden[0] / 0.75, rtol=1e-5)
    assert 0.6 < mask[hidden[0] > 0].mean() < 0.9


FIELDS = {
    "batch_norm, groups of 2": {"batch_norm": True, "group_size": 2},
    "batch_norm, whole": {"batch_norm": True},
    "dropout": {"dropout_rate": 0.3},
    "both, groups of 8": {"batch_norm": True, "group_size": 8, "dropout_rate": 0.3},
}


def step(model: models.Model, axis: str | None, params: Any, state: Any, x: Any, w: Any) -> Any:
    """Returns logits, new state and the gradient of sum(w * logits^2), over all devices."""

    def loss(params: Any) -> tuple[jax.Array, Any]:
        logits, new = model.apply({"params": params, **state}, x, train=True, key=KEY)
        return jnp.sum(w * logits**2), (logits, new)

    first = jax.lax.axis_index(axis) * len(x) if axis else 0
    with example_positions(first + jnp.arange(len(x), dtype=jnp.int32)):
        grads, (logits, new) = jax.grad(loss, has_aux=True)(params)
    return logits, (new, jax.lax.psum(grads, axis) if axis else grads)


def sharded(placement: str, fields: dict[str, Any]) -> Callable[..., Any]:
    """Returns `step` as a function of (params, state, x, w), compiled for a sharding."""
    named = placement in ("shard_map", "pmap")
    model = models.build(
        "mlp", axis_name=("data",) if named else (), hidden_sizes=(24, 16), **fields
    )

    def run(*inputs: Any) -> Any:
        return step(model, "data" if named else None, *inputs)

    if placement == "1 device":
        return jax.jit(run)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    specs, out = (P(), P(), P("data"), P("data")), (P("data"), P())
    if placement == "jit":
        shardings, out = ([NamedSharding(mesh, spec) for spec in s] for s in (specs, out))
        return jax.jit(run, in_shardings=tuple(shardings), out_shardings=tuple(out))
    if placement == "shard_map":
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        )
    mapped = jax.pmap(run, "data", in_axes=(None, None, 0, 0))

    def split(params: Any, state: Any, *rows: jax.Array) -> Any:
        rows = (a.reshape(DEVICES, -1, *a.shape[1:]) for a in rows)
        logits, rest = mapped(params, state, *rows)
        return logits.reshape(BATCH, -1), jax.tree.map(lambda a: a[0], rest)

    return split


@pytest.mark.long
@pytest.mark.parametrize("kind", some(FIELDS, ("batch_norm, whole", "both, groups of 8")))
def test_the_same_outputs_and_gradients_with_every_sharding(kind: str) -> None:
    x = 3 + 2 * jax.random.normal(KEY, (BATCH, 12))
    w = jax.random.normal(jax.random.key(1), (BATCH, 10))
    fields = FIELDS[kind]
    state = dict(models.build("mlp", hidden_sizes=(24, 16), **fields).init(KEY, x))
    params = state.pop("params")
    params, state, x, w = jax.tree.map(np.asarray, (params, state, x, w))
    expected = sharded("1 device", fields)(params, state, x, w)
    largest = jax.tree.map(lambda a: np.max(np.abs(a)), expected)
    for placement in ("jit", "shard_map", "pmap"):
        actual = sharded(placement, fields)(params, state, x, w)
        jax.tree.map(
            lambda a, b, size: np.testing.assert_allclose(
                a, b, rtol=1e-6, atol=1e-6 * size, err_msg=placement
            ),
            actual,
            expected,
            largest,
        )


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_sizes": (0,)}, ("hidden_sizes", (0,), "has an invalid layer size")),
        ({"hidden_sizes": (8, -1)}, ("hidden_sizes", (8, -1), "has an invalid layer size")),
        ({"hidden_sizes": (2.5,)}, ("config.model.hidden_sizes", (2.5,), "has the wrong type")),
        ({"hidden_sizes": "abc"}, ("config.model.hidden_sizes", "abc", "has the wrong type")),
        ({"group_size": 8}, ("group_size", 8, "needs BatchNorm", "use batch_norm=True")),
        ({"dropout_rate": 1.5}, ("dropout_rate", 1.5, "is out of range")),
    ],
)
def test_fields_that_cannot_be(fields: dict[str, Any], message: tuple[Any, ...]) -> None:
    with rejected(*message):
        model = models.build("mlp", **fields)
        jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct((1, 4), jnp.float32))

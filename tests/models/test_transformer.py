"""The encoder: one layer is compared with its formula, and options must not change the outputs."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.models.dropout import example_positions
from lamb_tpu.models.transformer import (
    Encoder,
    EncoderLayer,
    LayerConfig,
    stack_layers,
    unstack_layers,
)
from tests.marks import some
from tests.models.numpy_layers import dense, gelu, layer_norm, normal_variables

KEY = jax.random.key(0)
CONFIG = LayerConfig(
    hidden_size=16,
    num_heads=4,
    intermediate_size=24,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
    dtype="float32",
)
DROPPING = dataclasses.replace(CONFIG, dropout_rate=0.3, attention_dropout_rate=0.3)
ROWS, LENGTH, LAYERS = 5, 7, 3
X = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, 16))
MASK = jnp.arange(LENGTH) < jnp.array([7, 4, 7, 1, 6])[:, None]


def init(module: nn.Module) -> Any:
    return normal_variables(module, X, MASK)


def stack(**fields: Any) -> Encoder:
    return Encoder(**{"config": CONFIG, "num_layers": LAYERS, **fields})


def layer_in_numpy(params: Any, x: np.ndarray, mask: np.ndarray, form: str) -> np.ndarray:
    """Computes a layer as in the papers, in float64, for each example and head separately."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    rows = []
    for row, real in zip(np.asarray(x, np.float64), mask, strict=True):
        query, key, value = (dense(p["attention"][k], row) for k in ("query", "key", "value"))
        heads = []
        for head in range(4):
            part = slice(4 * head, 4 * head + 4)
            weights = np.exp(query[:, part] @ key[:, part].T / 2.0) * real
            heads.append(weights / weights.sum(-1, keepdims=True) @ value[:, part])
        mixed = dense(p["attention"]["output"], np.concatenate(heads, -1))
        y = layer_norm(p["attention_norm"], row + mixed)
        z = dense(p["output"], gelu(dense(p["intermediate"], y), form))
        rows.append(layer_norm(p["output_norm"], y + z))
    return np.stack(rows)


@pytest.mark.parametrize("form", ["erf", "tanh"])
def test_a_layer_is_its_formula(form: str) -> None:
    layer = EncoderLayer(dataclasses.replace(CONFIG, gelu=form))
    variables = init(layer)
    expected = layer_in_numpy(variables["params"], X, np.asarray(MASK), form)
    np.testing.assert_allclose(layer.apply(variables, X, MASK, train=True), expected, atol=2e-5)


def outputs_and_grads(module: Encoder, variables: Any) -> tuple[jax.Array, Any]:
    """Returns the stack's output, and gradients with respect to parameters and inputs."""

    def total(variables: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = module.apply(variables, x, MASK, True, rngs={"dropout": KEY})
        return jnp.sum(jnp.sin(y) * MASK[..., None]), y

    grads, y = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(variables, X)
    return y, grads


def assert_close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.long
def test_unrolled_equals_scanned() -> None:
    variables = init(stack())
    stacked = {"params": stack_layers(variables["params"])}
    y, (grads, in_x) = outputs_and_grads(stack(), variables)
    scanned_y, (scanned_grads, scanned_in_x) = outputs_and_grads(stack(scan_layers=True), stacked)
    assert_close((y, in_x), (scanned_y, scanned_in_x))
    assert_close(stack_layers(grads["params"]), scanned_grads["params"])
    assert float(jnp.std(y)) > 0.1


def test_stacking_is_exact_and_leaves_other_parameters() -> None:
    params = {"encoder": init(stack())["params"], "head": {"bias": jnp.arange(3.0)}}
    stacked = stack_layers(params)
    expected = init(stack(scan_layers=True))["params"]
    assert jax.tree.map(jnp.shape, stacked["encoder"]) == jax.tree.map(jnp.shape, expected)
    np.testing.assert_array_equal(
        stacked["encoder"]["layers"]["attention"]["query"]["kernel"][2],
        params["encoder"]["layer_2"]["attention"]["query"]["kernel"],
    )
    back = unstack_layers(stacked)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(back), stacked)
    # With eleven layers, layer_10 must come after layer_9, not after layer_1.
    many = stack_layers({f"layer_{i}": {"bias": jnp.float32(i)} for i in range(11)})
    np.testing.assert_array_equal(many["layers"]["bias"], np.arange(11))


def test_scanned_layers_begin_with_different_values() -> None:
    params = jax.jit(lambda: stack(scan_layers=True).init(KEY, X, MASK, train=False))()["params"]
    kernel = params["layers"]["output"]["kernel"]
    assert np.unique(kernel).size > 0.99 * kernel.size


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [False, pytest.param(True, marks=pytest.mark.long)])
def test_remat_changes_no_number(scan_layers: bool) -> None:
    plain = stack(config=DROPPING, num_layers=1 + scan_layers, scan_layers=scan_layers)
    variables = init(plain)
    expected = outputs_and_grads(plain, variables)
    for remat in ("dots", "full"):
        assert_close(outputs_and_grads(plain.clone(remat=remat), variables), expected)


def residual_shapes(remat: str) -> set[tuple[int, ...]]:
    """Returns the shapes of the arrays that the forward pass stores for one layer's backward pass."""
    module = stack(num_layers=1, remat=remat)
    _, pull = jax.vjp(lambda v, x: module.apply(v, x, MASK, True), init(module), X)
    return {leaf.shape for leaf in jax.tree.leaves(pull)}


def test_residuals_saved_by_remat() -> None:
    scores, intermediate = (ROWS, 4, LENGTH, LENGTH), (ROWS, LENGTH, 24)
    residuals = {remat: residual_shapes(remat) for remat in ("none", "dots", "full")}
    assert any(math.prod(shape) == math.prod(scores) for shape in residuals["none"])
    assert not any(math.prod(shape) == math.prod(scores) for shape in residuals["dots"])
    assert intermediate in residuals["dots"] and intermediate not in residuals["full"]


@pytest.mark.parametrize("fields", some([{}, {"scan_layers": True, "remat": "dots"}], ({},)))
def test_dropout_follows_the_example(fields: dict[str, Any]) -> None:
    module = stack(config=DROPPING, num_layers=2, **fields)
    variables = init(module)

    @jax.jit
    def run(x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
        with example_positions(positions):
            return module.apply(variables, x, mask, True, rngs={"dropout": KEY})

    full = run(X, MASK, jnp.arange(ROWS))
    part = jnp.array([4, 1])
    np.testing.assert_allclose(run(X[part], MASK[part], part), full[part], atol=1e-5)
    assert np.max(np.abs(run(X[part], MASK[part], jnp.array([0, 1])) - full[part])) > 0.1


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate"])
def test_each_rate_drops_separately_and_only_in_training(rate: str) -> None:
    plain = EncoderLayer(CONFIG)
    layer = EncoderLayer(dataclasses.replace(CONFIG, **{rate: 0.3}))
    variables, rngs = init(plain), {"dropout": KEY}
    expected = plain.apply(variables, X, MASK, train=False)
    np.testing.assert_array_equal(layer.apply(variables, X, MASK, train=False), expected)
    assert np.max(np.abs(layer.apply(variables, X, MASK, train=True, rngs=rngs) - expected)) > 0.1


def test_padding_does_not_affect_tokens() -> None:
    module = stack()
    variables = init(module)
    other = jnp.where(MASK[..., None], X, 100 * jax.random.normal(jax.random.key(3), X.shape))
    for train in (False, True):
        one, two = (module.apply(variables, x, MASK, train) for x in (X, other))
        np.testing.assert_array_equal(one[MASK], two[MASK])
        assert np.max(np.abs(one[~MASK] - two[~MASK])) > 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes, fields",
    [
        ({"data": 2, "sequence": 4}, {}),
        ({"data": 2, "model": 2, "sequence": 2}, {"scan_layers": True, "num_layers": 2}),
    ],
)
def test_split_sequences_give_the_numbers_of_one_device(
    sizes: dict[str, int], fields: dict[str, Any]
) -> None:
    module = stack(**{"num_layers": 1, **fields})
    variables = init(module)
    # Pad the length to 8, which is divisible by the mesh axes; each device has 2 rows.
    x, mask = jnp.pad(X[:4], ((0, 0), (0, 1), (0, 0))), jnp.pad(MASK[:4], ((0, 0), (0, 1)))

    def run(variables: Any, x: jax.Array, mask: jax.Array) -> Any:
        def total(variables: Any) -> jax.Array:
            return jnp.sum(jnp.sin(module.apply(variables, x, mask, True)))

        return jax.value_and_grad(total)(variables)

    expected = jax.jit(run)(variables, x, mask)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    rows, full = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(lambda *args: run(*args), in_shardings=(full, rows, rows), out_shardings=full)
            .lower(variables, x, mask)
            .compile()
        )
    actual = compiled(*jax.device_put((variables, x, mask), (full, rows, rows)))
    assert_close(actual, expected, 2e-5)
    # All-to-alls of queries, keys and values, of the result, and of their gradients.
    assert len(re.findall(r" all-to-all\(", compiled.as_text())) >= 4
    # Each device has the scores of one head for 2 rows; a scan stores those of all layers.
    shapes = [
        [int(size) for size in shape.split(",")]
        for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    ]
    largest = max(math.prod(shape) for shape in shapes if shape.count(8) == 2)
    assert largest == module.num_layers * 2 * 1 * 8 * 8


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation, including those of inner functions."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.long
@pytest.mark.parametrize("config", [CONFIG, DROPPING])
def test_bfloat16_keeps_softmax_and_statistics_in_float32(config: LayerConfig) -> None:
    module = EncoderLayer(dataclasses.replace(config, dtype="bfloat16"))
    x = X.astype(jnp.bfloat16)
    variables = module.init(KEY, x, MASK, train=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}

    def run(variables: Any, x: jax.Array) -> jax.Array:
        return module.apply(variables, x, MASK, True, rngs={"dropout": KEY})

    traced = list(equations(jax.make_jaxpr(run)(variables, x).jaxpr))

    def dtypes(name: str) -> list[str]:
        actual = [e.invars[0].aval.dtype.name for e in traced if e.primitive.name == name]
        assert actual, name
        return actual

    for name in ("exp", "rsqrt", "reduce_max", "reduce_sum"):
        assert set(dtypes(name)) == {"float32"}, name
    assert set(dtypes("dot_general")) == {"bfloat16"} and len(dtypes("dot_general")) == 8
    scores = [
        e.outvars[0].aval.dtype.name
        for e in traced
        if e.primitive.name == "dot_general" and e.outvars[0].aval.size == ROWS * 4 * LENGTH**2
    ]
    assert scores == ["float32"]
    y = jax.jit(run)(variables, x)
    assert y.dtype == jnp.bfloat16
    if config is CONFIG:
        full = EncoderLayer(CONFIG).apply(variables, X, MASK, train=False)
        np.testing.assert_allclose(y.astype(jnp.float32), full, atol=0.06)

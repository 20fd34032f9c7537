"""The encoder: one layer by its formula, and everything that must not change its numbers."""

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
from tests.quick import jit

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
    """Parameters without the zeros and ones that biases and LayerNorm begin with."""
    rng = np.random.default_rng(7)
    shapes = jax.eval_shape(lambda x: module.init(KEY, x, MASK, train=False), X)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = float("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def stack(**fields: Any) -> Encoder:
    return Encoder(**{"config": CONFIG, "num_layers": LAYERS, **fields})


def layer_in_numpy(params: Any, x: np.ndarray, mask: np.ndarray, gelu: str) -> np.ndarray:
    """A layer as the papers have it, in float64, example by example and head by head."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def dense(name: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
        return y @ name["kernel"] + name["bias"]

    def norm(name: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
        centred = y - y.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return centred / deviation * name["scale"] + name["bias"]

    def activation(y: np.ndarray) -> np.ndarray:
        if gelu == "erf":
            return y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
        return y * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))

    rows = []
    for row, real in zip(np.asarray(x, np.float64), mask, strict=True):
        query, key, value = (dense(p["attention"][k], row) for k in ("query", "key", "value"))
        heads = []
        for head in range(4):
            part = slice(4 * head, 4 * head + 4)
            weights = np.exp(query[:, part] @ key[:, part].T / 2.0) * real
            heads.append(weights / weights.sum(-1, keepdims=True) @ value[:, part])
        mixed = dense(p["attention"]["output"], np.concatenate(heads, -1))
        y = norm(p["attention_norm"], row + mixed)
        z = dense(p["output"], activation(dense(p["intermediate"], y)))
        rows.append(norm(p["output_norm"], y + z))
    return np.stack(rows)


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_a_layer_is_its_formula(gelu: str) -> None:
    layer = EncoderLayer(dataclasses.replace(CONFIG, gelu=gelu))
    variables = init(layer)
    expected = layer_in_numpy(variables["params"], X, np.asarray(MASK), gelu)
    np.testing.assert_allclose(layer.apply(variables, X, MASK, train=True), expected, atol=2e-5)


def outputs_and_grads(module: Encoder, variables: Any) -> tuple[jax.Array, Any]:
    """The stack's output, and gradients in parameters and inputs of a function of it."""

    def total(variables: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = module.apply(variables, x, MASK, True, rngs={"dropout": KEY})
        return jnp.sum(jnp.sin(y) * MASK[..., None]), y

    grads, y = jit(jax.grad(total, argnums=(0, 1), has_aux=True))(variables, X)
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


def test_stacking_is_exact_and_keeps_what_is_no_layer() -> None:
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
    # Eleven layers: the tenth comes after the ninth, not after the first.
    many = stack_layers({f"layer_{i}": {"bias": jnp.float32(i)} for i in range(11)})
    np.testing.assert_array_equal(many["layers"]["bias"], np.arange(11))


def test_scanned_layers_begin_with_different_values() -> None:
    params = jit(lambda: stack(scan_layers=True).init(KEY, X, MASK, train=False))()["params"]
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


def kept_shapes(remat: str) -> set[tuple[int, ...]]:
    """Shapes of what the backward pass of one layer is given."""
    module = stack(num_layers=1, remat=remat)
    _, pull = jax.vjp(lambda v, x: module.apply(v, x, MASK, True), init(module), X)
    return {leaf.shape for leaf in jax.tree.leaves(pull)}


def test_what_remat_keeps() -> None:
    scores, intermediate = (ROWS, 4, LENGTH, LENGTH), (ROWS, LENGTH, 24)
    kept = {remat: kept_shapes(remat) for remat in ("none", "dots", "full")}
    assert any(math.prod(shape) == math.prod(scores) for shape in kept["none"])
    assert not any(math.prod(shape) == math.prod(scores) for shape in kept["dots"])
    assert intermediate in kept["dots"] and intermediate not in kept["full"]


@pytest.mark.parametrize("fields", some([{}, {"scan_layers": True, "remat": "dots"}], ({},)))
def test_dropout_follows_the_example(fields: dict[str, Any]) -> None:
    module = stack(config=DROPPING, num_layers=2, **fields)
    variables = init(module)

    @jit
    def run(x: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
        with example_positions(positions):
            return module.apply(variables, x, mask, True, rngs={"dropout": KEY})

    whole = run(X, MASK, jnp.arange(ROWS))
    part = jnp.array([4, 1])
    np.testing.assert_allclose(run(X[part], MASK[part], part), whole[part], atol=1e-5)
    assert np.max(np.abs(run(X[part], MASK[part], jnp.array([0, 1])) - whole[part])) > 0.1


@pytest.mark.parametrize("rate", ["dropout_rate", "attention_dropout_rate"])
def test_each_rate_drops_by_itself_and_in_training_alone(rate: str) -> None:
    plain = EncoderLayer(CONFIG)
    layer = EncoderLayer(dataclasses.replace(CONFIG, **{rate: 0.3}))
    variables, rngs = init(plain), {"dropout": KEY}
    expected = plain.apply(variables, X, MASK, train=False)
    np.testing.assert_array_equal(layer.apply(variables, X, MASK, train=False), expected)
    assert np.max(np.abs(layer.apply(variables, X, MASK, train=True, rngs=rngs) - expected)) > 0.1


def test_padding_says_nothing_to_the_tokens() -> None:
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
    # Lengths that divide; 2 rows a device.
    x, mask = jnp.pad(X[:4], ((0, 0), (0, 1), (0, 0))), jnp.pad(MASK[:4], ((0, 0), (0, 1)))

    def run(variables: Any, x: jax.Array, mask: jax.Array) -> Any:
        def total(variables: Any) -> jax.Array:
            return jnp.sum(jnp.sin(module.apply(variables, x, mask, True)))

        return jax.value_and_grad(total)(variables)

    expected = jit(run)(variables, x, mask)
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        compiled = (
            jit(lambda *args: run(*args), in_shardings=(whole, rows, rows), out_shardings=whole)
            .lower(variables, x, mask)
            .compile()
        )
    found = compiled(*jax.device_put((variables, x, mask), (whole, rows, rows)))
    assert_close(found, expected, 2e-5)
    # Queries, keys, values there and the result back, and their gradients.
    assert len(re.findall(r" all-to-all\(", compiled.as_text())) >= 4
    # Each device has the scores of one head, for 2 rows; a scan keeps those of all layers.
    shapes = [
        [int(size) for size in shape.split(",")]
        for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    ]
    largest = max(math.prod(shape) for shape in shapes if shape.count(8) == 2)
    assert largest == module.num_layers * 2 * 1 * 8 * 8


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of inner functions too."""
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
        found = [e.invars[0].aval.dtype.name for e in traced if e.primitive.name == name]
        assert found, name
        return found

    for name in ("exp", "rsqrt", "reduce_max", "reduce_sum"):
        assert set(dtypes(name)) == {"float32"}, name
    assert set(dtypes("dot_general")) == {"bfloat16"} and len(dtypes("dot_general")) == 8
    scores = [
        e.outvars[0].aval.dtype.name
        for e in traced
        if e.primitive.name == "dot_general" and e.outvars[0].aval.size == ROWS * 4 * LENGTH**2
    ]
    assert scores == ["float32"]
    y = jit(run)(variables, x)
    assert y.dtype == jnp.bfloat16
    if config is CONFIG:
        whole = EncoderLayer(CONFIG).apply(variables, X, MASK, train=False)
        np.testing.assert_allclose(y.astype(jnp.float32), whole, atol=0.06)

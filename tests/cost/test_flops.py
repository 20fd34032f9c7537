"""Compares counted FLOPs with formulas derived by hand, and with the compiler's count."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from lamb_tpu.cost.flops import matrix_flops, training_flops
from lamb_tpu.models.bert import BertConfig

F32 = jnp.float32
X, W = jax.ShapeDtypeStruct((4, 8), F32), jax.ShapeDtypeStruct((8, 8), F32)
PRODUCT = 2 * 4 * 8 * 8


def counted(function: Any, *args: Any) -> int:
    return matrix_flops(jax.make_jaxpr(function)(*args).jaxpr)


def test_products_of_every_form() -> None:
    a, b = jax.ShapeDtypeStruct((3, 5, 7, 2), F32), jax.ShapeDtypeStruct((3, 7, 11, 5), F32)
    # The first product sums over i and k, the second over k alone.
    assert counted(lambda a, b: jnp.einsum("bikm,bkni->bmn", a, b), a, b) == 2 * (3 * 2 * 11) * 35
    assert counted(lambda a, b: jnp.einsum("bikm,bkni->bimn", a, b), a, b) == 2 * (3 * 10 * 11) * 7
    vector = jax.ShapeDtypeStruct((8,), F32)
    assert counted(jnp.dot, vector, vector) == 16
    assert counted(lambda x: jnp.exp(x) + x.sum(), X) == 0


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return (x @ w) @ w


BACKWARD, FORWARD = jax.custom_vjp(jnp.matmul), jax.custom_jvp(jnp.matmul)
BACKWARD.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
FORWARD.defjvp(lambda primals, _: (primals[0] @ primals[1], primals[0]))


@pytest.mark.parametrize(
    "function, products",
    [
        (jax.jit(twice), 2),
        (jax.checkpoint(lambda x, w: jax.nn.relu(x @ w)), 1),
        (lambda x, w: lax.scan(lambda c, _: (twice(c, w), None), x, None, 7)[0], 7 * 2),
        (lambda x, w: lax.fori_loop(2, 5, lambda _, c: lax.map(lambda r: r @ w, c), x), 3),
        (lambda x, w: lax.cond(x[0, 0] > 0, twice, jnp.matmul, x, w), 2),
        (lambda x, w: lax.platform_dependent(x, w, cpu=twice, default=jnp.matmul), 1),
        (BACKWARD, 1),
        (FORWARD, 1),
    ],
)
def test_control_flow(function: Any, products: int) -> None:
    assert counted(function, X, W) == products * PRODUCT


def test_loop_of_unknown_length() -> None:
    def until(body: Any) -> Any:
        return lambda x, w: lax.while_loop(lambda c: c[0, 0] < 9, lambda c: body(c, w), x)

    with pytest.raises(ValueError, match="a matrix product is in a while loop"):
        counted(until(lambda c, w: c @ w), X, W)
    assert counted(until(lambda c, w: c + w[:4]), X, W) == 0


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolutions(groups: int) -> None:
    images = jax.ShapeDtypeStruct((5, 9, 9, 6), F32)
    layer = nn.Conv(12, (3, 2), strides=2, feature_group_count=groups)
    variables = jax.eval_shape(layer.init, jax.random.key(0), images)
    # 5 x 5 positions of 12 channels, each from 3 x 2 positions of a group's channels.
    assert counted(layer.apply, variables, images) == 2 * 5 * 25 * 12 * 6 * (6 // groups)
    # Channels first.
    turned = counted(
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=groups),
        jax.ShapeDtypeStruct((5, 6, 9, 9), F32),
        jax.ShapeDtypeStruct((12, 6 // groups, 3, 2), F32),
    )
    assert turned == 2 * 5 * (7 * 8) * 12 * 6 * (6 // groups)


BATCH, LENGTH, PLACES = 3, 16, 5
SIZES = dict(
    num_layers=3, hidden_size=64, num_heads=4, intermediate_size=96, vocab_size=50, max_positions=16
)


def of_bert(heads: tuple[str, ...] = ("mlm", "nsp"), **fields: Any) -> tuple[int, dict[str, Any]]:
    """Returns the FLOPs of training a BERT, and the shapes of its parameters."""
    module = BertConfig(**SIZES, heads=heads, **fields).module()
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    names = "input_ids", "token_type_ids", "attention_mask"
    batch = dict.fromkeys(names, tokens)
    batch["masked_positions"] = jax.ShapeDtypeStruct((BATCH, PLACES), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda k, b: module.init(k, b, False), key, batch)["params"]

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        outputs = module.apply({"params": params}, batch, True, rngs={"dropout": key})
        return sum(jnp.sum(x.astype(F32)) for x in outputs.values())

    return training_flops(loss, params, batch, key), params


def by_hand() -> int:
    """Returns 6 FLOPs per token for each parameter in the encoder's matrices, plus 12 L H Q T per token."""
    _, params = of_bert()
    leaves, _ = jax.tree_util.tree_flatten_with_path(params["encoder"])
    matrices = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    hidden, layers, types = SIZES["hidden_size"], SIZES["num_layers"], 2
    assert matrices == layers * (4 * hidden**2 + 2 * hidden * SIZES["intermediate_size"])
    attention = 12 * layers * hidden * LENGTH
    return BATCH * LENGTH * (6 * (matrices + types * hidden) + attention)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_dropout_rate": 0.0}, {"remat": "full"}, {"remat": "dots", "dtype": "float32"}],
    ids=str,
)
def test_bert(scan: bool, fields: dict[str, Any]) -> None:
    hidden, words = SIZES["hidden_size"], SIZES["vocab_size"]
    masked = BATCH * PLACES * (hidden**2 + hidden * words)
    pairs = BATCH * (hidden**2 + 2 * hidden)
    actual, _ = of_bert(scan_layers=scan, **fields)
    assert actual == by_hand() + 6 * (masked + pairs)


def test_head_for_answers() -> None:
    assert of_bert(heads=("span",))[0] == by_hand() + 6 * BATCH * LENGTH * 2 * SIZES["hidden_size"]


@pytest.mark.optimized
def test_the_compiler_counts_the_same() -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        x = lax.conv_general_dilated(
            x, params["conv"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jnp.tanh(x).reshape(len(x), -1)
        return jnp.sum(jnp.tanh(x @ params["hidden"]) @ params["out"])

    shapes = {"conv": (3, 3, 16, 64), "hidden": (6 * 6 * 64, 256), "out": (256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, F32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((32, 8, 8, 16), F32)

    def by_compiler(function: Any) -> float:
        return jax.jit(function).lower(params, x).cost_analysis()["flops"]

    actual = training_flops(loss, params, x)
    # The compiler also counts sums and derivatives of tanh, which take few operations.
    assert by_compiler(loss) == pytest.approx(actual / 3, rel=0.01)
    assert by_compiler(jax.grad(loss, argnums=(0, 1))) == pytest.approx(actual, rel=0.05)

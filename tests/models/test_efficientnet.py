"""EfficientNet against a NumPy forward pass; scaling; stochastic depth on several devices."""

import doctest
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lamb_tpu import models
from lamb_tpu.models import efficientnet
from lamb_tpu.models.dropout import Dropout, example_positions
from lamb_tpu.models.efficientnet import Block, EfficientNet, SqueezeExcite
from lamb_tpu.models.norm import BatchNorm
from tests.models import numpy_layers

KEY = jax.random.key(0)
# The inputs of the five convolutions with stride 2 have heights 27, 14, 7, 4, 2 and widths 20, 10, 5,
# 3, 2.
IMAGES = np.random.default_rng(1).normal(size=(2, 27, 20, 3)).astype(np.float32)
# The stages in the authors' notation, from efficientnet_builder.py.
ORIGINAL = (
    "r1_k3_s11_e1_i32_o16_se0.25",
    "r2_k3_s22_e6_i16_o24_se0.25",
    "r2_k5_s22_e6_i24_o40_se0.25",
    "r3_k3_s22_e6_i40_o80_se0.25",
    "r3_k5_s11_e6_i80_o112_se0.25",
    "r4_k5_s22_e6_i112_o192_se0.25",
    "r1_k3_s11_e6_i192_o320_se0.25",
)


class Small(EfficientNet):
    """A network with 8 blocks of 8 to 80 channels."""

    width, depth, image_size = 0.25, 0.3, 27


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def swish(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


# (size, kernel) -> pixels of padding (before, after) for stride 2, computed by hand: ceil(size / 2)
# windows must fit, and an odd pixel is padded after the image.
PADS = {
    (27, 3): (1, 1),
    (20, 3): (0, 1),
    (14, 3): (0, 1),
    (10, 3): (0, 1),
    (7, 5): (2, 2),
    (5, 5): (2, 2),
    (4, 3): (0, 1),
    (3, 3): (1, 1),
    (2, 5): (1, 2),
}


def conv(x: np.ndarray, kernel: np.ndarray, stride: int = 1) -> np.ndarray:
    size = len(kernel)
    pads = [(size // 2, size // 2)] * 2
    if stride == 2:
        pads = [PADS[length, size] for length in x.shape[1:3]]
    return numpy_layers.conv(x, kernel, stride, tuple(pads))


def forward(tree: Any, x: np.ndarray) -> np.ndarray:
    """Computes the forward pass from the original's table of stages."""
    params, stats = tree["params"], tree["batch_stats"]

    def norm(x: np.ndarray, params: Any, stats: Any, name: str) -> np.ndarray:
        return numpy_layers.norm(x, params[name], stats[name], 1e-3)

    x = swish(norm(conv(x, params["stem_conv"]["kernel"], 2), params, stats, "stem_norm"))
    for stage, text in enumerate(ORIGINAL, start=1):
        options = dict(re.findall(r"([a-z]+)([\d.]+)", text))
        for index in range(-(-int(options["r"]) * 3 // 10)):
            name = f"stage{stage}_block{index + 1}"
            own, its = params[name], stats[name]
            y, stride = x, int(options["s"][0]) if index == 0 else 1
            if options["e"] != "1":
                y = swish(norm(conv(y, own["expand"]["kernel"]), own, its, "expand_norm"))
            assert len(own["depthwise"]["kernel"]) == int(options["k"])
            y = conv(y, own["depthwise"]["kernel"], stride)
            y = swish(norm(y, own, its, "depthwise_norm"))
            gates = own["squeeze_excite"]
            assert gates["reduce"]["bias"].size == max(1, int(x.shape[-1] * 0.25))
            hidden = swish(y.mean((1, 2)) @ gates["reduce"]["kernel"] + gates["reduce"]["bias"])
            gate = sigmoid(hidden @ gates["expand"]["kernel"] + gates["expand"]["bias"])
            y = conv(y * gate[:, None, None], own["project"]["kernel"])
            y = norm(y, own, its, "project_norm")
            x = x + y if stride == 1 and x.shape == y.shape else y
    x = swish(norm(conv(x, params["head_conv"]["kernel"]), params, stats, "head_norm"))
    return x.mean((1, 2)) @ params["output"]["kernel"] + params["output"]["bias"]


def test_forward_pass() -> None:
    module = Small(num_classes=5)
    tree = numpy_layers.variables(module, IMAGES, gain=1.15)
    numpy_layers.check_forward(module, tree, IMAGES, forward(tree, IMAGES))


def test_squeeze_excite() -> None:
    """Compares with a hand-computed result for two channels with means 1 and 3 and one reduced unit."""
    x = np.array([[[[0.0, 2.0], [2.0, 4.0]]]], np.float32)
    params = {
        "reduce": {"kernel": np.array([[1.0], [1.0]]), "bias": np.array([-3.0])},
        "expand": {"kernel": np.array([[2.0, -1.0]]), "bias": np.array([0.0, 1.0])},
    }
    unit = 1 / (1 + np.exp(-1.0))  # swish(1 + 3 - 3)
    gates = 1 / (1 + np.exp([-2 * unit, unit - 1]))
    actual = SqueezeExcite(1, "float32").apply({"params": params}, x)
    np.testing.assert_allclose(actual, x * gates, rtol=1e-6)


@functools.cache
def blocks(name: str) -> list[tuple[Any, ...]]:
    """Returns every block: (stage, channels, kernel, stride, expansion, shortcut rate or None)."""
    actual: dict[str, list[Any]] = {}

    def record(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if isinstance(module, Block) and context.method_name == "__call__":
            actual[module.name] = [
                int(module.name[5]),
                module.channels,
                module.kernel,
                module.stride,
                module.expansion,
                None,
            ]
        if isinstance(module, Dropout) and context.method_name == "__call__":
            if module.whole_examples:
                actual[module.path[0]][-1] = module.rate
        return run(*args, **kwargs)

    image = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
    with nn.intercept_methods(record):
        jax.eval_shape(models.build(name).init, KEY, image)
    return [tuple(block) for block in actual.values()]


def test_blocks_of_b0_are_the_table() -> None:
    expected = []
    for stage, text in enumerate(ORIGINAL, start=1):
        o = {key: int(value) for key, value in re.findall(r"(?<![a-z])([a-z])(\d+)", text)}
        for index in range(o["r"]):
            stride = o["s"] // 11 if index == 0 else 1
            expected.append((stage, o["o"], o["k"], stride, o["e"]))
    assert [block[:5] for block in blocks("efficientnet_b0")] == expected


def test_rates_of_stochastic_depth() -> None:
    rates = [block[5] for block in blocks("efficientnet_b0")]
    # There is no shortcut if the stride is 2 or the width changes.
    given = {index: rate for index, rate in enumerate(rates) if rate is not None}
    assert list(given) == [2, 4, 6, 7, 9, 10, 12, 13, 14]
    assert list(given.values()) == pytest.approx([0.2 * index / 16 for index in given])


@pytest.mark.long
@pytest.mark.parametrize(
    "name, counts, channels",
    [
        # Tables of published checkpoints: blocks and channels of each stage.
        ("efficientnet_b2", (2, 3, 3, 4, 4, 5, 2), (16, 24, 48, 88, 120, 208, 352)),
        ("efficientnet_b5", (3, 5, 5, 7, 7, 9, 3), (24, 40, 64, 128, 176, 304, 512)),
        ("efficientnet_b7", (4, 7, 7, 10, 10, 13, 4), (32, 48, 80, 160, 224, 384, 640)),
    ],
)
def test_compound_scaling(name: str, counts: tuple[int, ...], channels: tuple[int, ...]) -> None:
    actual = blocks(name)
    assert tuple(sum(b[0] == s for b in actual) for s in range(1, 8)) == counts
    assert tuple({b[0]: b[1] for b in actual}.values()) == channels


def test_rounding_up_where_down_would_lose_a_tenth() -> None:
    # 19.2 is nearer to 16 than to 24, but 16 is below 0.9 * 19.2.
    assert efficientnet.scaled_channels(16, 1.2) == 24
    assert efficientnet.scaled_channels(24, 1.1) == 24
    assert efficientnet.scaled_channels(4, 1.0) == 8
    assert efficientnet.scaled_channels(20, 1.0) == 24  # halves are rounded up
    assert doctest.testmod(efficientnet) == (0, 1)


def test_first_values() -> None:
    names = ("expand", "depthwise", "project", "reduce", "expand of gates", "output")

    @jax.jit
    def draw(key: jax.Array) -> dict[str, jax.Array]:
        params = models.build("efficientnet_b0").init(key, jnp.zeros((1, 32, 32, 3)))["params"]
        block = params["stage6_block2"]
        gates = block["squeeze_excite"]
        layers = (
            block["expand"],
            block["depthwise"],
            block["project"],
            gates["reduce"],
            gates["expand"],
            params["output"],
        )
        return {name: layer["kernel"] for name, layer in zip(names, layers, strict=True)}

    drawn = {name: np.asarray(kernel) for name, kernel in draw(KEY).items()}
    for name, outputs in zip(names, (6 * 192, 25, 192, 48, 1152), strict=False):
        kernel = drawn[name] / np.sqrt(2 / outputs)
        assert abs(np.std(kernel) - 1) < 0.02 and np.abs(kernel).max() > 3, name
    bound = 1 / np.sqrt(1000)
    assert 0.999 * bound < np.abs(drawn["output"]).max() <= bound * (1 + 1e-6)
    assert abs(drawn["output"].mean()) < 1e-4


def test_a_dropped_branch_leaves_the_shortcut() -> None:
    norm = functools.partial(BatchNorm, None, False)
    x = np.random.default_rng(2).normal(size=(40, 3, 3, 8)).astype(np.float32)

    def block(rate: float) -> Block:
        return Block(8, 3, 1, 6, rate, norm, "float32")

    tree = numpy_layers.variables(block(0.0), x)

    @jax.jit
    def run(tree: Any) -> list[jax.Array]:
        return [
            block(rate).apply(tree, x, True, rngs={"dropout": KEY}, mutable="batch_stats")[0]
            for rate in (0.0, 0.25)
        ]

    branch, actual = (np.asarray(y) - x for y in run(tree))
    mask = np.any(actual != 0, (1, 2, 3))
    np.testing.assert_allclose(actual[mask], branch[mask] / 0.75, rtol=1e-3, atol=1e-5)
    assert 20 <= mask.sum() <= 38  # 30 are expected


@pytest.mark.long
def test_training_is_the_same_on_devices_and_in_one() -> None:
    """BatchNorm in groups, stochastic depth and dropout do not depend on how the batch is split."""
    # Few blocks compile fast; the second block of each stage has a shortcut.
    stages = ((2, 3, 1, 1, 16), (4, 5, 2, 6, 24))
    images = np.random.default_rng(3).normal(size=(16, 8, 8, 3)).astype(np.float32)
    fields = dict(
        num_classes=5, group_size=4, dropout_rate=0.5, stochastic_depth_rate=0.9, stages=stages
    )
    module, split = Small(**fields), Small(**fields, axis_name=("data",))
    tree = numpy_layers.variables(module, images)
    blocks = {name for name in tree["params"] if "block" in name}
    assert blocks == {"stage1_block1", "stage2_block1", "stage2_block2"}
    one = jax.jit(
        lambda v, x: module.apply(v, x, train=True, rngs={"dropout": KEY}, mutable="batch_stats")
    )
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P("data"), P()),
        check_vma=False,
    )
    def several(v: Any, x: jax.Array) -> Any:
        with example_positions(jax.lax.axis_index("data") * 2 + jnp.arange(2)):
            return split.apply(v, x, train=True, rngs={"dropout": KEY}, mutable="batch_stats")

    logits, state = one(tree, images)
    actual, found_state = several(tree, images)
    np.testing.assert_allclose(actual, logits, rtol=1e-3, atol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found_state, state
    )
    assert np.std(logits, 0).min() > 0.01


@pytest.mark.long
def test_packed_examples_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs the first two of three blocks, as on a TPU; the second block has a shortcut."""
    stages = ((4, 5, 2, 6, 40), (1, 3, 1, 12, 24))
    images = np.random.default_rng(3).normal(size=(8, 9, 8, 3)).astype(np.float32)
    weights = np.random.default_rng(4).normal(size=(8, 5)).astype(np.float32)
    module = Small(5, stages=stages, group_size=4, dropout_rate=0.5, stochastic_depth_rate=0.9)
    tree = numpy_layers.variables(module, images)
    shapes = []

    def record(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if isinstance(context.module, Block) and context.method_name == "__call__":
            shapes.append(args[0].shape[::3])
        return run(*args, **kwargs)

    def step(packed: int) -> Any:
        def loss(params: Any) -> Any:
            with nn.intercept_methods(record):
                logits, state = module.apply(
                    {**tree, "params": params},
                    images,
                    True,
                    rngs={"dropout": KEY},
                    mutable="batch_stats",
                )
            return jnp.sum(weights * logits), (logits, state)

        monkeypatch.setattr(efficientnet, "examples_a_row", lambda rows: packed)
        monkeypatch.setattr(efficientnet, "_PACKED_CHANNELS", 96)
        grad = jax.jit(jax.grad(loss, has_aux=True)).lower(tree["params"])
        # Compile faster; the test does not measure time.
        return grad.compile({"xla_backend_optimization_level": 0})(tree["params"])

    expected, actual = step(1), step(4)
    assert shapes == [(8, 8), (8, 16), (8, 16), (2, 32), (2, 64), (8, 16)]
    scale = jax.tree.map(lambda a: np.max(np.abs(a)), expected)
    jax.tree.map(
        lambda a, b, most: np.testing.assert_allclose(a, b, 1e-3, 1e-5 + 2e-5 * most),
        actual,
        expected,
        scale,
    )

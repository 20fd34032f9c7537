"""Weights in timm's layout: names, shapes and conversion for every network, and rejected input.

tests/interchange/test_timm.py compares the outputs.
"""

import hashlib
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from lamb_tpu import models
from lamb_tpu.models.convert import NETWORKS, from_timm, to_timm
from tests.marks import some
from tests.raising import rejected

# The first 16 digits of the SHA-256 of sorted lines "NAME SHAPE" for all tensors, from timm 1.0.31:
# timm.create_model(network).state_dict().
TIMM = {
    "tf_efficientnet_b0": "9311fe3ac4384e5f",
    "tf_efficientnet_b1": "eed6742864fe036e",
    "tf_efficientnet_b2": "118dd6bbea300286",
    "tf_efficientnet_b3": "fa5ffad0ef81d140",
    "tf_efficientnet_b4": "5fbc7603ab03e57f",
    "tf_efficientnet_b5": "0bbbc524bc954014",
    "tf_efficientnet_b6": "98cdd4d2eed245df",
    "tf_efficientnet_b7": "0f9ff17f2dcc8c04",
    "resnet18": "5191d63ec3989592",
    "resnet34": "f8de2a1812ef85e4",
    "resnet50": "a87e91cd6bd1f939",
    "resnet101": "dbc3ca74fffafc72",
    "resnet152": "7d486dbdc941506e",
}
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
BLOCKS[50] = BLOCKS[34]
WIDTHS = (1.0, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0)  # of EfficientNet B0 to B7
DEPTHS = (1.0, 1.1, 1.2, 1.4, 1.8, 2.2, 2.6, 3.1)

Shapes = dict[str, tuple[int, ...]]


def norm(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind in ("weight", "bias", "running_mean", "running_var"):
        yield f"{name}.{kind}", (channels,)
    yield f"{name}.num_batches_tracked", ()


def resnet(layers: int, classes: int) -> Shapes:
    actual: Shapes = {"conv1.weight": (64, 3, 7, 7), **dict(norm("bn1", 64))}
    inputs = 64
    for stage, count in enumerate(BLOCKS[layers]):
        width = 64 << stage
        outputs = width if layers < 50 else 4 * width
        for index in range(count):
            name = f"layer{stage + 1}.{index}"
            kernels = [(width, inputs, 3), (width, width, 3)]
            if layers >= 50:
                kernels = [(width, inputs, 1), (width, width, 3), (outputs, width, 1)]
            for number, (wide, narrow, size) in enumerate(kernels, start=1):
                actual[f"{name}.conv{number}.weight"] = (wide, narrow, size, size)
                actual |= norm(f"{name}.bn{number}", wide)
            if index == 0 and (stage or layers >= 50):
                actual[f"{name}.downsample.0.weight"] = (outputs, inputs, 1, 1)
                actual |= norm(f"{name}.downsample.1", outputs)
            inputs = outputs
    return actual | {"fc.weight": (classes, inputs), "fc.bias": (classes,)}


def efficientnet(width: float, depth: float, classes: int) -> Shapes:
    def eights(channels: int) -> int:
        near = 8 * math.floor(channels * width / 8 + 0.5)
        return near + 8 * (near < 0.9 * channels * width)

    inputs = eights(32)
    actual: Shapes = {"conv_stem.weight": (inputs, 3, 3, 3), **dict(norm("bn1", inputs))}
    table = [
        (1, 3, 1, 16),
        (2, 3, 6, 24),
        (2, 5, 6, 40),
        (3, 3, 6, 80),
        (3, 5, 6, 112),
        (4, 5, 6, 192),
        (1, 3, 6, 320),
    ]
    for stage, (count, kernel, expansion, channels) in enumerate(table):
        outputs = eights(channels)
        for index in range(math.ceil(count * depth)):
            name, wide = f"blocks.{stage}.{index}", inputs * expansion
            if stage:
                actual[f"{name}.conv_pw.weight"] = (wide, inputs, 1, 1)
            actual[f"{name}.conv_dw.weight"] = (wide, 1, kernel, kernel)
            last = "conv_pwl" if stage else "conv_pw"
            actual[f"{name}.{last}.weight"] = (outputs, wide, 1, 1)
            for number, size in enumerate([wide, wide, outputs] if stage else [wide, outputs]):
                actual |= norm(f"{name}.bn{number + 1}", size)
            reduced = inputs // 4
            actual[f"{name}.se.conv_reduce.weight"] = (reduced, wide, 1, 1)
            actual[f"{name}.se.conv_reduce.bias"] = (reduced,)
            actual[f"{name}.se.conv_expand.weight"] = (wide, reduced, 1, 1)
            actual[f"{name}.se.conv_expand.bias"] = (wide,)
            inputs = outputs
    head = eights(1280)
    actual |= {"conv_head.weight": (head, inputs, 1, 1), **dict(norm("bn2", head))}
    return actual | {"classifier.weight": (classes, head), "classifier.bias": (classes,)}


def shapes_of(name: str, classes: int = 1000) -> Shapes:
    if name.startswith("resnet"):
        return resnet(int(name[6:]), classes)
    number = int(name[-1])
    return efficientnet(WIDTHS[number], DEPTHS[number], classes)


def state(name: str, classes: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        item: rng.standard_normal(shape, np.float32) if shape else np.array(7)
        for item, shape in shapes_of(name, classes).items()
    }


STATE = state("resnet18", 5)


def at(tree: Any, path: str) -> np.ndarray:
    for key in path.split("/"):
        tree = tree[key]
    return tree


@pytest.mark.parametrize("name", NETWORKS)
def test_names_and_shapes_are_those_of_timm(name: str) -> None:
    lines = sorted(f"{item} {shape}" for item, shape in shapes_of(name).items())
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == TIMM[name]


@pytest.mark.parametrize(
    "name",
    some(
        ["tf_efficientnet_b0", "tf_efficientnet_b3", "resnet34", "resnet50"],
        ("tf_efficientnet_b0", "resnet50"),
    ),
)
def test_every_tensor_is_converted(name: str) -> None:
    theirs = {item: shape for item, shape in shapes_of(name).items() if shape}
    # Each tensor is filled with a different number, without allocating memory.
    numbers = {item: np.float32(index) for index, item in enumerate(theirs)}
    tensors = {item: np.broadcast_to(numbers[item], shape) for item, shape in theirs.items()}
    variables = from_timm(name, tensors)
    image = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    expected = jax.eval_shape(models.build(NETWORKS[name]).init, jax.random.key(0), image)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    actual = {}
    for leaf, shape in zip(jax.tree.leaves(variables), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, np.float32)
        actual[float(leaf.ravel()[0])] = leaf.size
    assert actual == {float(numbers[item]): math.prod(shape) for item, shape in theirs.items()}


@pytest.mark.parametrize(
    "name, pairs",
    [
        (
            "resnet18",
            {
                "params/stem_conv/kernel": "conv1.weight",
                "params/stem_norm/scale": "bn1.weight",
                "params/stage2_block1/conv1/kernel": "layer2.0.conv1.weight",
                "params/stage2_block2/norm1/bias": "layer2.1.bn1.bias",
                "params/stage4_block1/projection/kernel": "layer4.0.downsample.0.weight",
                "batch_stats/stage4_block1/projection_norm/mean": "layer4.0.downsample.1.running_mean",
                "batch_stats/stage4_block2/norm2/var": "layer4.1.bn2.running_var",
                "params/output/kernel": "fc.weight",
                "params/output/bias": "fc.bias",
            },
        ),
        (
            "tf_efficientnet_b1",
            {
                "params/stem_conv/kernel": "conv_stem.weight",
                "batch_stats/stem_norm/mean": "bn1.running_mean",
                "params/stage1_block2/depthwise/kernel": "blocks.0.1.conv_dw.weight",
                "params/stage1_block2/depthwise_norm/scale": "blocks.0.1.bn1.weight",
                "params/stage1_block2/project/kernel": "blocks.0.1.conv_pw.weight",
                "batch_stats/stage1_block2/project_norm/var": "blocks.0.1.bn2.running_var",
                "params/stage6_block1/expand/kernel": "blocks.5.0.conv_pw.weight",
                "params/stage6_block1/expand_norm/bias": "blocks.5.0.bn1.bias",
                "params/stage6_block1/depthwise/kernel": "blocks.5.0.conv_dw.weight",
                "params/stage6_block1/depthwise_norm/bias": "blocks.5.0.bn2.bias",
                "params/stage6_block1/squeeze_excite/reduce/kernel": "blocks.5.0.se.conv_reduce.weight",
                "params/stage6_block1/squeeze_excite/expand/bias": "blocks.5.0.se.conv_expand.bias",
                "params/stage6_block1/project/kernel": "blocks.5.0.conv_pwl.weight",
                "params/stage6_block1/project_norm/scale": "blocks.5.0.bn3.weight",
                "params/head_conv/kernel": "conv_head.weight",
                "batch_stats/head_norm/mean": "bn2.running_mean",
                "params/output/kernel": "classifier.weight",
            },
        ),
    ],
)
def test_names_of_tensors(name: str, pairs: dict[str, str]) -> None:
    tensors = state(name, 5)
    variables = from_timm(name, tensors)
    for ours, theirs in pairs.items():
        leaf, tensor = at(variables, ours), tensors[theirs]
        if tensor.ndim == 4:
            # kernel[y, x, input, output] is weight[output, input, y, x].
            tensor = np.einsum("oiyx->yxio", tensor).reshape(leaf.shape)
        elif tensor.ndim == 2:
            tensor = np.einsum("oi->io", tensor)
        np.testing.assert_array_equal(leaf, tensor, err_msg=ours)


def test_other_dtypes_and_names_with_a_tag(tmp_path: pathlib.Path) -> None:
    expected = from_timm("resnet18", STATE)
    lists = {**STATE, "fc.bias": STATE["fc.bias"].astype(np.float64).tolist()}
    jax.tree.map(np.testing.assert_array_equal, from_timm("resnet18.tv_in1k", lists), expected)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = {item: tensor.astype(dtype) for item, tensor in STATE.items()}
        safetensors_numpy.save_file(half, tmp_path / "half.safetensors")
        for file in (tmp_path / "half.safetensors", str(tmp_path / "half.safetensors")):
            read = from_timm("resnet18", file)
            assert {leaf.dtype for leaf in jax.tree.leaves(read)} == {np.dtype(np.float32)}
            np.testing.assert_array_equal(
                at(read, "params/output/kernel"), half["fc.weight"].T.astype(np.float32)
            )


@pytest.mark.parametrize(
    "name",
    some(
        ["tf_efficientnet_b0", "tf_efficientnet_b1", "resnet18", "resnet50"],
        ("tf_efficientnet_b0", "resnet18"),
    ),
)
def test_there_and_back_bit_for_bit(name: str) -> None:
    tensors = {item: tensor for item, tensor in state(name, 5).items() if tensor.ndim}
    variables = from_timm(name, tensors)
    actual = to_timm(f"{name}.of_ours", variables)
    assert actual.keys() == tensors.keys()
    for item, tensor in tensors.items():
        assert actual[item].dtype == np.float32 and actual[item].flags["C_CONTIGUOUS"]
        np.testing.assert_array_equal(actual[item], tensor, err_msg=item)
    jax.tree.map(np.testing.assert_array_equal, from_timm(name, actual), variables)


def test_variables_of_another_network() -> None:
    variables = from_timm("resnet18", STATE)
    problem = "are not those of resnet34: batch_stats/stage1_block3/norm1/mean is missing, but of"
    with rejected("these variables", ..., problem):
        to_timm("resnet34", variables)
    del variables["params"]["stem_conv"]
    with rejected("these variables", ..., "params/stem_conv/kernel is missing, but of shape"):
        to_timm("resnet18", variables)
    with rejected("timm's network 'vit'", ..., "cannot be read"):
        to_timm("vit", variables)


def test_other_networks() -> None:
    with rejected("timm's network 'resnet50d'", ..., "cannot be read", "use tf_efficientnet_b0, "):
        from_timm("resnet50d", STATE)
    with rejected("the state dict", ..., "lacks 80 tensor(s): "):
        from_timm("resnet34", STATE)
    remedy = "; did you mean tf_efficientnet_b0, which is padded differently?"
    with rejected("timm's network 'efficientnet_b0'", ..., "cannot be read", remedy):
        from_timm("efficientnet_b0", STATE)


SHAPE = (64, 3, 3, 3)


@pytest.mark.parametrize(
    "tensor, value, problem, remedy",
    [
        ("fc.bias", None, "lacks 1 tensor(s): fc.bias", ""),
        ("layer1.2.conv1.weight", np.zeros(1), "also has 1 tensor(s): layer1.2.conv1.w", ""),
        ("conv1.weight", np.zeros(SHAPE), f"has conv1.weight of shape {SHAPE}", "(64, 3, 7, 7)"),
        (
            "fc.bias",
            np.zeros(6),
            "has fc.weight of shape (5, 512)",
            "use shape (6, 512), as in resnet18",
        ),
        ("bn1.running_var", np.full(64, np.inf), "infinity in 1 tensor(s): bn1.running_var", ""),
        ("fc.bias", np.array(3.0), "has fc.bias of shape ()", "use shape (1000,), as in resnet18"),
    ],
)
def test_invalid_input(tensor: str, value: Any, problem: str, remedy: str) -> None:
    tensors = {item: value for item, value in {**STATE, tensor: value}.items() if value is not None}
    with rejected("the state dict", ..., problem, remedy):
        from_timm("resnet18", tensors)


def test_files_that_are_none(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "model.safetensors"
    with rejected(file, ..., "is missing"):
        from_timm("resnet18", file)
    safetensors_numpy.save_file(STATE, file)
    file.write_bytes(file.read_bytes()[:-5])
    with rejected(file, ..., "is not a complete safetensors file ("):
        from_timm("resnet18", file)
    safetensors_numpy.save_file({"fc.bias": np.zeros(3)}, file)
    with rejected(file, ..., "lacks 101 tensor(s): "):
        from_timm("resnet18", str(file))

"""Common properties of the image networks: parameter metadata, BatchNorm's fields, dtypes."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params

from lamb_tpu import models
from lamb_tpu.models.norm import BatchNorm
from lamb_tpu.models.resnet import ResNet
from lamb_tpu.optim import parameters
from tests.models import numpy_layers
from tests.raising import rejected

KEY = jax.random.key(0)
NAMES = ("davidnet", "efficientnet_b0", "efficientnet_b1", "resnet18", "resnet50")
IMAGE = jax.ShapeDtypeStruct((4, 32, 32, 3), jnp.float32)


@functools.cache
def shapes(name: str) -> Any:
    return jax.eval_shape(models.build(name).init, KEY, IMAGE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["resnet", "efficientnet", "all"])
def test_metadata_of_every_parameter(name: str, preset: str) -> None:
    tree = shapes(name)
    paths, leaves = parameters.leaf_paths(tree["params"]), jax.tree.leaves(tree["params"])
    # Norms are recognised by their running averages and by the number of axes, not by names.
    norms = {path.rpartition("/")[0] for path in parameters.leaf_paths(tree["batch_stats"])}
    of_norms = {path for path in paths if path.rpartition("/")[0] in norms}
    vectors = {path for path, leaf in zip(paths, leaves, strict=True) if leaf.ndim == 1}
    exempt = {"resnet": of_norms, "efficientnet": vectors, "all": set()}[preset]
    assert len(of_norms) == 2 * len(norms) and of_norms <= vectors
    # Only the output layer and squeeze-excite's two layers per block have a separate bias.
    biases = {"davidnet": 0, "efficientnet_b0": 2 * 16 + 1, "efficientnet_b1": 2 * 23 + 1}
    assert len(vectors - of_norms) == biases.get(name, 1)
    metadata = jax.tree.leaves(parameters.resolve(tree["params"], preset))
    for path, meta in zip(paths, metadata, strict=True):
        expected = parameters.ParameterMetadata(path not in exempt, path not in exempt)
        assert meta == expected, path


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "name, momentum, epsilon",
    [("davidnet", 0.9, 1e-5), ("efficientnet_b0", 0.99, 1e-3), ("resnet50", 0.9, 1e-5)],
)
def test_every_batch_norm_has_the_fields(
    name: str, momentum: float, epsilon: float, train: bool
) -> None:
    actual = []

    def record(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        norm = context.module
        if isinstance(norm, BatchNorm):
            assert norm.use_running_average is not train
            actual.append((norm.group_size, norm.axis_name, norm.momentum, norm.epsilon))
        return run(*args, **kwargs)

    def apply(module: nn.Module) -> None:
        jax.eval_shape(
            lambda v, x: module.apply(
                v, x, train=train, rngs={"dropout": KEY}, mutable="batch_stats"
            ),
            shapes(name),
            IMAGE,
        )

    with nn.intercept_methods(record):
        apply(models.MODULES[name]())
        defaults, actual = actual, []
        apply(models.MODULES[name](group_size=2, axis_name=(), momentum=0.5, epsilon=0.1))
    count = len(jax.tree.leaves(shapes(name)["batch_stats"])) // 2
    assert defaults == [(None, None, momentum, epsilon)] * count
    assert actual == [(2, (), 0.5, 0.1)] * count


def products(jaxpr: Jaxpr) -> list[tuple[str, set[Any]]]:
    """Returns the operation and operand dtypes of each convolution and matrix product."""
    actual = []
    for equation in jaxpr.eqns:
        kind = equation.primitive.name
        if kind in ("conv_general_dilated", "dot_general"):
            actual.append((kind, {operand.aval.dtype for operand in equation.invars}))
        for inner in jaxprs_in_params(equation.params):
            actual += products(inner)
    return actual


@pytest.mark.parametrize("name", ["davidnet", "efficientnet_b0", "resnet50"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(name: str, dtype: str) -> None:
    model = models.build(name, dtype=dtype)
    key = jax.eval_shape(lambda: KEY)
    variables = jax.eval_shape(model.init, key, IMAGE)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {np.dtype("float32")}
    jaxpr, (logits, state) = jax.make_jaxpr(
        lambda v, x, key: model.apply(v, x, train=True, key=key), return_shape=True
    )(variables, IMAGE, key)
    assert {leaf.dtype for leaf in jax.tree.leaves((logits, state))} == {np.dtype("float32")}
    assert logits.shape[0] == 4
    *within, output = products(jaxpr.jaxpr)
    assert {kind for kind, _ in within} >= {"conv_general_dilated"}
    assert all(dtypes == {jnp.dtype(dtype)} for _, dtypes in within)
    assert output == ("dot_general", {np.dtype("float32")})


class Small(ResNet):
    blocks, bottleneck = (1,), True


def test_bfloat16_computes_the_same_network() -> None:
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32)
    variables = numpy_layers.variables(Small(), x)
    exact, near = (
        jax.jit(lambda v, x, dtype=dtype: Small(dtype=dtype).apply(v, x, train=False))(variables, x)
        for dtype in ("float32", "bfloat16")
    )
    assert 1e-4 < np.abs(near - exact).max() / np.std(exact) < 0.1


@pytest.mark.parametrize("name", ["davidnet", "efficientnet_b3", "resnet34"])
def test_unknown_dtype(name: str) -> None:
    with rejected("config.model.dtype", "float16", "is unknown"):
        models.build(name, dtype="float16")

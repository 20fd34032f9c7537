"""Models that are built by name, and Linen modules that are adapted to `init` and `apply`."""

import re
import sys
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import models
from tests.raising import rejected


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("lennet", {}, ("config.model.name", "lennet", "is unknown", "use bert, davidnet, ")),
        ("mlp", {"depth": 3}, ("config.model.depth", ..., "is unknown")),
        ("mlp", {"parent": None}, ("config.model.parent", ..., "is unknown")),
        ("lenet", {"group_size": 8}, ("config.model.group_size", ..., "is unknown")),
        ("bert", {"layers": 3}, ("config.model.layers", ..., "is unknown")),
        ("bert", {"num_layers": 0}, ("config.model.num_layers", 0, "is out of range")),
        ("mlp", {"num_classes": 2.0}, ("config.model.num_classes", 2.0, "has the wrong type")),
    ],
)
def test_errors(name: str, fields: dict[str, Any], message: tuple[Any, ...]) -> None:
    with rejected(*message):
        models.build(name, **fields)


def test_the_mesh_axes_are_no_field_of_a_config() -> None:
    config = {"name": "mlp", "axis_name": ("data",)}
    with rejected("config.model.axis_name", ..., "is unknown") as caught:
        models.batch_norm_groups(config, 64, 8)
    assert "axis_name" not in str(caught.value).partition("known:")[2]


@pytest.mark.parametrize(
    "name", [name for name in models.MODULES if not re.search("_b[1-7]|resnet(34|101|152)", name)]
)
def test_a_model_takes_axes_whether_or_not_it_needs_them(name: str) -> None:
    model = models.build(name, axis_name=("data",))
    inputs = jax.ShapeDtypeStruct((1, 32, 32, 1), jnp.float32)
    if name == "bert":
        tokens = jax.ShapeDtypeStruct((1, 7), jnp.int32)
        inputs = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), tokens)
    if name == "lstm_lm":
        inputs = {"inputs": jax.ShapeDtypeStruct((1, 7), jnp.int32)}
    if name == "gnmt":
        tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 7), (1,)))
        inputs = {"source_ids": tokens, "source_length": length, "target_ids": tokens}
    assert "params" in jax.eval_shape(model.init, jax.random.key(0), inputs)


def test_limits_of_a_model_that_reads_text() -> None:
    model = models.build("bert", **ConfigDict({"vocab_size": 99, "max_positions": 77}))
    assert (model.vocab_size, model.max_positions) == (99, 77)
    assert models.build("mlp").vocab_size is models.build("mlp").max_positions is None
    assert models.build("bert").stacked is models.build("mlp").stacked is None
    assert re.search(models.build("bert", scan_layers=True).stacked, "encoder/layers/output/bias")
    assert models.batch_norm_groups(ConfigDict({"name": "bert"}), 64, 8) == (1, "")


def test_a_model_that_writes_tells_how() -> None:
    model = models.build("gnmt", vocab_size=99)
    assert model.vocab_size == 99 and model.decode is not None
    assert models.build("bert").decode is models.build("mlp").decode is None


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"name": "lenet"}, (1, "")),
        ({"name": "mlp"}, (1, "")),
        (
            {"name": "mlp", "batch_norm": True, "group_size": 16},
            (2, "BatchNorm: groups of 16 examples, 4 in a forward pass, 2 device(s) each"),
        ),
    ],
)
def test_groups_of_a_config(config: dict[str, Any], expected: tuple[int, str]) -> None:
    assert models.batch_norm_groups(ConfigDict(config), 64, 8) == expected
    assert models.batch_norm_groups(config, 64, 8) == expected


def test_groups_of_a_config_that_do_not_fit() -> None:
    config = {"name": "mlp", "batch_norm": True, "group_size": 12}
    with rejected("group_size", 12, "does not fit the batch of 64 examples,", "use 8 or 16"):
        models.batch_norm_groups(config, 64, 8)


def test_a_custom_network_gets_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grouped(nn.Module):
        group_size: int | None = None
        axis_name: tuple[str, ...] | None = None

        @nn.compact
        def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
            return inputs

    given = []

    def functions(width: int = 3, axis_name: tuple[str, ...] | None = None) -> models.Model:
        given.append(axis_name)
        return models.Model(lambda key, x: {"params": {}}, lambda *a, **k: (0, {}), width)

    module = types.ModuleType("my_networks")
    module.Grouped, module.functions = Grouped, functions
    monkeypatch.setitem(sys.modules, "my_networks", module)
    assert models.build("my_networks:functions", ("data",), width=5).vocab_size == 5
    models.build("my_networks:functions")
    assert given == [("data",), None]
    assert set(models.MODULES.fields("my_networks:functions")) == {"width"}
    assert set(models.MODULES.fields("my_networks:Grouped")) == {"group_size"}
    config = {"name": "my_networks:Grouped", "group_size": 16}
    assert models.batch_norm_groups(config, 64, 8)[0] == 2
    assert models.batch_norm_groups({"name": "my_networks:functions"}, 64, 8) == (1, "")


@pytest.mark.parametrize("batch_norm", [False, True])
def test_moments_are_written_if_their_collection_exists(batch_norm: bool) -> None:
    model = models.build("mlp", hidden_sizes=(3, 2), batch_norm=batch_norm)
    x = jax.random.normal(jax.random.key(0), (4, 5))
    variables = model.init(jax.random.key(0), x)
    assert "batch_moments" not in variables
    state = model.apply({**variables, "batch_moments": {}}, x, train=True)[1]
    moments = state.get("batch_moments", {})
    if not batch_norm:
        assert not moments
        return
    hidden = x @ variables["params"]["hidden0"]["kernel"]
    np.testing.assert_allclose(moments["norm0"]["mean"], np.mean(hidden, 0), rtol=1e-5)
    np.testing.assert_allclose(moments["norm0"]["var"], np.var(hidden, 0), rtol=1e-5)
    assert moments["norm1"]["momentum"] == np.float32(0.99)
    # The running averages change in the same way as without the collection 'batch_moments'.
    _, without = model.apply(variables, x, train=True)
    assert set(without) == {"batch_stats"}
    jax.tree.map(np.testing.assert_array_equal, state["batch_stats"], without["batch_stats"])
    # Evaluation writes no moments.
    assert not model.apply({**variables, "batch_moments": {}}, x, train=False)[1]["batch_moments"]


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
    np.testing.assert_allclose(
        jax.tree.leaves(state), [[1.0], [1.0]]
    )  # (0 + 2) / 2 and (1 + 1) / 2
    outputs, unchanged = model.apply(variables, x, train=False)
    np.testing.assert_allclose(outputs, x, atol=1e-4)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a is b, unchanged["batch_stats"], variables["batch_stats"])
    )

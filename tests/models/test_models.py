"""Models by name, and Linen modules as two functions."""

import re
import sys
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from lamb_tpu import models
from lamb_tpu.errors import UserError
from tests.quick import jit


@pytest.mark.parametrize(
    "name, fields, message",
    [
        (
            "lennet",
            {},
            "config.model.name is 'lennet'; known models: bert, dav.*row_lstm, and "
            "'package.module:Name' for your own$",
        ),
        ("mlp", {"depth": 3}, "config.model.depth is not a field .*; known: num_classes, "),
        ("mlp", {"parent": None}, "config.model.parent is not a field"),
        ("lenet", {"group_size": 8}, "config.model.group_size is not a field .*: num_classes, "),
        ("bert", {"layers": 3}, "config.model.layers is not a field .*; known: hidden_size, "),
        ("bert", {"num_layers": 0}, "config.model.num_layers is 0; it must be a whole number"),
        ("mlp", {"num_classes": 2.0}, "config.model.num_classes is 2.0; it must be a whole number"),
    ],
)
def test_mistakes(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        models.build(name, **fields)


def test_the_mesh_axes_are_no_field_of_a_config() -> None:
    config = {"name": "mlp", "axis_name": ("data",)}
    with pytest.raises(UserError, match="model.axis_name is not a field .*; known: ") as caught:
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


def test_a_model_of_text_tells_what_it_reads() -> None:
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


@pytest.mark.long
def test_batch_norm_inside_shard_map_needs_the_axes() -> None:
    x = jax.random.normal(jax.random.key(0), (8, 4))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def logits(axis_name: tuple[str, ...]) -> jax.Array:
        model = models.build("mlp", axis_name, batch_norm=True)
        variables = model.init(jax.random.key(0), x)

        def apply(x: jax.Array) -> jax.Array:
            return model.apply(variables, x, train=True)[0]

        run = jax.shard_map(apply, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jit(run)(x)

    assert np.std(logits(("data",))) > 0.01  # of one example each, everything would be 0
    with pytest.raises(ValueError, match="set axis_name to the axes that split the batch"):
        logits(())


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
    with pytest.raises(ValueError, match="group_size is 12, .*; 8 or 16 would"):
        models.batch_norm_groups(config, 64, 8)


def test_a_network_of_ones_own_gets_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert set(models.own_fields("my_networks:functions")) == {"width"}
    assert set(models.own_fields("my_networks:Grouped")) == {"group_size"}
    config = {"name": "my_networks:Grouped", "group_size": 16}
    assert models.batch_norm_groups(config, 64, 8)[0] == 2
    assert models.batch_norm_groups({"name": "my_networks:functions"}, 64, 8) == (1, "")


@pytest.mark.parametrize("batch_norm", [False, True])
def test_moments_are_told_where_their_collection_is_given(batch_norm: bool) -> None:
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
    # The running averages move as they do without.
    _, without = model.apply(variables, x, train=True)
    assert set(without) == {"batch_stats"}
    jax.tree.map(np.testing.assert_array_equal, state["batch_stats"], without["batch_stats"])
    # In evaluation there is nothing to tell.
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
    np.testing.assert_allclose(jax.tree.leaves(state), [[1.0], [1.0]])  # half of mean 2, var 1
    outputs, unchanged = model.apply(variables, x, train=False)
    np.testing.assert_allclose(outputs, x, atol=1e-4)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a is b, unchanged["batch_stats"], variables["batch_stats"])
    )

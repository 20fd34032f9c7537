"""Tests that named rules match the biases and norms of small networks in each library."""

import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from lamb_tpu import optim
from lamb_tpu.optim import parameters
from tests.shared import ROOT

KEY = jax.random.key(0)


class EquinoxNet(eqx.Module):
    conv: eqx.nn.Conv2d
    bn1: eqx.nn.BatchNorm
    norm: eqx.nn.LayerNorm
    layer_norm: eqx.nn.LayerNorm
    group_norm: eqx.nn.GroupNorm
    ln_f: eqx.nn.RMSNorm
    mlp: eqx.nn.MLP
    lstm: eqx.nn.LSTMCell
    gru: eqx.nn.GRUCell
    attention: eqx.nn.MultiheadAttention
    embedding: eqx.nn.Embedding


def equinox_net():
    net, _ = eqx.nn.make_with_state(EquinoxNet)(
        eqx.nn.Conv2d(3, 4, 3, key=KEY),
        eqx.nn.BatchNorm(4, "batch", mode="batch"),
        eqx.nn.LayerNorm(4),
        eqx.nn.LayerNorm(4),
        eqx.nn.GroupNorm(2, 4),
        eqx.nn.RMSNorm(4),
        eqx.nn.MLP(4, 4, 4, 1, key=KEY),
        eqx.nn.LSTMCell(4, 4, key=KEY),
        eqx.nn.GRUCell(4, 4, key=KEY),
        eqx.nn.MultiheadAttention(2, 4, use_query_bias=True, key=KEY),
        eqx.nn.Embedding(5, 4, key=KEY),
    )
    return eqx.filter(net, eqx.is_inexact_array)


def haiku_net():
    def forward(images, tokens):
        x = hk.Conv2D(4, 3)(images)
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        x = hk.InstanceNorm(True, True)(hk.GroupNorm(2)(x)).mean((1, 2))
        x = hk.nets.MLP([4, 4])(hk.RMSNorm(-1)(hk.LayerNorm(-1, True, True)(x)))
        initial = hk.initializers.RandomNormal()
        tokens = hk.Embed(5, 4)(tokens)
        tokens = hk.MultiHeadAttention(2, 2, w_init=initial)(tokens, tokens, tokens)
        lstm, gru = hk.LSTM(4), hk.GRU(4)
        image = jnp.ones((2, 32, 32, 3))
        small = hk.nets.ResNet([1, 1, 1, 1], 3, bottleneck=False, channels_per_group=[4] * 4)
        return (
            tokens,
            lstm(x, lstm.initial_state(2)),
            gru(x, gru.initial_state(2)),
            small(image, is_training=True),
        )

    net = hk.transform_with_state(forward)
    return jax.eval_shape(net.init, KEY, jnp.ones((2, 8, 8, 3)), jnp.zeros((2, 3), int))[0]


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(4, rngs=rngs)
        self.gn = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.rms = nnx.RMSNorm(4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(2, 4, rngs=rngs, decode=False)
        self.lstm = nnx.LSTMCell(4, 4, rngs=rngs)
        self.embed = nnx.Embed(5, 4, rngs=rngs)


def nnx_net():
    return nnx.state(NnxNet(nnx.Rngs(0)), nnx.Param)


def gpt2():
    """Returns parameters with the names in GPT-2's published code, openai/gpt-2 src/model.py."""
    matrix, vector = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (4,)))
    norm, conv = {"g": vector, "b": vector}, {"w": matrix, "b": vector}
    return {
        "model": {
            "wpe": matrix,
            "wte": matrix,
            "ln_f": norm,
            "h0": {
                "ln_1": norm,
                "ln_2": norm,
                "attn": {"c_attn": conv, "c_proj": conv},
                "mlp": {"c_fc": conv, "c_proj": conv},
            },
        }
    }


NETS = {"equinox": equinox_net, "haiku": haiku_net, "nnx": nnx_net, "gpt2": gpt2}
# Leaves that are matrices, filters or embeddings; all others are biases and norms.
MATRICES = {
    "equinox": (
        "conv/weight",
        "layers/0/weight",
        "layers/1/weight",
        "_ih",
        "_hh",
        "proj/weight",
        "embedding/weight",
    ),
    "haiku": ("/w", "/w_h", "/w_i", "/embeddings"),
    "nnx": ("/kernel/value", "/embedding/value"),
    "gpt2": ("/w", "wpe", "wte"),
}
# Names of the modules that are norms; their leaves are among the biases and norms.
NORMS = ("norm", "bn", "gn", "rms", "ln_")


@pytest.mark.long
@pytest.mark.parametrize("library", NETS)
@pytest.mark.parametrize("rules", parameters.RULES)
def test_biases_and_norms_of_each_library_match(library, rules):
    params = NETS[library]()
    paths = parameters.leaf_paths(params)
    metadata = dict(zip(paths, jax.tree.leaves(parameters.resolve(params, rules)), strict=True))
    others = {path for path in paths if not path.endswith(MATRICES[library])}
    norms = {
        path
        for path in others
        if any(name in part for name in NORMS for part in path.split("/")[:-1])
    }
    assert others - norms and norms and set(paths) - others
    exempt = {
        "all": set(),
        "resnet": norms,
        "lstm": {
            path
            for path in others
            if path.removesuffix("/value").rsplit("/")[-1] in ("bias", "bias_n", "b")
        },
    }.get(rules, others)
    assert {path for path in paths if not metadata[path].decay} == exempt


def test_a_norm_that_a_list_holds_has_no_name():
    net = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=KEY), eqx.nn.LayerNorm(4)])
    params = eqx.filter(net, eqx.is_inexact_array)
    metadata = parameters.resolve(params, "no_bias_no_norm")
    paths = dict(zip(parameters.leaf_paths(params), jax.tree.leaves(metadata), strict=True))
    assert paths["layers/1/weight"].decay and not paths["layers/1/bias"].decay


# Two updates of one linear layer; each function returns {'kernel': ..., 'bias': ...}.
def linen_updates(tx, kernel):
    layer = linen.Dense(2)
    params = {"params": {"kernel": kernel, "bias": jnp.zeros(2)}}
    state = tx.init(params)
    for _ in range(2):
        grads = jax.grad(lambda params: jnp.sum(layer.apply(params, INPUTS) ** 3))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params["params"]


def nnx_updates(tx, kernel):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model.kernel[...] = kernel
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.grad(lambda model: jnp.sum(model(INPUTS) ** 3))(model))
    return {"kernel": model.kernel[...], "bias": model.bias[...]}


def equinox_updates(tx, kernel):
    model = eqx.nn.Linear(3, 2, key=KEY)
    model = eqx.tree_at(lambda m: (m.weight, m.bias), model, (kernel.T, jnp.zeros(2)))
    state = tx.init(model)
    for _ in range(2):
        grads = eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(INPUTS) ** 3))(model)
        updates, state = tx.update(grads, state, model)
        model = eqx.apply_updates(model, updates)
    return {"kernel": model.weight.T, "bias": model.bias}


def haiku_updates(tx, kernel):
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
    params = {"linear": {"w": kernel, "b": jnp.zeros(2)}}
    state = tx.init(params)
    for _ in range(2):
        grads = jax.grad(lambda params: jnp.sum(net.apply(params, INPUTS) ** 3))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return {"kernel": params["linear"]["w"], "bias": params["linear"]["b"]}


INPUTS = jnp.arange(12.0).reshape(4, 3) / 12
UPDATES = [linen_updates, nnx_updates, equinox_updates, haiku_updates]


@pytest.mark.parametrize("updated", UPDATES)
def test_the_readme_example_in_each_library(updated):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    kernel = jnp.array([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.6]])
    actual, expected = updated(names["tx"], kernel), linen_updates(names["tx"], kernel)
    assert not np.allclose(expected["kernel"], kernel)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", ["bias$", "bias/value$", "^bias", "bias(/value)?$"])
def test_a_rule_of_a_bias_under_nnx(rule):
    kernel = jnp.array([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.6]])
    tx = optim.lamb(0.1, weight_decay=0.5, rules=[(rule, {"adapt": False}), ("", {})])
    expected = linen_updates(
        optim.lamb(0.1, weight_decay=0.5, rules=[("bias", {"adapt": False}), ("", {})]), kernel
    )
    for name, value in nnx_updates(tx, kernel).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7)


def test_modules_of_agvm_under_nnx():
    tx = optim.agvm(optim.lamb(0.1), ["^kernel$", "^bias$"], interval=1, start=0)
    assert tx.init(nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)) is not None

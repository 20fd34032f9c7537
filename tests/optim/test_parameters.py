"""The table of facts: matching, errors, trees of every kind, and its text."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

from lamb_tpu import optim
from lamb_tpu.optim.parameters import (
    RULES,
    ParameterFacts,
    check_rules,
    leaf_paths,
    resolve,
    table,
)

NONE = ParameterFacts(decay=False, adapt=False)
Pair = collections.namedtuple("Pair", ["kernel", "bias"])
SHAPE = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def test_the_first_match_decides():
    params = {"encoder": {"kernel": SHAPE, "bias": SHAPE}, "head": {"bias": SHAPE}}
    facts = resolve(params, [("^head/", ParameterFacts()), ("bias$", NONE), ("", {"decay": False})])
    assert facts == {
        "encoder": {"kernel": ParameterFacts(decay=False), "bias": NONE},
        "head": {"bias": ParameterFacts()},
    }


@pytest.mark.parametrize("tree", [
    {"kernel": SHAPE, "bias": SHAPE},
    freeze({"kernel": SHAPE, "bias": SHAPE}),
    {"a": Pair(SHAPE, SHAPE)},
    [{"kernel": jnp.ones(2)}, ({"bias": jnp.ones(2)},)],
    {"kernel": 1.0, "bias": 2.0, "absent": None},
])
def test_trees_of_every_kind(tree):
    facts = resolve(tree, "no_bias_no_norm")
    assert jax.tree.structure(facts) == jax.tree.structure(tree)
    names = [path.split("/")[-1] for path in leaf_paths(tree)]
    assert dict(zip(names, jax.tree.leaves(facts), strict=True)) == {
        "kernel": ParameterFacts(), "bias": NONE
    }


def test_nnx_state():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.LayerNorm(3, rngs=rngs)

    state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    facts = resolve(state, "no_bias_no_norm")
    assert jax.tree.leaves(facts) == [NONE, ParameterFacts(), NONE, NONE]
    assert "dense/kernel/value" in table(state, "no_bias_no_norm")


def test_the_preset_tells_a_bias_from_a_name_that_holds_one():
    names = ["bias", "scale", "debias/kernel", "scaled/kernel", "bias/kernel"]
    facts = resolve(dict.fromkeys(names, SHAPE), "no_bias_no_norm")
    assert [name for name in names if facts[name] == NONE] == ["bias", "scale"]


def test_a_bare_leaf_and_an_empty_tree():
    assert resolve(jnp.ones(2), "all") == ParameterFacts()
    assert resolve({}, [("bias", NONE)]) == {}
    assert resolve({}, []) == {}


@pytest.mark.parametrize("rules, message", [
    ([("bias", NONE)], "no rule matches the parameter 'dense/kernel'"),
    ([], "no rule matches the parameter 'dense/bias'"),
    ([("beta", NONE), ("", NONE)],
     "the rule 'beta' matches no parameter; the paths are dense/bias, dense/kernel"),
    ([("", {"layer_axes": (0, 2)})],
     r"layer_axes \(0, 2\) do not exist in the parameter 'dense/bias', which has 2 axes"),
])
def test_rules_that_do_not_fit_the_parameters(rules, message):
    with pytest.raises(ValueError, match=message):
        resolve({"dense": {"kernel": SHAPE, "bias": SHAPE}}, rules)


def test_a_rule_that_never_decides():
    tree = {"dense": {"kernel": SHAPE, "bias": SHAPE}, "norm": {"scale": SHAPE}}
    rules = [("bias$|scale$", NONE), ("^dense/bias", {}), ("", {})]
    with pytest.raises(ValueError, match=(
        r"the rule '\^dense/bias' decides nothing: .* as 'bias\$\|scale\$' takes 'dense/bias'"
    )):
        resolve(tree, rules)
    with pytest.raises(ValueError, match="the rule '.' decides nothing"):
        resolve(tree, [("", {}), (".", NONE), ("kernel", {})])
    # The narrower first, the same two rules decide; and a last one may be there for what is left.
    assert resolve(tree, [rules[1], rules[0], rules[2]])["dense"]["bias"] == ParameterFacts()
    assert resolve(tree, [("dense|norm", NONE), (".*", {})])["norm"]["scale"] == NONE


@pytest.mark.parametrize("params, rules", [
    ({"0": SHAPE, "beta": SHAPE}, [("", {}), ("", NONE)]),
    ({}, [("bias", NONE), ("kernel", {}), ("bias", {})]),
])
def test_a_rule_given_twice(params, rules):
    with pytest.raises(ValueError, match=f"the rule '{rules[0][0]}' is given twice"):
        resolve(params, rules)


# Paths as Flax's modules have them, in ResNet, EfficientNet, BERT and LSTM code.
NAMES = [
    "conv_init/kernel", "bn_init/scale", "bn_init/bias", "ResNetBlock_0/BatchNorm_1/bias",
    "ResNetBlock_0/norm_proj/scale", "ResNetBlock_0/bn3/bias", "se/Dense_0/bias", "head/bias",
    "batch_normalization/gamma", "batch_normalization/beta", "embeddings/LayerNorm/bias",
    "layer_0/attention/query/bias", "layer_0/layer_norm/scale", "layer_0/attention/query/kernel",
    "word_embeddings/embedding", "LSTMCell_0/hf/bias", "LSTMCell_0/hf/kernel", "subnet/kernel",
]
NORMS = {name for name in NAMES if "orm" in name or "/bn" in name or name.startswith("bn")}
BIASES = {name for name in NAMES if name.endswith("/bias")}


# Of each preset: what does not decay, and whether that adapts.
PRESETS = {
    "all": (set(), True),
    "no_bias_no_norm": (NORMS | BIASES, False),
    "no_bias_no_norm_decay": (NORMS | BIASES, True),
    "bert": (NORMS | BIASES, False),
    "resnet": (NORMS, False),
    "efficientnet": (NORMS | BIASES, False),
    "lstm": (BIASES, False),
}


@pytest.mark.parametrize("suffix", ["", "/value"])
@pytest.mark.parametrize("preset", RULES)
def test_presets(preset, suffix):
    exempt, adapt = PRESETS[preset]
    facts = resolve({name + suffix: SHAPE for name in NAMES}, preset)
    assert {name for name in NAMES if not facts[name + suffix].decay} == exempt
    assert {name for name in NAMES if not facts[name + suffix].adapt} == (
        set() if adapt else exempt)


def test_a_preset_may_match_nothing():
    assert resolve({"kernel": SHAPE}, "no_bias_no_norm") == {"kernel": ParameterFacts()}


@pytest.mark.parametrize("rules, message", [
    ("default", "'default' is no preset; the presets are all, no_bias_no_norm"),
    ({"bias": NONE}, "rules must be a preset's name or a list"),
    (None, "rules must be a preset's name or a list"),
    ([("bias",)], r"a rule must be a pair \(regex, facts\), not \('bias',\)"),
    (["bias"], "a rule must be a pair"),
    ([("(", NONE)], r"the rule '\(' is no regular expression"),
    ([("bias", {"decays": False})], "unknown fact 'decays'; known: decay, adapt, layer_axes, rate"),
    ([("bias", False)], "the facts of the rule 'bias' must be a mapping"),
    ([("bias", {"decay": 0.1})], "decay must be True or False, not 0.1"),
    ([("bias", {"layer_axes": (-1,)})], r"layer_axes must be distinct axes counted from 0"),
    ([("bias", {"layer_axes": (1, 1)})], r"layer_axes must be distinct axes counted from 0"),
    ([("bias", {"layer_axes": 0})], "layer_axes must be distinct axes counted from 0, not 0"),
    ([("bias", {"rate_factor": -0.5})], "rate_factor must be a finite number .* not -0.5"),
    ([("bias", {"rate_factor": True})], "rate_factor must be a finite number .* not True"),
    ([("bias", {"rate_factor": "0.5"})], "rate_factor must be a finite number .* not '0.5'"),
    ([("bias", {"decay_factor": float("inf")})], "decay_factor must be a finite number .* not inf"),
    ([("bias", {"decay_factor": float("nan")})], "decay_factor must be a finite number .* not nan"),
    ([("bias", {"decay": False, "decay_factor": 0.5})],
     "decay_factor 0.5 has no meaning for what does not decay"),
])
def test_rules_that_are_no_rules(rules, message):
    with pytest.raises(ValueError, match=message):
        check_rules(rules)


def test_the_table_is_the_same_for_arrays_and_shapes_in_any_order():
    rules = [("bias", NONE), ("", {"layer_axes": [0]})]
    arrays = {"b": {"bias": jnp.ones(3)}, "a": jnp.ones((2, 3), jnp.bfloat16)}
    shapes = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
              "b": {"bias": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    assert table(arrays, rules) == table(shapes, rules) == "\n".join([
        "path    shape  dtype     count  decay  adapt  layer axes",
        "a       (2,3)  bfloat16      6  yes    yes    (0)",
        "b/bias  (3)    float32       3  no     no     -",
        "total: 2 leaves, 9 values; decay: 1 leaf, 6 values; adapt: 1 leaf, 6 values",
    ])


def test_factors_are_shown_where_not_all_are_one():
    params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
    plain = table(params, [("a", {"rate_factor": 1}), ("", {"decay_factor": 1.0})])
    assert plain == table(params, "all")
    shown = table(params, [("a", {"rate_factor": 0.8**3}), ("b", {"decay": False}),
                           ("", {"rate_factor": 0, "decay_factor": 2})])
    assert shown.splitlines()[0].endswith("layer axes  rate factor  decay factor")
    assert [line.split()[-2:] for line in shown.splitlines()[1:4]] == [
        ["0.512", "1"], ["1", "1"], ["0", "2"]]
    only = table(params, [("a", {"decay_factor": 0.5}), ("", {})])
    assert "decay factor" in only and "rate factor" not in only


TREE = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "head": jnp.ones(2)}


def in_parts(labels, rules):
    """An update of `TREE` in two parts, which one list of rules serves."""
    tx = optax.partition({
        "slow": optim.lamb(0.1, rules=rules),
        "fast": optim.make_optimizer({"name": "adamw", "rules": rules}, 0.1),
    }, labels)
    return jax.jit(tx.update)(TREE, tx.init(TREE), TREE)


@pytest.mark.parametrize("labels", [
    {"dense": {"kernel": "slow", "bias": "slow"}, "head": "fast"},
    {"dense": {"kernel": "slow", "bias": "fast"}, "head": "fast"},
    {"dense": "slow", "head": "fast"},
])
def test_a_rule_for_nothing_is_told_inside_a_partition(labels):
    typo = [("baas$", NONE), ("head", NONE), ("", {})]
    with pytest.warns(UserWarning, match="the rule 'baas\\$' matches no parameter; .* hidden here"):
        in_parts(labels, typo)
    with pytest.warns(UserWarning, match="the rule 'baas\\$' matches no parameter"):
        optax.masked(optim.lamb(0.1, rules=typo), {"dense": True, "head": False}).init(TREE)
    with pytest.raises(ValueError, match="the rule 'baas\\$' matches no parameter"):
        optim.lamb(0.1, rules=typo).init(TREE)


@pytest.mark.parametrize("labels", [
    {"dense": {"kernel": "slow", "bias": "slow"}, "head": "fast"},
    {"dense": {"kernel": "slow", "bias": "fast"}, "head": "fast"},
])
@pytest.mark.parametrize("rules", [
    [("bias$", NONE), ("kernel$", {"rate_factor": 0.5}), ("head", NONE)],
    [("^head", NONE), ("dense/", {})],
])
def test_a_rule_for_the_other_part_is_no_mistake(labels, rules):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_parts(labels, rules)


def test_one_list_serves_the_parts_of_a_partition():
    """A rule may match nothing where the leaves that it is for are hidden."""
    rules = [("bias$", {"decay": False, "adapt": False}), ("", {})]
    params = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "head": jnp.ones(2)}
    tx = optax.partition(
        {"slow": optim.lamb(0.1, rules=rules), "fast": optim.lamb(0.2, rules=rules)},
        {"dense": {"kernel": "slow", "bias": "slow"}, "head": "fast"},
    )
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(optax.tree.norm(updates["head"]), 0.2 * 2**0.5, rtol=1e-5)

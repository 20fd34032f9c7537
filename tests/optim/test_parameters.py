"""Tests parameter metadata: matching of rules, errors, all types of trees, and the table."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze

from lamb_tpu import optim
from lamb_tpu.optim.parameters import (
    RULES,
    ParameterMetadata,
    check_rules,
    leaf_paths,
    resolve,
    table,
)

NONE = ParameterMetadata(decay=False, adapt=False)
Pair = collections.namedtuple("Pair", ["kernel", "bias"])
SHAPE = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def test_the_first_match_decides():
    params = {"encoder": {"kernel": SHAPE, "bias": SHAPE}, "head": {"bias": SHAPE}}
    metadata = resolve(
        params, [("^head/", ParameterMetadata()), ("bias$", NONE), ("", {"decay": False})]
    )
    assert metadata == {
        "encoder": {"kernel": ParameterMetadata(decay=False), "bias": NONE},
        "head": {"bias": ParameterMetadata()},
    }


@pytest.mark.parametrize(
    "tree",
    [
        {"kernel": SHAPE, "bias": SHAPE},
        freeze({"kernel": SHAPE, "bias": SHAPE}),
        {"a": Pair(SHAPE, SHAPE)},
        [{"kernel": jnp.ones(2)}, ({"bias": jnp.ones(2)},)],
        {"kernel": 1.0, "bias": 2.0, "absent": None},
    ],
)
def test_trees_of_every_type(tree):
    metadata = resolve(tree, "no_bias_no_norm")
    assert jax.tree.structure(metadata) == jax.tree.structure(tree)
    names = [path.split("/")[-1] for path in leaf_paths(tree)]
    assert dict(zip(names, jax.tree.leaves(metadata), strict=True)) == {
        "kernel": ParameterMetadata(),
        "bias": NONE,
    }


def test_nnx_state():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 3, rngs=rngs)
            self.norm = nnx.LayerNorm(3, rngs=rngs)

    state = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    metadata = resolve(state, "no_bias_no_norm")
    assert jax.tree.leaves(metadata) == [NONE, ParameterMetadata(), NONE, NONE]
    assert "dense/kernel/value" in table(state, "no_bias_no_norm")


def test_named_rules_distinguish_a_bias_from_a_name_that_contains_it():
    names = ["bias", "scale", "debias/kernel", "scaled/kernel", "bias/kernel"]
    metadata = resolve(dict.fromkeys(names, SHAPE), "no_bias_no_norm")
    assert [name for name in names if metadata[name] == NONE] == ["bias", "scale"]


def test_a_bare_leaf_and_an_empty_tree():
    assert resolve(jnp.ones(2), "all") == ParameterMetadata()
    assert resolve({}, [("bias", NONE)]) == {}
    assert resolve({}, []) == {}


@pytest.mark.parametrize(
    "rules, message",
    [
        ([("bias", NONE)], "no rule matches the parameter 'dense/kernel'"),
        ([], "no rule matches the parameter 'dense/bias'"),
        (
            [("beta", NONE), ("", NONE)],
            "the rule 'beta' matches no parameter; the paths are dense/bias, dense/kernel",
        ),
        (
            [("", {"layer_axes": (0, 2)})],
            r"layer_axes=\(0, 2\) must be axes of the parameter 'dense/bias'; its number of axes is 2",
        ),
    ],
)
def test_rules_that_do_not_fit_the_parameters(rules, message):
    with pytest.raises(ValueError, match=message):
        resolve({"dense": {"kernel": SHAPE, "bias": SHAPE}}, rules)


def test_a_rule_that_never_decides():
    tree = {"dense": {"kernel": SHAPE, "bias": SHAPE}, "norm": {"scale": SHAPE}}
    rules = [("bias$|scale$", NONE), ("^dense/bias", {}), ("", {})]
    with pytest.raises(
        ValueError,
        match=(
            r"the rule '\^dense/bias' has no effect: .* for example, 'bias\$\|scale\$' matches "
            "'dense/bias'"
        ),
    ):
        resolve(tree, rules)
    with pytest.raises(ValueError, match="the rule '.' has no effect"):
        resolve(tree, [("", {}), (".", NONE), ("kernel", {})])
    # In the opposite order both rules decide for leaves, and a last catch-all rule may decide for none.
    assert resolve(tree, [rules[1], rules[0], rules[2]])["dense"]["bias"] == ParameterMetadata()
    assert resolve(tree, [("dense|norm", NONE), (".*", {})])["norm"]["scale"] == NONE


@pytest.mark.parametrize(
    "params, rules",
    [
        ({"0": SHAPE, "beta": SHAPE}, [("", {}), ("", NONE)]),
        ({}, [("bias", NONE), ("kernel", {}), ("bias", {})]),
    ],
)
def test_a_rule_given_twice(params, rules):
    with pytest.raises(ValueError, match=f"the rule '{rules[0][0]}' is given twice"):
        resolve(params, rules)


# Paths of Flax modules in ResNet, EfficientNet, BERT and LSTM code.
NAMES = [
    "conv_init/kernel",
    "bn_init/scale",
    "bn_init/bias",
    "ResNetBlock_0/BatchNorm_1/bias",
    "ResNetBlock_0/norm_proj/scale",
    "ResNetBlock_0/bn3/bias",
    "se/Dense_0/bias",
    "head/bias",
    "batch_normalization/gamma",
    "batch_normalization/beta",
    "embeddings/LayerNorm/bias",
    "layer_0/attention/query/bias",
    "layer_0/layer_norm/scale",
    "layer_0/attention/query/kernel",
    "word_embeddings/embedding",
    "LSTMCell_0/hf/bias",
    "LSTMCell_0/hf/kernel",
    "subnet/kernel",
]
NORMS = {name for name in NAMES if "orm" in name or "/bn" in name or name.startswith("bn")}
BIASES = {name for name in NAMES if name.endswith("/bias")}


# For each of the named rules: leaves that do not decay, and whether these adapt.
NAMED = {
    "all": (set(), True),
    "no_bias_no_norm": (NORMS | BIASES, False),
    "no_bias_no_norm_decay": (NORMS | BIASES, True),
    "bert": (NORMS | BIASES, False),
    "resnet": (NORMS, False),
    "efficientnet": (NORMS | BIASES, False),
    "lstm": (BIASES, False),
}


@pytest.mark.parametrize("suffix", ["", "/value"])
@pytest.mark.parametrize("name", RULES)
def test_named_rules(name, suffix):
    exempt, adapt = NAMED[name]
    metadata = resolve({path + suffix: SHAPE for path in NAMES}, name)
    assert {path for path in NAMES if not metadata[path + suffix].decay} == exempt
    assert {path for path in NAMES if not metadata[path + suffix].adapt} == (
        set() if adapt else exempt
    )


def test_named_rules_may_match_nothing():
    assert resolve({"kernel": SHAPE}, "no_bias_no_norm") == {"kernel": ParameterMetadata()}


@pytest.mark.parametrize(
    "rules, message",
    [
        ("default", "'default' is unknown; use one of all, no_bias_no_norm"),
        ({"bias": NONE}, "rules=.* must be one of all, .*lstm, or a list"),
        (None, "rules=.* must be one of all, .*lstm, or a list"),
        ([("bias",)], r"rules has \('bias',\), which must be a pair \(regex, metadata\)"),
        (["bias"], "rules has 'bias', which must be a pair"),
        ([("(", NONE)], r"the rule '\(' is not a valid regular expression"),
        (
            [("bias", {"decays": False})],
            "unknown field 'decays'; use one of decay, adapt, layer_axes, rate",
        ),
        ([("bias", False)], "the rule 'bias' has the metadata False; use a mapping"),
        ([("bias", {"decay": 0.1})], "decay=0.1 must be True or False"),
        ([("bias", {"layer_axes": (-1,)})], r"layer_axes=.* must be a list of distinct axes"),
        ([("bias", {"layer_axes": (1, 1)})], r"layer_axes=.* must be a list of distinct axes"),
        ([("bias", {"layer_axes": 0})], "layer_axes=0 must be a list of distinct axes"),
        ([("bias", {"rate_factor": -0.5})], "rate_factor=-0.5 must be a finite number"),
        ([("bias", {"rate_factor": True})], "rate_factor=True must be a finite number"),
        ([("bias", {"rate_factor": "0.5"})], "rate_factor='0.5' must be a finite number"),
        ([("bias", {"decay_factor": float("inf")})], "decay_factor=inf must be a finite number"),
        ([("bias", {"decay_factor": float("nan")})], "decay_factor=nan must be a finite number"),
        ([("bias", {"matrix_axes": (0, 1)})], r"matrix_axes=\(0, 1\) must be \(axes of the rows"),
        ([("bias", {"matrix_axes": ((0,), ())})], r"matrix_axes=.* must be \(axes of the rows"),
        ([("bias", {"matrix_axes": ((0,), (-1,))})], r"matrix_axes=\(\(0,\), \(-1,\)\) must be"),
        ([("bias", {"matrix_axes": "rows"})], "matrix_axes='rows' must be"),
        ([("bias", {"matrix_axes": ((0,), (0, 1))})], "must not name an axis twice"),
        (
            [("bias", {"matrix_axes": ((0,), (1,)), "layer_axes": (1,)})],
            r"matrix_axes=\(\(0,\), \(1,\)\) and layer_axes=\(1,\) must not name an axis twice",
        ),
        (
            [("bias", {"decay": False, "decay_factor": 0.5})],
            "decay_factor=0.5 has no effect with decay=False",
        ),
    ],
)
def test_rules_that_are_no_rules(rules, message):
    with pytest.raises(ValueError, match=message):
        check_rules(rules)


def test_the_table_is_the_same_for_arrays_and_shapes_in_any_order():
    rules = [("bias", NONE), ("", {"layer_axes": [0]})]
    arrays = {"b": {"bias": jnp.ones(3)}, "a": jnp.ones((2, 3), jnp.bfloat16)}
    shapes = {
        "a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16),
        "b": {"bias": jax.ShapeDtypeStruct((3,), jnp.float32)},
    }
    assert (
        table(arrays, rules)
        == table(shapes, rules)
        == "\n".join(
            [
                "path    shape  dtype     count  decay  adapt  layer axes",
                "a       (2,3)  bfloat16      6  yes    yes    (0)",
                "b/bias  (3)    float32       3  no     no     -",
                "total: 2 leaves, 9 values; decay: 1 leaf, 6 values; adapt: 1 leaf, 6 values",
            ]
        )
    )


def test_factors_are_shown_where_not_all_are_one():
    params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
    plain = table(params, [("a", {"rate_factor": 1}), ("", {"decay_factor": 1.0})])
    assert plain == table(params, "all")
    shown = table(
        params,
        [
            ("a", {"rate_factor": 0.8**3}),
            ("b", {"decay": False}),
            ("", {"rate_factor": 0, "decay_factor": 2}),
        ],
    )
    assert shown.splitlines()[0].endswith("layer axes  rate factor  decay factor")
    assert [line.split()[-2:] for line in shown.splitlines()[1:4]] == [
        ["0.512", "1"],
        ["1", "1"],
        ["0", "2"],
    ]
    only = table(params, [("a", {"decay_factor": 0.5}), ("", {})])
    assert "decay factor" in only and "rate factor" not in only


@pytest.mark.parametrize(
    "metadata, num_axes, expected",
    [
        ({}, 2, ((0,), (1,))),
        ({"layer_axes": (0,)}, 3, ((1,), (2,))),
        ({"layer_axes": (1,)}, 3, ((0,), (2,))),
        ({}, 3, None),
        ({}, 1, None),
        ({"layer_axes": (0,)}, 2, None),
        ({"matrix_axes": ()}, 2, None),
        ({"matrix_axes": [[1], [0]]}, 2, ((1,), (0,))),  # lists, as in a config
        ({"matrix_axes": ((1, 2, 3), (4,)), "layer_axes": (0,)}, 5, ((1, 2, 3), (4,))),
    ],
)
def test_rows_and_columns(metadata, num_axes, expected):
    assert ParameterMetadata(**metadata).matrix(num_axes) == expected


def test_matrix_axes_have_to_be_all_that_stack_no_layers():
    for metadata in ({"matrix_axes": ((0,), (1,))}, {"matrix_axes": ((0, 1), (2, 3))}):
        with pytest.raises(
            ValueError,
            match=(
                r"matrix_axes=.* and layer_axes=\(\) must together be all axes of the parameter 'w'; .* is 3"
            ),
        ):
            resolve({"w": jnp.ones((2, 3, 4))}, [("", metadata)])


@pytest.mark.long
def test_rows_and_columns_of_linens_kernels():
    """With the documented axes, each Linen kernel becomes the matrix of a linear map."""
    conv, attention = nn.Conv(5, (3, 2), use_bias=False), nn.MultiHeadDotProductAttention(4)
    image, tokens = jnp.ones((1, 3, 2, 7)), jnp.ones((1, 3, 8))
    params = {
        "conv": conv.init(jax.random.key(0), image)["params"],
        "attention": attention.init(jax.random.key(0), tokens)["params"],
    }
    rules = [
        ("conv/kernel$", {"matrix_axes": ((0, 1, 2), (3,))}),
        ("(query|key|value)/kernel$", {"matrix_axes": ((0,), (1, 2))}),
        ("out/kernel$", {"matrix_axes": ((0, 1), (2,))}),
        ("", {}),
    ]
    metadata = resolve(params, rules)

    def shape_of(*names):
        leaf, meta = params, metadata
        for name in names:
            leaf, meta = leaf[name], meta[name]
        return tuple(
            int(np.prod([leaf.shape[axis] for axis in side])) for side in meta.matrix(leaf.ndim)
        )

    assert shape_of("conv", "kernel") == (3 * 2 * 7, 5)
    assert shape_of("attention", "query", "kernel") == (8, 8)
    assert shape_of("attention", "out", "kernel") == (8, 8)
    # With one window the convolution is the product with this matrix.
    kernel = params["conv"]["kernel"]
    actual = nn.Conv(5, (3, 2), use_bias=False, padding="VALID").apply(
        {"params": {"kernel": kernel}}, image * jnp.arange(42.0).reshape(1, 3, 2, 7)
    )
    np.testing.assert_allclose(actual.ravel(), jnp.arange(42.0) @ kernel.reshape(42, 5), rtol=1e-5)


def test_matrix_axes_are_shown_if_a_rule_gives_them():
    params = {"conv": jnp.ones((3, 3, 2, 4)), "table": jnp.ones((9, 2)), "w": jnp.ones((2, 3))}
    rules = [("conv", {"matrix_axes": ((0, 1, 2), (3,))}), ("table", {"matrix_axes": ()}), ("", {})]
    lines = table(params, rules).splitlines()
    assert lines[0].endswith("layer axes  matrix axes")
    assert [line.split("  ")[-1].strip() for line in lines[1:4]] == ["(0,1,2) x (3)", "none", "-"]
    assert "matrix axes" not in table(params, "all")


TREE = {"dense": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "head": jnp.ones(2)}


def in_partitions(labels, rules):
    """Returns an update of `TREE` in two partitions that share one list of rules."""
    tx = optax.partition(
        {
            "slow": optim.lamb(0.1, rules=rules),
            "fast": optim.make_optimizer({"name": "adamw", "rules": rules}, 0.1),
        },
        labels,
    )
    return jax.jit(tx.update)(TREE, tx.init(TREE), TREE)


@pytest.mark.parametrize(
    "labels",
    [
        {"dense": {"kernel": "slow", "bias": "slow"}, "head": "fast"},
        {"dense": {"kernel": "slow", "bias": "fast"}, "head": "fast"},
        {"dense": "slow", "head": "fast"},
    ],
)
def test_an_idle_rule_is_a_warning_inside_a_partition(labels):
    typo = [("baas$", NONE), ("head", NONE), ("", {})]
    with pytest.warns(UserWarning, match="the rule 'baas\\$' matches no parameter; .* hides: "):
        in_partitions(labels, typo)
    with pytest.warns(UserWarning, match="the rule 'baas\\$' matches no parameter"):
        optax.masked(optim.lamb(0.1, rules=typo), {"dense": True, "head": False}).init(TREE)
    with pytest.raises(ValueError, match="the rule 'baas\\$' matches no parameter"):
        optim.lamb(0.1, rules=typo).init(TREE)


@pytest.mark.parametrize(
    "labels",
    [
        {"dense": {"kernel": "slow", "bias": "slow"}, "head": "fast"},
        {"dense": {"kernel": "slow", "bias": "fast"}, "head": "fast"},
    ],
)
@pytest.mark.parametrize(
    "rules",
    [
        [("bias$", NONE), ("kernel$", {"rate_factor": 0.5}), ("head", NONE)],
        [("^head", NONE), ("dense/", {})],
    ],
)
def test_a_rule_for_the_other_partition_is_valid(labels, rules):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_partitions(labels, rules)

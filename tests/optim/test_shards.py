"""Tests updates inside shard_map, where some leaves are split over one or two mesh axes.

Every transform takes five updates on one device, and the same updates on a mesh of eight devices,
where `axis_name` is a function of the leaf's path. Full leaves must stay bit-identical on all devices.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim.factory import OPTIMIZERS
from lamb_tpu.optim.sharding import state_sharding
from lamb_tpu.optim.trust_ratio import Diagnostics
from tests.marks import MAIN, some
from tests.optim.catalogue import PLAIN, REDUCING, takes
from tests.optim.runs import assert_close, assert_shardings, step_of

P = PartitionSpec
RATE = optim.warmup(0.1, 10, 2)
RULES = [("^layers", {"layer_axes": (0,)}), ("bias$", {"adapt": False, "decay": False}), ("", {})]
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
LEAVES = {  # (shape, spec); the sizes of full leaves are not divisible by the mesh
    "first": {"kernel": ((16, 5), P("data")), "bias": ((24,), P(("data", "model")))},
    "last": ((6, 16), P(None, ("data", "model"))),
    "columns": ((5, 6), P(None, "model")),
    "layers": ((4, 8, 3), P(None, "data")),
    "whole": ((7, 3), P()),
    "temperature": ((), P()),
}


def of_leaves(function):
    return jax.tree.map(function, LEAVES, is_leaf=lambda x: isinstance(x, tuple))


SPECS = of_leaves(lambda leaf: leaf[1])
WHOLE_MATRICES = of_leaves(lambda leaf: leaf[1] if len(leaf[0]) == 1 else P())
LAYERS_SPLIT = SPECS | {"layers": P("data", "model")}


def draw(seed):
    rng = np.random.default_rng(seed)
    return of_leaves(lambda leaf: jnp.asarray(rng.standard_normal(leaf[0]), jnp.float32))


def axes_by_path(specs):
    """Returns a function from a path to the leaf's mesh axes, for `axis_name`."""
    table = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs):
        names = [name for entry in spec if entry for name in np.atleast_1d(entry).tolist()]
        table["/".join(key.key for key in path)] = tuple(names) or None
    return table.__getitem__


def specs_by_path(specs):
    """Returns a function from a path to the leaf's spec, for `axis_name`."""
    paths = [
        "/".join(key.key for key in path) for path, _ in jax.tree_util.tree_leaves_with_path(specs)
    ]
    return dict(zip(paths, jax.tree.leaves(specs), strict=True)).__getitem__


def configured(name, **arguments):
    """Returns a function that builds an optimizer from a config, with collect=True."""

    def build(**others):
        collect = {"collect": True} if takes(name, "collect") else {}
        config = {"name": name, "rules": RULES, **collect, **arguments, **others}
        return optim.make_optimizer(config, RATE)

    return build


# Every transform with clipping and collecting, and other options that change norms or means.
BUILDS = {
    **{
        name: configured(name, clip_global_norm=1.0)
        for name in OPTIMIZERS
        if name not in ("adafactor", *REDUCING)
    },
    **{
        name: functools.partial(build, RATE, rules=RULES)
        for name, build in PLAIN.items()
        if name not in OPTIMIZERS
    },
    "apollo": configured("apollo", rank=2, clip_global_norm=1.0),  # projecting
    "apollo, mini": configured("apollo", preset="apollo_mini", update_gap=2),
    "lamb, linf": configured("lamb", norm="linf", decay="decoupled"),
    "lamb, phi": configured("lamb", norm="l1", phi_bounds=(5.0, 20.0), ratio_eps=1.0),
    "lamb, cautious": configured("lamb", cautious=True),
    "lars, decayed": configured("lars", preset="optax", weight_decay=0.1),
    "lars, momentum": configured("lars", preset="lamb_paper"),
    "lars, larc": configured("lars", preset="larc"),
    "novograd, linf": configured("novograd", norm="linf", amsgrad=True),
    "novograd, apex": configured("novograd", preset="apex"),
    "rmsprop_tf, cautious": configured("rmsprop_tf", cautious=True),
    "adagrad_norm, layers": configured("adagrad_norm", per_layer=True),
}


def train(step, params, state):
    for seed in range(1, 6):
        params, state = step(params, state, draw(seed))
    return params, state


@functools.cache
def unsharded(name):
    tx, params = BUILDS[name](), draw(0)
    return train(jax.jit(step_of(tx)), params, tx.init(params))


def sharded_step(tx, params, specs):
    specs = (specs, state_sharding(tx, params, specs))
    return jax.jit(
        jax.shard_map(
            step_of(tx), mesh=MESH, in_specs=(*specs, specs[0]), out_specs=specs, check_vma=False
        )
    )


def sharded(name, axis_name=None):
    specs = WHOLE_MATRICES if name.startswith(("apollo", "muon")) else SPECS
    tx, params = BUILDS[name](axis_name=axis_name or axes_by_path(specs)), draw(0)
    return train(sharded_step(tx, params, specs), params, tx.init(params))


def assert_replicas_are_equal(tree):
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(
                shard.data, first.setdefault(str(shard.index), shard.data)
            )


@pytest.mark.long
@pytest.mark.parametrize("name", some(BUILDS, (*MAIN, "novograd", "lars, larc")))
def test_five_updates_equal_those_of_one_device(name):
    actual = sharded(name)
    assert_close(actual, unsharded(name))
    assert_replicas_are_equal(actual)


@pytest.mark.long
@pytest.mark.parametrize("specs", [SPECS, LAYERS_SPLIT], ids=["layers whole", "layers split"])
@pytest.mark.parametrize(
    "name",
    some(
        [
            "lamb",
            "lamb, cautious",
            "lars",
            "novograd, linf",
            "rmsprop_tf, cautious",
            "adagrad_norm",
            "apollo",
            "apollo, mini",
            "scale_by_lamb, scale_by_trust_ratio",
            "stochastic_rounding(lamb)",
        ]
    ),
)
def test_specs_name_the_split_axes_of_a_leaf(name, specs):
    """With specs, layers of a stack may be split, and so may matrices that APOLLO projects."""
    tx, params = BUILDS[name](axis_name=specs_by_path(specs)), draw(0)
    state_specs = state_sharding(tx, params, specs)
    if specs is LAYERS_SPLIT:  # diagnostics of such a stack need a separate spec
        state_specs = jax.tree.map(
            lambda node: (
                Diagnostics(*({**tree, "layers": P("data")} for tree in node))
                if isinstance(node, Diagnostics)
                else node
            ),
            state_specs,
            is_leaf=lambda node: isinstance(node, Diagnostics),
        )
    step = jax.jit(
        jax.shard_map(
            step_of(tx),
            mesh=MESH,
            in_specs=(specs, state_specs, specs),
            out_specs=(specs, state_specs),
            check_vma=False,
        )
    )
    actual = train(step, params, tx.init(params))
    assert_close(actual, unsharded(name), rtol=1e-5)
    assert_replicas_are_equal(actual)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sgd", "novograd", "adagrad_norm"])
def test_one_name_for_all_leaves_counts_full_ones_once_per_device(name):
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(sharded(name, ("data", "model")), unsharded(name), rtol=1e-4)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name, clip, count",
    [("lamb", None, 1), ("lamb", 1.0, 2), ("lars", None, 1), ("novograd", None, 1)],
)
def test_norms_of_all_leaves_share_an_all_reduce(name, clip, count):
    leaves = {str(i): jax.ShapeDtypeStruct((8, 4), jnp.float32) for i in range(10)}
    specs = {path: P("data") if path != "0" else P() for path in leaves}
    tx = optim.make_optimizer(
        {"name": name, "clip_global_norm": clip, "axis_name": axes_by_path(specs)}, 0.1
    )
    lowered = sharded_step(tx, leaves, specs).lower(leaves, jax.eval_shape(tx.init, leaves), leaves)
    assert lowered.as_text().count("stablehlo.all_reduce") >= 9
    assert len(re.findall(r" all-reduce(?:-start)?\(", lowered.compile().as_text())) == count


@pytest.mark.parametrize("name", some(BUILDS))
def test_init_inside_shard_map_makes_the_state_that_is_made_outside(name):
    specs = WHOLE_MATRICES if name.startswith(("apollo", "muon")) else SPECS
    tx, params = BUILDS[name](axis_name=axes_by_path(specs)), draw(0)

    def init_and_step(params, grads):
        state = tx.init(params)
        return state, step_of(tx)(params, state, grads)[0]

    state_specs = state_sharding(tx, params, specs)
    inside = jax.jit(
        jax.shard_map(  # check_vma verifies that norms are replicated
            init_and_step, mesh=MESH, in_specs=(specs, specs), out_specs=(state_specs, specs)
        )
    )
    state, actual = inside(params, draw(1))
    outside = tx.init(params)
    assert_close(state, outside)
    assert_close(actual, jax.jit(step_of(BUILDS[name]()))(params, outside, draw(1))[0])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", [name for name in BUILDS if not name.startswith("stochastic")])
def test_an_axis_that_is_not_bound_is_named(name, check_vma):
    tx = BUILDS[name](axis_name="modle")
    params = {"layers": jnp.ones((2, 8)), "bias": jnp.ones(8), "rest": jnp.ones(8)}
    step = jax.shard_map(
        lambda params: tx.update(params, tx.init(params), params)[0],
        mesh=MESH,
        in_specs=P(),
        out_specs=P(),
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match="axis_name='modle' is not bound here; use it inside"):
        jax.eval_shape(step, params)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", some(name for name in PLAIN if takes(name, "collect")))
def test_collecting_a_stack_split_by_layers_compiles_once(name, axis_type):
    mesh = jax.make_mesh((8,), ("layers",), axis_types=(axis_type,))
    shardings = {
        "stack": jax.NamedSharding(mesh, P("layers")),
        "bias": jax.NamedSharding(mesh, P()),
    }
    params = jax.device_put({"stack": jnp.ones((8, 4, 6)), "bias": jnp.ones(3)}, shardings)
    tx = PLAIN[name](0.1, rules=[("stack", {"layer_axes": (0,)}), ("", {})], collect=True)
    placed = state_sharding(tx, params, shardings)
    state = jax.jit(tx.init, out_shardings=placed)(params)
    update = jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(params, state, params)
    assert_shardings((updates, state), (shardings, placed))
    # On an Explicit mesh JAX converts P() to P(None), and treats it as another sharding.
    assert update._cache_size() == (1 if axis_type == AxisType.Auto else 2)

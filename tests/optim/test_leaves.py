"""Tests reports of how optimizers update each leaf, derived from the shapes of their states."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu.optim import leaves, make_optimizer, parameters
from lamb_tpu.optim.factory import OPTIMIZERS, arguments_of

PARAMS = {
    "conv": {"kernel": jax.ShapeDtypeStruct((3, 3, 4, 8), jnp.bfloat16)},
    "dense": {"kernel": jax.ShapeDtypeStruct((256, 512), jnp.float32)},
    "norm": {"scale": jax.ShapeDtypeStruct((8,), jnp.float32)},
}
SIZE = 288 + 256 * 512 + 8


def report(config, params=PARAMS, wrap=lambda tx: tx):
    config = {"rules": "no_bias_no_norm"} | config
    state = jax.eval_shape(wrap(make_optimizer(config, 0.1)).init, params)
    return leaves.report(config["name"], state, params, config["rules"], arguments_of(config))


@pytest.mark.parametrize(
    ("config", "updates", "line"),
    [
        (
            {"name": "lamb"},
            ["LAMB", "LAMB", "Adam"],
            f"LAMB adapts {SIZE - 8:,} of {SIZE:,} values; Adam: the rest; decay: {SIZE - 8:,}; "
            f"state: mu,nu float32; {8 * SIZE:,} bytes",
        ),
        (
            {"name": "lamb", "mu_dtype": "bfloat16", "rules": "all"},
            ["LAMB"] * 3,
            f"LAMB adapts {SIZE:,} of {SIZE:,} values; decay: {SIZE:,}; "
            f"state: mu bfloat16, nu float32; {6 * SIZE:,} bytes",
        ),
        (
            {"name": "lars", "momentum_dtype": "bfloat16"},
            ["LARS", "LARS", "momentum"],
            f"LARS adapts {SIZE - 8:,} of {SIZE:,} values; momentum: the rest; decay: {SIZE - 8:,}; "
            f"state: momentum bfloat16; {2 * SIZE:,} bytes",
        ),
        (
            {"name": "muon"},
            ["Muon", "Muon", "Adam"],
            f"Muon: {SIZE - 8:,} of {SIZE:,} values; Adam: the rest; no decay; "
            f"state: mu,nu float32; {4 * SIZE + 32:,} bytes",
        ),
        (
            {"name": "apollo", "rank": 8},
            ["AdamW", "APOLLO", "AdamW"],
            f"APOLLO: 131,072 of {SIZE:,} values; AdamW: the rest; no decay; "
            f"state: mu,nu,norms float32; {8 * (296 + 8 * 512) + 12:,} bytes",
        ),
        (
            {"name": "adafactor"},
            ["full moments", "factored moments", "full moments"],
            f"factored moments: 131,072 of {SIZE:,} values; full moments: the rest; no decay; "
            f"state: v_row,v_col,v float32; {4 * (296 + 768 + 5):,} bytes",
        ),
        ({"name": "sgd"}, ["sgd"] * 3, f"sgd: all {SIZE:,} values; no decay; state: none"),
        (
            {"name": "onebit_lamb", "masked_rows": ()},
            ["1-bit LAMB", "1-bit LAMB", "1-bit Adam"],
            None,
        ),
        (
            {"name": "schedule_free_adamw"},
            ["schedule_free_adamw"] * 3,
            f"schedule_free_adamw: all {SIZE:,} values; no decay; state: nu,z float32; "
            f"{8 * SIZE:,} bytes",
        ),
    ],
)
def test_line_and_algorithms(config, updates, line):
    actual = report(config)
    assert [actual.update_of(leaf) for leaf in actual.leaves] == updates
    if line is not None:
        assert actual.line() == line


def test_factors_and_masks_are_in_the_line():
    rules = [("conv", {"rate_factor": 0.25}), ("dense", {"decay_factor": 2.0}), ("", {})]
    text = report({"name": "adamw", "rules": rules}).line()
    assert "; rate factors: 0.25 to 1; decay factors: 1 to 2; " in text
    assert "; mask_unseen=True; state: " in report({"name": "onebit_adam"}).line()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_are_those_of_the_state(name):
    """The bytes include all arrays that grow with the parameters."""
    actual = report({"name": name})
    tx = make_optimizer({"name": name, "rules": "no_bias_no_norm"}, 0.1)
    state = jax.eval_shape(tx.init, PARAMS)
    arrays = [
        x for x in jax.tree.leaves(state) if x.ndim and x.shape != (3,)
    ]  # without Muon's coefficients
    expected = sum(x.size * x.dtype.itemsize for x in arrays)
    counted = sum(buffer.nbytes for leaf in actual.leaves for buffer in leaf.buffers)
    scalars = sum(not buffer.shape for leaf in actual.leaves for buffer in leaf.buffers)
    assert counted == expected + 4 * scalars


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda tx: optax.chain(optax.clip(1.0), tx), "mu,nu"),
        (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), "mu,nu,acc_grads"),
        (
            lambda tx: optax.partition(
                {"a": tx, "b": optax.sgd(0.1, 0.9)}, {"conv": "a", "dense": "b", "norm": "a"}
            ),
            "mu,nu,trace",
        ),
    ],
)
def test_inside_other_transforms(wrap, names):
    assert f"state: {names} float32" in report({"name": "adamw"}, wrap=wrap).line()


def test_custom_optimizers_show_their_state():
    state = jax.eval_shape(optax.adabelief(0.1).init, PARAMS)
    actual = leaves.report("optax:adabelief", state, PARAMS, "all")
    assert actual.line() == (
        f"optax:adabelief: all {SIZE:,} values; state: mu,nu bfloat16, mu,nu float32; "
        f"{8 * SIZE - 4 * 288:,} bytes"
    )
    bare = jnp.ones(4)
    actual = leaves.report("adam", jax.eval_shape(optax.adam(0.1).init, bare), bare, "all")
    assert actual.line() == "adam: all 4 values; state: mu,nu float32; 32 bytes"


def test_table_has_update_state_and_bytes():
    rows = report({"name": "adafactor"}).table().splitlines()
    assert rows[0].split()[-3:] == ["update", "state", "bytes"]
    assert "factored moments  v_row float32 (256), v_col float32 (512), v float32 (1) " in rows[2]
    assert rows[2].endswith(" 3076")
    muon = report({"name": "muon"}).table().splitlines()
    assert "(0,1,2) x (3)  Muon" in muon[1] and "-              Muon" in muon[2]


def test_a_table_of_an_older_version_is_equal():
    old, new = parameters.table(PARAMS, "no_bias_no_norm"), report({"name": "adamw"}).table()
    assert old != new and leaves.difference(old, new) is None
    assert leaves.difference(new, report({"name": "lars"}).table()) is None  # the config differs
    factors = [("conv", {"rate_factor": 0.25}), ("", {})]
    assert (
        leaves.difference(
            parameters.table(PARAMS, "all"), report({"name": "adamw", "rules": factors}).table()
        )
        == "'conv/kernel' has rate factor 1 in the file and 0.25 in this run"
    )


def test_an_older_table_of_muon_differs_where_its_matrices_do():
    old = parameters.table(PARAMS, "no_bias_no_norm")
    assert leaves.difference(old, report({"name": "muon"}).table()) == (
        "'conv/kernel' has matrix axes - in the file and (0,1,2) x (3) in this run"
    )
    # An older docstring recommended adapt=False for the output layer. A run with this rule must resume.
    params = {"dense": {"kernel": jnp.ones((4, 4))}, "output": {"kernel": jnp.ones((4, 2))}}
    rules = [("output", {"adapt": False}), ("", {})]
    now = report({"name": "muon", "rules": rules}, params).table()
    assert leaves.difference(parameters.table(params, rules), now) is None


@pytest.mark.parametrize(
    ("changed", "actual"),
    [
        (
            lambda text: text.replace("yes", "no ", 1),
            "'conv/kernel' has decay no in the file and yes in this run",
        ),
        (lambda text: text.replace("dense", "dance"), "'dance/kernel' is only in the file"),
        (lambda text: text + "?", "the last lines differ"),
        (lambda text: "another", "the file is not a table of parameters"),
        (lambda text: "", "the file is not a table of parameters"),
        (lambda text: "path  shape  dtype\na\ntotal", "the file is not a table of parameters"),
    ],
)
def test_the_first_difference_is_named(changed, actual):
    table = report({"name": "adamw"}).table()
    assert leaves.difference(changed(table), table) == actual


def test_a_path_with_spaces():
    params = {"a  b": np.ones(2), "": np.ones(3)}
    old = parameters.table(params, "all")
    now = report({"name": "adam", "rules": "all"}, params).table()
    assert leaves.difference(old, now) is None
    assert leaves.difference(old.replace("(2)", "(9)"), now) == (
        "'a  b' has shape (9) in the file and (2) in this run"
    )

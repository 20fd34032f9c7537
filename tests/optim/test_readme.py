"""The page on implementations: its snippets run, and its calls are calls."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from tests import own_pages
from tests.shared import ROOT

PAGE = (ROOT / "lamb_tpu" / "optim" / "README.md").read_text()
# But for a module of a user's own, which the last test has.
BLOCKS = re.findall(r"```python\n(?!# my_)(.*?)```", PAGE, re.DOTALL)
# Calls in the tables with nothing left out, such as lamb(rate, weight_decay=0.0).
CALLS = sorted(set(re.findall(r"`((?:lamb|optim\.\w+)\(rate(?:, \w+=[\d.e-]+)*\))`", PAGE)))
PARAMS = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}


def updates(tx):
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_snippets_run(block):
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates(names["tx"])))


@pytest.mark.parametrize("call", CALLS)
def test_calls_run(call):
    tx = eval(call, {"lamb": optim.lamb, "optim": optim, "rate": 0.1})
    assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates(tx)))


def test_the_chain_on_the_page_is_lamb():
    (block,) = (block for block in BLOCKS if "with_trust_ratio" in block)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    lamb = optim.lamb(names["rate"], nesterov="first", rules=names["rules"])
    params = {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3)}
    for tx in (names["lion"], names["rmsprop"]):
        assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates(tx)))
    state, other = names["lamb"].init(params), lamb.init(params)
    for _ in range(3):  # at the first the rate is 0
        found, state = names["lamb"].update(params, state, params)
        expected, other = lamb.update(params, other, params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jnp.abs(found["kernel"]).max() > 0


def test_there_are_snippets_and_calls():
    assert BLOCKS and len(CALLS) >= 3


def test_every_name_of_an_optimizer_stands_on_the_page():
    table = PAGE.split("```python")[0]
    assert all(f"`{name}`" in table for name in optim.factory.OPTIMIZERS)


def test_fairseq_without_a_weight_decay_is_adam():
    """The page's claim: apex's LAMB for leaves that do not adapt, a clip and no ratio."""
    tx = optim.lamb(
        0.1,
        **optim.preset("lamb", "apex") | {"eps": 1e-8, "weight_decay": 0.0},
        rules=[("", {"adapt": False})],
    )
    adam = optim.make_optimizer({"name": "adam", "clip_global_norm": 1.0}, 0.1)
    for found, expected in zip(
        jax.tree.leaves(updates(tx)), jax.tree.leaves(updates(adam)), strict=True
    ):
        assert jnp.allclose(found, expected, rtol=2e-5)  # rounding of 1 - b2 ** t


@pytest.mark.long
def test_optimizer_of_a_users_own(tmp_path: pathlib.Path) -> None:
    """From a folder outside, by a function of one's own and by one of Optax's."""
    lines = own_pages.run_page("optim", tmp_path)
    assert len(lines) == 2
    for name, decays in (("sign", ["yes", "yes"]), ("adabelief", ["no", "no"])):
        workdir = tmp_path / "runs" / name
        records = [
            json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()
        ]
        (last,) = [record for record in records if record["kind"] == "eval"]
        assert last["accuracy"] > 0.5  # a guess has 0.1
        rows = (workdir / "parameters.txt").read_text().splitlines()
        (kernel,) = [row.split() for row in rows if row.startswith("hidden0/kernel")]
        assert kernel[4:6] == decays  # Optax's takes no rules

"""The page on implementations: its snippets run, and its calls are calls."""

import re

import jax
import jax.numpy as jnp
import pytest

from lamb_tpu import optim
from tests.shared import ROOT

PAGE = (ROOT / "lamb_tpu" / "optim" / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
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


def test_there_are_snippets_and_calls():
    assert BLOCKS and len(CALLS) >= 3


def test_every_name_of_an_optimizer_stands_on_the_page():
    table = PAGE.split("```python")[0]
    assert all(f"`{name}`" in table for name in optim.factory.OPTIMIZERS)


def test_fairseq_without_a_weight_decay_is_adam():
    """The page's claim: apex's LAMB for leaves that do not adapt, a clip and no ratio."""
    tx = optim.lamb(0.1, **optim.preset("lamb", "apex") | {"eps": 1e-8, "weight_decay": 0.0},
                    rules=[("", {"adapt": False})])
    adam = optim.make_optimizer({"name": "adam", "clip_global_norm": 1.0}, 0.1)
    for found, expected in zip(
        jax.tree.leaves(updates(tx)), jax.tree.leaves(updates(adam)), strict=True
    ):
        assert jnp.allclose(found, expected, rtol=2e-5)  # rounding of 1 - b2 ** t

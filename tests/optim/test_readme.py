"""Tests that the README's snippets run, and that the calls in its tables are valid."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from tests import package_pages
from tests.shared import ROOT

PAGE = (ROOT / "lamb_tpu" / "optim" / "README.md").read_text()
CHAINS, TABLES = (
    (ROOT / "docs" / "guides" / f"{name}.md").read_text()
    for name in ("optimizers", "implementations")
)
# Snippets, except for the custom module, which the last test runs.
BLOCKS = re.findall(r"```python\n(?!# my_)(.*?)```", PAGE, re.DOTALL)
# Complete calls in the tables, such as lamb(rate, weight_decay=0.0).
CALLS = sorted(
    set(re.findall(r"`((?:lamb|optim\.\w+)\(rate(?:, \w+=[\d.e-]+)*\))`", PAGE + TABLES))
)
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
    (block,) = re.findall(r"## Custom chains.*?```python\n(.*?)```", CHAINS, re.DOTALL)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    lamb = optim.lamb(names["rate"], nesterov="first", rules=names["rules"])
    params = {"kernel": jnp.arange(12.0).reshape(4, 3), "bias": jnp.ones(3)}
    for tx in (names["lion"], names["rmsprop"]):
        assert all(jnp.isfinite(u).all() for u in jax.tree.leaves(updates(tx)))
    state, other = names["lamb"].init(params), lamb.init(params)
    for _ in range(3):  # the first rate is 0
        actual, state = names["lamb"].update(params, state, params)
        expected, other = lamb.update(params, other, params)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert jnp.abs(actual["kernel"]).max() > 0


def test_there_are_snippets_and_calls():
    assert BLOCKS and len(CALLS) >= 3


def test_every_name_of_an_optimizer_stands_on_the_page():
    table = PAGE.split("```python")[0]
    assert all(f"`{name}`" in table for name in optim.factory.OPTIMIZERS)


def test_fairseq_without_a_weight_decay_is_adam():
    """As the README says, apex's LAMB without adapted leaves is Adam with clipping."""
    tx = optim.lamb(
        0.1,
        **optim.preset("lamb", "apex") | {"eps": 1e-8, "weight_decay": 0.0},
        rules=[("", {"adapt": False})],
    )
    adam = optim.make_optimizer({"name": "adam", "clip_global_norm": 1.0}, 0.1)
    for actual, expected in zip(
        jax.tree.leaves(updates(tx)), jax.tree.leaves(updates(adam)), strict=True
    ):
        assert jnp.allclose(actual, expected, rtol=2e-5)  # 1 - b2 ** t is rounded


@pytest.mark.long
def test_custom_optimizer(tmp_path: pathlib.Path) -> None:
    """Trains with a custom optimizer from another folder, and with an optimizer of Optax."""
    lines = package_pages.run_page("optim", tmp_path)
    assert len(lines) == 2
    for name, decays in (("sign", ["yes", "yes"]), ("adabelief", ["no", "no"])):
        workdir = tmp_path / "runs" / name
        records = [
            json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()
        ]
        (last,) = [record for record in records if record["kind"] == "eval"]
        assert last["accuracy"] > 0.5  # chance is 0.1
        rows = (workdir / "parameters.txt").read_text().splitlines()
        (kernel,) = [row.split() for row in rows if row.startswith("hidden0/kernel")]
        assert kernel[4:6] == decays  # Optax's optimizer takes no rules

"""The optimizer of a config: its rules, its fields, and the counts of its schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import resolve
from lamb_tpu.spec import parse
from tests import tiny
from tests.raising import rejected


def test_optimizer_and_its_rules() -> None:
    config = tiny.digits(optimizer=ConfigDict({"name": "adamw", "learning_rate": 0.1}))
    optimizer = resolve_optimizer(parse(config).optimizer)
    assert optimizer.rules == "all" and callable(optimizer.make(resolve(config, 256)).update)
    assert config.optimizer.learning_rate == 0.1  # the config is unchanged
    with rejected("config.optimizer.momentum", problem="is unknown"):
        resolve_optimizer(parse(tiny.change(config, {"optimizer.momentum": 0.9})).optimizer)


def test_schedule_of_kept_counts() -> None:
    """The schedule starts at 0, although the optimizer's counts continue."""
    config = tiny.digits(optimizer=ConfigDict({"name": "sgd", "learning_rate": 0.1}))
    recipe = resolve(config, 256, updates_before=1000)
    np.testing.assert_allclose(recipe.learning_rates, resolve(config, 256).learning_rates)
    tx = resolve_optimizer(parse(config).optimizer).make(recipe)
    params = {"kernel": jnp.ones(2)}
    state = jax.tree.map(lambda count: count + 1000, tx.init(params))
    for rate in recipe.learning_rates:
        update, state = tx.update({"kernel": jnp.ones(2)}, state, params)
        np.testing.assert_allclose(update["kernel"], -rate, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "lamb"},
        {"name": "adamw"},
        {"name": "momentum", "weight_decay": 0.1},
        {"name": "lars", "clip_global_norm": 1.0},
        {"name": "novograd"},
    ],
    ids=lambda optimizer: optimizer["name"],
)
def test_every_count_is_that_of_updates(optimizer: dict) -> None:
    """Every count in a state equals the number of updates, so one initial count fits all schedules."""
    config = tiny.digits(optimizer=ConfigDict({**optimizer, "learning_rate": 0.1}))
    tx = resolve_optimizer(parse(config).optimizer).make(resolve(config, 256))
    params = {"kernel": jnp.ones(2)}
    state = tx.init(params)
    for updates in range(3):
        leaves = jax.tree.leaves(state)
        counts = {int(leaf) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.integer)}
        assert counts == {updates}
        _, state = tx.update(params, state, params)

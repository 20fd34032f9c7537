"""Tests BERT on meshes with the axes 'model' and 'sequence', and with JAX's random generator rbg."""

import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.models import bert_rules
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.store.checkpoint import Checkpoints
from tests import tiny
from tests.marks import some
from tests.parallel.nets import difference, trained
from tests.parallel.test_bert_step import seen
from tests.raising import rejected
from tests.tasks.berts import TINY, examples

CHANGES: dict[str, Any] = {
    "model": ConfigDict({**TINY, "num_layers": 1, "heads": ("mlm", "nsp"), "dropout_rate": 0.2}),
    "task": ConfigDict({"name": "masked_lm"}),
    # The update of momentum scales with the gradient. LAMB's first update would depend on the signs
    # of gradients that are only rounding errors.
    "optimizer": ConfigDict({"name": "momentum", "learning_rate": 0.5}),
    "batch_size": 32,
    "schedule__warmup": "0 steps",
}
PLACES: dict[str, dict[str, Any]] = {
    "model": {"mesh__model": 2, "parallel__rules": bert_rules.TENSOR_PARALLEL},
    "sequence": {"mesh__sequence": 2, "accumulation_steps": 4},
}
RBG = {"prng": "rbg"}


@pytest.fixture(scope="module", autouse=True)
def source() -> Iterator[None]:
    """Replaces the data of every config by generated examples."""
    made = data.ArraySource("made", examples(96), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda *_, **__: made)
        yield


@pytest.fixture(scope="module")
def on_one(source: None) -> Any:
    return trained(1, 1, **CHANGES)


@pytest.mark.optimized
@pytest.mark.parametrize("place", some(PLACES, ()))
def test_the_update_is_that_of_one_device(place: str, on_one: Any) -> None:
    expected, (sums_one,), run_one = on_one
    run = run_of(**CHANGES, **PLACES[place])
    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch()).compile()
    loader = data.TrainLoader(run.train_set, 32, run.spec.seed, run.local_rows())
    actual, sums = step(run.first_state(), run.shard_batch(next(loader)))
    assert difference(seen(actual.params), seen(expected.params)) < 1e-4
    assert difference(expected.params, run_one.first_state().params) > 0.01
    for name in sums_one:
        np.testing.assert_allclose(sums[name], sums_one[name], rtol=1e-5, err_msg=name)
    if place == "sequence":
        # Attention sends queries, keys and values, and returns results; so does its backward pass.
        assert len(re.findall(r" all-to-all\(", step.as_text())) >= 4


def run_of(**changes: Any) -> Run:
    return prepare(tiny.digits(**changes), None)


@pytest.mark.parametrize(
    "changes, key, value, problem",
    [
        ({"mesh__sequence": 8}, "mesh.sequence", 8, "does not divide the sequence length, 12"),
        ({"mesh__sequence": 4}, "model.num_heads", 2, "by config.mesh.sequence=4 times"),
        (
            {"mesh__sequence": 2, "mesh__model": 2, "parallel__rules": bert_rules.TENSOR_PARALLEL},
            "model.num_heads",
            2,
            "by config.mesh.sequence=2 times config.mesh.model=2",
        ),
        ({"mesh__model": 2}, "mesh.model", 2, "splits nothing"),
    ],
)
def test_rejects_meshes(changes: dict[str, Any], key: str, value: int, problem: str) -> None:
    with rejected(f"config.{key}", value, problem):
        run_of(**CHANGES, **changes)


def test_a_network_without_attention_leaves_the_axis_unused() -> None:
    images = {"image": np.zeros((64, 8, 8, 1), np.float32), "label": np.arange(64) % 10}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda *_, **__: data.ArraySource("made", images, 10))
        with rejected("config.mesh.sequence", 2, "splits nothing"):
            run_of(mesh__sequence=2)


@pytest.mark.long
def test_rbg_draws_dropout_and_nothing_else(on_one: Any, tmp_path: pathlib.Path) -> None:
    _, sums_threefry, threefry = on_one
    state, sums, run = trained(1, 1, **CHANGES, **RBG)
    assert str(jax.random.key_impl(state.key)) == "rbg"
    assert jax.tree.map(jnp.shape, run.abstract_state) == jax.tree.map(jnp.shape, state)
    start, other = run.first_state(), threefry.first_state()
    jax.tree.map(np.testing.assert_array_equal, start.params, other.params)
    assert str(jax.random.key_impl(other.key)) == "threefry2x32"
    # Different dropout masks give a slightly different loss.
    one, two = sums[0]["loss"][0], sums_threefry[0]["loss"][0]
    assert one != two and abs(one - two) < 0.2
    # A checkpoint restores the same key.
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, state, {})
    with Checkpoints(tmp_path, 1) as checkpoints:
        again, _ = checkpoints.restore(1, run.abstract_state)
    assert again.key.dtype == state.key.dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (again.key, state.key)))


@pytest.mark.long
def test_rbg_is_the_same_under_jit_and_shard_map() -> None:
    # Inside shard_map each device draws the numbers of its rows from the position of its first row.
    jit, sums_jit, _ = trained(8, 1, **CHANGES, **RBG)
    named, sums_named, _ = trained(8, 1, **CHANGES, **RBG, parallel__backend="shard_map")
    assert difference(seen(named.params), seen(jit.params)) < 1e-5
    np.testing.assert_allclose(sums_named[0]["loss"], sums_jit[0]["loss"], rtol=1e-5)

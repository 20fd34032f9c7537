"""Tests that BERT's loss averages over all masked words and all pairs, on any number of devices."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data, models, tasks
from lamb_tpu.models.transformer import stack_layers
from tests.parallel.nets import difference, trained
from tests.tasks.berts import TINY, examples

CHANGES: dict[str, Any] = {
    "model": ConfigDict({**TINY, "heads": ("mlm", "nsp"), "dropout_rate": 0.2}),
    "task": ConfigDict({"name": "masked_lm"}),
    "batch_size": 32,
    "schedule__warmup": "0 steps",
}
NUM_UPDATES = 2
ZERO1 = {"parallel__optimizer_state": "zero1"}
# Few cases, because each takes seconds to compile.
PLACES = {
    "jit": {"accumulation_steps": 2, **ZERO1},
    "shard_map": {"accumulation_steps": 4, "parallel__backend": "shard_map", **ZERO1},
}


@pytest.fixture(scope="module", autouse=True)
def source() -> Iterator[data.ArraySource]:
    """Returns generated examples, which replace the data of every config."""
    made = data.ArraySource("made", examples(96), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda *_, **__: made)
        yield made


@pytest.fixture(scope="module")
def whole(source: data.ArraySource) -> Any:
    """Returns `trained(...)` for some updates on one device without microbatches."""
    return trained(1, NUM_UPDATES, **CHANGES)


def seen(params: Any) -> Any:
    """Zeroes the biases of attention keys: their gradient is 0, so rounding decides their updates."""

    def kept(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf * (not name.endswith("key/bias"))

    return jax.tree_util.tree_map_with_path(kept, params)


@pytest.mark.long
def test_masked_words_are_unequal(whole: Any) -> None:
    _, _, run = whole
    loader = data.TrainLoader(run.train_set, 32, run.spec.seed, run.local_rows())
    for batch, _ in zip(loader, range(NUM_UPDATES)):
        counts = batch["masked_weights"].reshape(8, 4, -1).sum((1, 2))
        assert counts.max() >= 3 * counts.min()


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
def test_eight_devices_zero1_and_accumulation_give_the_big_batch(place: str, whole: Any) -> None:
    expected, sums_whole, run = whole
    actual, sums, _ = trained(8, NUM_UPDATES, **CHANGES, **PLACES[place])
    # LAMB divides by the magnitude of the gradient. If the gradient is close to rounding error, as in
    # some biases, the order of additions matters.
    assert difference(seen(actual.params), seen(expected.params)) < 1e-4
    start = run.first_state().params
    assert (
        difference(expected.params, start) > 0.05
    )  # otherwise the test would compare unchanged values
    for of_whole, of_actual in zip(sums_whole, sums, strict=True):
        assert of_whole.keys() == of_actual.keys()
        for name in of_whole:
            np.testing.assert_allclose(of_actual[name], of_whole[name], rtol=1e-5, err_msg=name)
    last = sums[-1]
    parts = [last[f"{term}_loss"][0] / last[f"{term}_loss"][1] for term in ("mlm", "nsp")]
    np.testing.assert_allclose(last["loss"], (sum(parts), 1), rtol=1e-6)


@pytest.mark.long
def test_unrolled_layers_are_scanned_ones(source: data.ArraySource) -> None:
    batch = source.gather(np.arange(16))

    def task(scan_layers: bool) -> tasks.Task:
        without = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0, "scan_layers": scan_layers}
        return tasks.build("masked_lm", models.build(**TINY, heads=("mlm", "nsp"), **without))

    def loss(params: Any, task: tasks.Task) -> jax.Array:
        terms, _ = task.loss(params, {}, batch, jax.random.key(0))
        weights = task.weights(batch)
        return sum(terms[term] / weights[term] for term in terms)

    unrolled, scanned = task(False), task(True)
    params = jax.jit(unrolled.init)(jax.random.key(1), batch)["params"]
    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    one, grads_one = step(params, unrolled)
    two, grads_two = step(stack_layers(params), scanned)
    assert float(two) == pytest.approx(float(one), rel=1e-6)
    grads_one = stack_layers(grads_one)
    assert jax.tree.structure(grads_one) == jax.tree.structure(grads_two)
    assert grads_two["encoder"]["layers"]["output"]["kernel"].shape[0] == TINY["num_layers"]
    assert difference(seen(grads_two), seen(grads_one)) < 1e-5

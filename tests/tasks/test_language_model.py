"""Language modelling: losses compared with NumPy, evaluation of full streams, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models, tasks
from lamb_tpu.data.text.streams import EvalStreams, StreamOptions, TrainingStreams
from lamb_tpu.tasks import Task
from tests.raising import rejected

WORDS = [f"w{number}" for number in range(13)]
TEXT = np.random.default_rng(0).integers(13, size=101).astype(np.int32)


def task(**fields: Any) -> Task:
    model = models.build("lstm_lm", vocab_size=13, features=6, init_scale=0.5)
    return tasks.build("language_model", model, **fields)


def source(streams: int = 4, layout: str = "tensorflow") -> TrainingStreams:
    return TrainingStreams("text:train", TEXT, WORDS, streams, StreamOptions(5, layout))


def batches(actual: TrainingStreams) -> list[dict[str, Any]]:
    rows = np.arange(actual.streams)
    return [actual.gather(start + rows) for start in range(0, len(actual), actual.streams)]


def params(learning: Task) -> Any:
    batch = source().gather(np.arange(4))
    return jax.jit(learning.init)(jax.random.key(0), batch)["params"]


def losses(learning: Task, weights: Any, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each word's cross entropy in nats, and whether it was the likeliest; omits the first word."""

    def logits(weights: Any, words: jax.Array) -> jax.Array:
        outputs, _ = learning.model.apply({"params": weights}, {"inputs": words}, train=False)
        return outputs["logits"][0]

    actual = np.float64(jax.jit(logits)(weights, jnp.asarray(text[None, :-1])))
    chosen = actual[np.arange(len(actual)), text[1:]]
    return np.log(np.exp(actual).sum(1)) - chosen, actual.argmax(1) == text[1:]


@pytest.mark.parametrize("sum_over_time", [False, True])
def test_windows_of_a_stream_are_one_text(sum_over_time: bool) -> None:
    learning = task(sum_over_time=sum_over_time)
    weights, carry = params(learning), jnp.full((4, 2, 2, 6), 7.0)
    step = jax.jit(lambda weights, batch: learning.loss(weights, {}, batch, jax.random.key(1)))
    total = 0.0
    for batch in batches(source()):  # four windows of four streams of 25 words
        terms, (state, sums) = step(weights, {**batch, "carry": carry})
        carry = state["carry"]
        np.testing.assert_allclose(sums["perplexity"], (terms["cross_entropy"], 20))
        assert learning.weights(batch) == {"cross_entropy": 4 if sum_over_time else 20}
        total += float(terms["cross_entropy"])
    expected = sum(losses(learning, weights, TEXT[25 * row :][:21])[0].sum() for row in range(4))
    assert total == pytest.approx(expected, rel=1e-5)


def test_carry_gets_no_gradient_and_is_zero_at_the_start() -> None:
    learning = task()
    weights, (first, second, *_) = params(learning), batches(source())

    def value(carry: jax.Array, batch: Any) -> jax.Array:
        terms, _ = learning.loss(weights, {}, {**batch, "carry": carry}, jax.random.key(1))
        return terms["cross_entropy"]

    zero, other = jnp.zeros((4, 2, 2, 6)), jnp.full((4, 2, 2, 6), 0.5)
    loss = jax.jit(value)
    assert loss(zero, first) == loss(other, first)
    assert abs(loss(zero, second) - loss(other, second)) > 1e-3
    # A batch without a carry, such as in a plan, starts from zero and returns no carry.
    terms, (state, _) = learning.loss(weights, {}, second, jax.random.key(1))
    np.testing.assert_allclose(terms["cross_entropy"], loss(zero, second), rtol=1e-6)
    assert state == {}


def test_padding_of_the_last_window() -> None:
    learning = task()
    weights, last = params(learning), batches(source(4, "pytorch"))[-1]
    assert last["length"].tolist() == [4] * 4  # 24 targets in windows of 5
    assert learning.weights(last) == {"cross_entropy": 16}
    actual = jax.jit(lambda batch: learning.loss(weights, {}, batch, jax.random.key(1))[0])
    spoilt = {**last, "targets": last["targets"].copy(), "inputs": last["inputs"].copy()}
    spoilt["targets"][:, 4:] = spoilt["inputs"][:, 4:] = 3
    assert actual(last) == actual(spoilt)
    spoilt["targets"][0, 3] += 1
    assert actual(last) != actual(spoilt)


@pytest.mark.long
@pytest.mark.parametrize("streams", [1, 3, 40])
def test_evaluation_covers_full_streams(streams: int) -> None:
    learning = task()
    weights = params(learning)
    actual = EvalStreams("text:test", TEXT, WORDS, StreamOptions(7, eval_streams=streams))
    rows = np.arange(streams)
    batch = {**actual.gather(rows), "mask": np.ones(streams, np.float32)}
    evaluate = jax.jit(lambda batch: learning.evaluate(weights, {}, batch))
    sums = evaluate(batch)
    length = -(-100 // streams)
    parts = [
        losses(learning, weights, TEXT[start:][: length + 1]) for start in range(0, 100, length)
    ]
    nats, right = (np.concatenate(column) for column in zip(*parts))
    assert len(nats) == 100
    assert set(sums) == {"loss", "perplexity", "accuracy"} and sums["loss"] == sums["perplexity"]
    np.testing.assert_allclose(sums["loss"], (nats.sum(), 100), rtol=1e-5)
    np.testing.assert_allclose(sums["accuracy"], (right.sum(), 100))
    masked = evaluate({**batch, "mask": np.float32(rows > 0)})
    first = losses(learning, weights, TEXT[: length + 1])[0]
    np.testing.assert_allclose(
        masked["loss"], (nats.sum() - first.sum(), 100 - len(first)), rtol=1e-5, atol=1e-4
    )


def test_errors() -> None:
    with rejected("config.task.sum_over_time", 1, "has the wrong type"):
        task(sum_over_time=1)
    problem = "differs from the 12 words of the vocabulary of text:train"
    with rejected("config.model.vocab_size", 13, problem, "set config.model.vocab_size=12"):
        task().check(TrainingStreams("text:train", TEXT % 12, WORDS[:12], 4, StreamOptions(5)))
    with rejected(
        "config.model.name", ..., "names a network without a recurrent state", "such as 'lstm_lm'"
    ):
        tasks.build("language_model", models.build("mlp")).check(source())
    with rejected("text:test", ..., "has the fields ", "use a data set with inputs, targets"):
        task().check(EvalStreams("text:test", TEXT, WORDS, StreamOptions(5)))
    task().check(source())

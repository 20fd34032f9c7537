"""Translation: losses per token, and scores that depend on neither batch size nor devices."""

import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sacrebleu

from lamb_tpu import data, models, tasks
from lamb_tpu.data.text import grammar
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rows as rows_lib
from lamb_tpu.parallel import step as step_lib
from lamb_tpu.tasks.translation import Translation
from tests.raising import rejected

VOCAB = 250


@functools.cache
def model() -> models.Model:
    return models.build("gnmt", vocab_size=VOCAB, features=8, num_layers=2, dropout_rate=0.0)


@functools.cache
def source(split: str = "test[:23]", training: bool = False) -> Any:
    options = {"vocab_size": VOCAB, "max_length": 24, "widths": 1}
    return data.load("grammar_de_en", split, options=options, training=training)


def task(**fields: Any) -> Translation:
    return tasks.build("translation", model(), beam=2, max_length=9, **fields)


@functools.cache
def params() -> Any:
    # With large weights, words are far from equally likely, so translations differ and end.
    init = task().init(jax.random.key(0), source().gather(np.arange(2)))["params"]
    return jax.tree.map(lambda x: 8 * x, init)


def outputs(size: int, devices: int) -> dict[str, np.ndarray]:
    """Returns the outputs of `predict` for the full set, in batches of `size` over `devices` devices."""
    mesh = mesh_lib.make_mesh({"data": -1}, jax.devices()[:devices])
    predict = step_lib.make_predict_step(task(), mesh)
    parts = [
        predict(params(), {}, rows_lib.shard_batch(batch, size, mesh))
        for batch in data.eval_batches(source(), size, rows_lib.local_rows(size, mesh))
    ]
    return jax.tree.map(lambda *x: np.concatenate(x)[: len(source())], *jax.device_get(parts))


@pytest.mark.long
def test_one_score_whatever_the_batch_and_the_devices() -> None:
    expected, files = task().score(source(), outputs(23, 1))
    assert len(set(files["translations.txt"].splitlines())) > 1
    for size, devices in ((1, 1), (7, 1), (24, 4), (8, 8)):
        actual, texts = task().score(source(), outputs(size, devices))
        assert texts == files, (size, devices)
        assert actual["bleu"] == expected["bleu"] and actual["accuracy"] == expected["accuracy"]
        assert actual["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)


@pytest.mark.long
def test_perplexity_is_that_of_all_tokens() -> None:
    batch = source().gather(np.arange(len(source())))
    logits = model().apply({"params": params()}, batch, train=False)[0]["logits"]
    total = count = right = 0.0
    for row in range(len(source())):
        for place in range(batch["target_length"][row] - 1):
            label = batch["target_ids"][row, place + 1]
            total -= float(jax.nn.log_softmax(logits[row, place])[label])
            right += int(jnp.argmax(logits[row, place]) == label)
            count += 1
    scores, _ = task().score(source(), outputs(23, 1))
    assert scores["loss"] == pytest.approx(total / count, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert scores["accuracy"] == right / count
    assert set(scores) == set(Translation.score_names)


def test_bleu_is_sacrebleus() -> None:
    actual = outputs(23, 1)
    pairs = list(grammar.read("test"))[:23]
    # Half of the sentences are correct.
    right = source().gather(np.arange(12))["target_ids"]
    ids = np.zeros((23, max(right.shape[1], 9)), np.int32)
    ids[:, :9] = actual["translation"]
    ids[:12] = 0
    ids[:12, : right.shape[1]] = right
    scores, files = task().score(source(), actual | {"translation": ids})
    lines = files["translations.txt"].splitlines()
    assert lines[:12] == [pair.target for pair in pairs[:12]] and len(lines) == 23
    expected = sacrebleu.corpus_bleu(lines, [[pair.target for pair in pairs]])
    assert scores["bleu"] == expected.score > 10
    report = json.loads(files["bleu.json"])
    assert report["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert report["bleu"] == expected.score and report["beam"] == 2


@pytest.mark.long
def test_losses_and_weights_of_microbatches_add_up() -> None:
    train = source("train[:12]", True)
    batch = train.gather(np.arange(12))
    key = jax.random.key(0)

    def sums(batch: dict) -> tuple[Any, Any, Any]:
        terms, (_, metrics) = task().loss(params(), {}, batch, key)
        return terms["cross_entropy"], task().weights(batch)["cross_entropy"], metrics

    full = sums(batch)
    parts = [sums({name: x[a:b] for name, x in batch.items()}) for a, b in ((0, 5), (5, 12))]
    added = jax.tree.map(lambda *x: sum(x), *parts)
    np.testing.assert_allclose(jax.tree.leaves(added), jax.tree.leaves(full), rtol=1e-5)
    assert float(full[1]) == np.sum(batch["target_length"] - 1) == full[2]["accuracy"][1]


def test_padding_does_not_count() -> None:
    batch = source("train[:12]", True).gather(np.arange(12))
    narrow = {**batch, "target_ids": batch["target_ids"][:, : batch["target_length"].max()]}
    assert narrow["target_ids"].shape < batch["target_ids"].shape
    key = jax.random.key(0)
    actual, expected = (task().loss(params(), {}, x, key)[0] for x in (batch, narrow))
    np.testing.assert_allclose(actual["cross_entropy"], expected["cross_entropy"], rtol=1e-6)


@pytest.mark.parametrize(
    "name, value, valid",
    [
        ("label_smoothing", 1.0, "at least 0 and less than 1"),
        ("length_penalty", -1, "at least 0"),
        ("beam", 0, "at least 1"),
    ],
)
def test_fields_out_of_range(name: str, value: float, valid: str) -> None:
    with rejected(f"config.task.{name}", value, "is out of range", f"use {valid}"):
        tasks.build("translation", model(), **{name: value})


def test_data_and_network_that_do_not_fit() -> None:
    other = tasks.build("translation", models.build("gnmt", vocab_size=99))
    with rejected("config.model.vocab_size", 99, "differs from the 250 words of the vocabulary of"):
        other.check(source())
    with rejected(
        "digits:train", ..., "has the fields image, label", "use a data set with source_ids,"
    ):
        task().check(data.load("digits", "train"))
    with rejected("config.model.name", ..., "names a network that cannot decode"):
        tasks.build("translation", models.build("mlp")).check(source())
    task().check(source())

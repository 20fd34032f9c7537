"""GNMT: padding, single steps and dropout; test_golden_gnmt.py compares with published code."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models
from lamb_tpu.models.dropout import example_positions
from lamb_tpu.models.gnmt import GNMT
from tests.raising import rejected

VOCAB, ROWS = 23, 3


@functools.cache
def network(dropout_rate: float = 0.0) -> models.Model:
    return models.build(
        "gnmt", vocab_size=VOCAB, features=8, num_layers=3, dropout_rate=dropout_rate
    )


def batch(padding: int = 0) -> dict[str, np.ndarray]:
    """Returns three pairs of sentences with arbitrary padding."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, VOCAB, (ROWS, 6)), rng.integers(4, VOCAB, (ROWS, 5))
    other = np.random.default_rng(1).integers(0, VOCAB, (ROWS, padding))
    return {
        "source_ids": np.concatenate([source, other], 1),
        "source_length": np.array([6, 4, 1]),
        "target_ids": np.concatenate([target, other], 1),
    }


@functools.cache
def initial() -> Any:
    return jax.jit(network().init)(jax.random.key(0), batch())


def variables() -> Any:
    # Ten times the initial values, so that the attention is far from uniform.
    return jax.tree.map(lambda x: 10 * x, initial())


@functools.cache
def forward(model: models.Model) -> Callable[[Any, Any], jax.Array]:
    """Returns the logits of `model`, with one compiled program per shape."""
    return jax.jit(lambda *inputs: model.apply(*inputs, train=False)[0]["logits"])


def test_padding_changes_nothing() -> None:
    logits = forward(network())(variables(), batch())
    assert logits.shape == (ROWS, 4, VOCAB) and logits.dtype == jnp.float32
    padded = forward(network())(variables(), batch(padding=2))
    np.testing.assert_allclose(padded[:, :4], logits, atol=1e-5)
    changed = batch()
    changed["source_ids"][1, 4:] = 5  # after the second sentence
    again = forward(network())(variables(), changed)
    np.testing.assert_array_equal(again, logits)
    changed["source_ids"][1, 3] = 5
    other = forward(network())(variables(), changed)
    assert np.abs(other[1] - logits[1]).max() > 1e-3


def test_steps_are_the_teacher_forced_words() -> None:
    expected = forward(network())(variables(), batch())
    decode = network().decode
    memory, state = jax.jit(decode.start)(variables(), batch())
    step = jax.jit(decode.step)
    for number in range(expected.shape[1]):
        tokens = jnp.asarray(batch()["target_ids"][:, number])
        logits, weights, state = step(variables(), memory, state, tokens)
        np.testing.assert_allclose(logits, expected[:, number], atol=1e-5)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
        assert not np.any(weights[1, 4:]) and not np.any(weights[2, 1:])
    assert np.ptp(weights[0]) > 0.05  # the attention is not uniform


@pytest.mark.long
def test_dropout_belongs_to_rows() -> None:
    apply = functools.partial(network(0.5).apply, variables(), train=True, key=jax.random.key(1))
    full = apply(batch())[0]["logits"]
    mask = forward(network())(variables(), batch())
    assert np.abs(full - mask).max() > 0.3
    with example_positions(jnp.array([2, 1])):
        some = apply({name: value[[2, 1]] for name, value in batch().items()})[0]["logits"]
    np.testing.assert_allclose(some, full[jnp.array([2, 1])], atol=1e-5)


def test_bfloat16_is_near() -> None:
    short = models.build("gnmt", vocab_size=VOCAB, features=8, num_layers=3, dtype="bfloat16")
    expected = forward(network())(initial(), batch())
    actual = forward(short)(initial(), batch())
    assert actual.dtype == jnp.float32
    difference = np.abs(actual - expected).max()
    assert 0 < difference < 0.01


def test_layers_and_initial_values() -> None:
    params = initial()["params"]
    assert set(params["encoder"]) == {"forward", "backward", "layer_1", "layer_2", "keys"}
    assert set(params["decoder"]) == {"layer_0", "layer_1", "layer_2", "attention", "output"}
    layers = [params["decoder"][f"layer_{number}"]["input_kernel"].shape for number in range(3)]
    assert layers == [(8, 32), (16, 32), (16, 32)]  # the context is concatenated
    attention = params["decoder"]["attention"]
    np.testing.assert_allclose(attention["scale"], 8**-0.5)
    assert not np.any(attention["bias"])
    for leaf in (params["embedding"], params["encoder"]["forward"]["hidden_kernel"]):
        assert 0.09 < np.abs(leaf).max() <= 0.1


@pytest.mark.parametrize("name, value", [("num_layers", 1), ("features", 0), ("vocab_size", True)])
def test_sizes_out_of_range(name: str, value: Any) -> None:
    with rejected(f"config.model.{name}", value, "is out of range"):
        GNMT(**{name: value}).init(jax.random.key(0), batch(), train=False)

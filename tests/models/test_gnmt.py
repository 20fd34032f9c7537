"""GNMT: padding, single steps and dropout; test_golden_gnmt.py has the published code's numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models
from lamb_tpu.errors import UserError
from lamb_tpu.models.dropout import example_positions
from lamb_tpu.models.gnmt import GNMT

VOCAB, ROWS = 23, 3


@functools.cache
def network(dropout_rate: float = 0.0) -> models.Model:
    return models.build(
        "gnmt", vocab_size=VOCAB, features=8, num_layers=3, dropout_rate=dropout_rate
    )


def batch(padding: int = 0) -> dict[str, np.ndarray]:
    """Three pairs of sentences; beyond their lengths stands anything."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, VOCAB, (ROWS, 6)), rng.integers(4, VOCAB, (ROWS, 5))
    other = np.random.default_rng(1).integers(0, VOCAB, (ROWS, padding))
    return {
        "source_ids": np.concatenate([source, other], 1),
        "source_length": np.array([6, 4, 1]),
        "target_ids": np.concatenate([target, other], 1),
    }


@functools.cache
def variables() -> Any:
    # Ten times the initial values, so that the attention is far from even.
    return jax.tree.map(lambda x: 10 * x, network().init(jax.random.key(0), batch()))


@pytest.mark.long
def test_padding_changes_nothing() -> None:
    logits = network().apply(variables(), batch(), train=False)[0]["logits"]
    assert logits.shape == (ROWS, 4, VOCAB) and logits.dtype == jnp.float32
    padded = network().apply(variables(), batch(padding=2), train=False)[0]["logits"]
    np.testing.assert_allclose(padded[:, :4], logits, atol=1e-5)
    changed = batch()
    changed["source_ids"][1, 4:] = 5  # behind the second sentence
    again = network().apply(variables(), changed, train=False)[0]["logits"]
    np.testing.assert_array_equal(again, logits)
    changed["source_ids"][1, 3] = 5
    other = network().apply(variables(), changed, train=False)[0]["logits"]
    assert np.abs(other[1] - logits[1]).max() > 1e-3


def test_steps_are_the_teacher_forced_words() -> None:
    expected = network().apply(variables(), batch(), train=False)[0]["logits"]
    decode = network().decode
    memory, state = decode.start(variables(), batch())
    for number in range(expected.shape[1]):
        tokens = jnp.asarray(batch()["target_ids"][:, number])
        logits, weights, state = decode.step(variables(), memory, state, tokens)
        np.testing.assert_allclose(logits, expected[:, number], atol=1e-5)
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
        assert not np.any(weights[1, 4:]) and not np.any(weights[2, 1:])
    assert np.ptp(weights[0]) > 0.05  # it looks at some words more than at others


@pytest.mark.long
def test_dropout_belongs_to_rows() -> None:
    apply = functools.partial(network(0.5).apply, variables(), train=True, key=jax.random.key(1))
    whole = apply(batch())[0]["logits"]
    kept = network().apply(variables(), batch(), train=False)[0]["logits"]
    assert np.abs(whole - kept).max() > 0.3
    with example_positions(jnp.array([2, 1])):
        some = apply({name: value[[2, 1]] for name, value in batch().items()})[0]["logits"]
    np.testing.assert_allclose(some, whole[jnp.array([2, 1])], atol=1e-5)


def test_bfloat16_is_near() -> None:
    short = models.build("gnmt", vocab_size=VOCAB, features=8, num_layers=3, dtype="bfloat16")
    init = network().init(jax.random.key(0), batch())
    expected = network().apply(init, batch(), train=False)[0]["logits"]
    found = short.apply(init, batch(), train=False)[0]["logits"]
    assert found.dtype == jnp.float32
    difference = np.abs(found - expected).max()
    assert 0 < difference < 0.01


def test_layers_and_initial_values() -> None:
    params = network().init(jax.random.key(0), batch())["params"]
    assert set(params["encoder"]) == {"forward", "backward", "layer_1", "layer_2", "keys"}
    assert set(params["decoder"]) == {"layer_0", "layer_1", "layer_2", "attention", "output"}
    layers = [params["decoder"][f"layer_{number}"]["input_kernel"].shape for number in range(3)]
    assert layers == [(8, 32), (16, 32), (16, 32)]  # the context is joined
    attention = params["decoder"]["attention"]
    np.testing.assert_allclose(attention["scale"], 8**-0.5)
    assert not np.any(attention["bias"])
    for leaf in (params["embedding"], params["encoder"]["forward"]["hidden_kernel"]):
        assert 0.09 < np.abs(leaf).max() <= 0.1


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"num_layers": 1},
            "config.model.num_layers is 1; it must be a whole number of at least 2",
        ),
        ({"features": 0}, "config.model.features is 0; it must be a whole number of at least 1"),
        ({"vocab_size": True}, "config.model.vocab_size is True; it must be a whole number"),
    ],
)
def test_sizes_out_of_range(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GNMT(**fields).init(jax.random.key(0), batch(), train=False)

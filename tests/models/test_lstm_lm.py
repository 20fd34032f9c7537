"""The language model: state between windows, dropout, tied weights, and initial values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models
from lamb_tpu.models.dropout import example_positions
from lamb_tpu.models.lstm_lm import SIZES, LSTMLanguageModel
from tests.raising import rejected

WORDS, ROWS, STEPS, FEATURES = 37, 3, 6, 8


def network(**fields: Any) -> models.Model:
    return models.build("lstm_lm", vocab_size=WORDS, features=FEATURES, **fields)


def words(steps: int = STEPS) -> jax.Array:
    return jax.random.randint(jax.random.key(0), (ROWS, steps), 0, WORDS)


def variables(model: models.Model) -> Any:
    return jax.jit(model.init)(jax.random.key(1), {"inputs": words()})


def applied(model: models.Model, params: Any, inputs: Any, key: Any = None) -> Any:
    def outputs(params: Any, inputs: Any) -> Any:
        return model.apply(params, inputs, train=key is not None, key=key)[0]

    return jax.jit(outputs)(params, inputs)


@pytest.mark.parametrize("fields", [{}, {"tied": True, "num_layers": 3}])
def test_two_windows_are_one(fields: dict[str, Any]) -> None:
    model = network(**fields)
    params = variables(model)
    full = applied(model, params, {"inputs": words()})
    first = applied(model, params, {"inputs": words()[:, :4]})
    assert first["carry"].shape == (ROWS, *model.carry_shape)
    second = applied(model, params, {"inputs": words()[:, 4:], "carry": first["carry"]})
    actual = jnp.concatenate([first["logits"], second["logits"]], 1)
    np.testing.assert_allclose(actual, full["logits"], atol=1e-6)
    np.testing.assert_allclose(second["carry"], full["carry"], atol=1e-6)
    again = applied(model, params, {"inputs": words()[:, 4:]})
    assert np.abs(again["logits"] - second["logits"]).max() > 1e-4
    zero = {"inputs": words()[:, 4:], "carry": jnp.zeros_like(first["carry"])}
    np.testing.assert_array_equal(applied(model, params, zero)["logits"], again["logits"])


def test_carry_has_the_hidden_state_and_the_cells_of_each_layer() -> None:
    """The last hidden state of the last layer gives the last logits."""
    model = network()
    params = variables(model)
    outputs = applied(model, params, {"inputs": words()})
    dense = params["params"]["output"]
    logits = outputs["carry"][:, -1, 0] @ dense["kernel"] + dense["bias"]
    np.testing.assert_allclose(logits, outputs["logits"][:, -1], atol=1e-6)
    assert np.abs(outputs["carry"][:, :, 1]).max() > np.abs(outputs["carry"][:, :, 0]).max()


def test_tied_weights_share_the_embedding() -> None:
    tied, untied = (variables(network(tied=tied))["params"] for tied in (True, False))
    assert set(untied) - set(tied) == {"output"} and tied["output_bias"].shape == (WORDS,)
    model = network(tied=True)
    swapped = tied | {"embedding": {"embedding": tied["embedding"]["embedding"][::-1]}}
    before = applied(model, {"params": tied}, {"inputs": words()})
    # Numbering the words in reverse order reverses the order of the logits, except for the bias.
    after = applied(model, {"params": swapped}, {"inputs": WORDS - 1 - words()})
    bias = tied["output_bias"]
    np.testing.assert_allclose(
        (after["logits"] - bias)[..., ::-1], before["logits"] - bias, atol=1e-6
    )


def test_initial_values() -> None:
    for path, leaf in jax.tree.leaves_with_path(variables(network(init_scale=0.3))["params"]):
        assert 0.2 < np.abs(leaf).max() <= 0.3, path


def dropped(dropout: str, steps: int, positions: Any = None, rows: Any = slice(None)) -> jax.Array:
    """Returns training logits for the same word in each step, with one layer."""
    model = network(dropout=dropout, dropout_rate=0.5, num_layers=1, init_scale=1.0)
    params = variables(model)
    inputs = jnp.ones((ROWS, steps), jnp.int32)[rows]
    with example_positions(jnp.arange(ROWS)[rows] if positions is None else positions):
        return applied(model, params, {"inputs": inputs}, jax.random.key(2))["logits"]


def test_variational_masks_are_those_of_all_steps() -> None:
    """With constant masks, a constant input drives the layer to a fixed point."""
    last = dropped("variational", 60)
    np.testing.assert_allclose(last[:, -1], last[:, -2], atol=1e-3)
    plain = dropped("plain", 60)
    assert np.abs(plain[:, -1] - plain[:, -2]).max() > 0.1


@pytest.mark.parametrize("dropout", ["plain", "variational"])
def test_masks_belong_to_the_rows(dropout: str) -> None:
    full = dropped(dropout, 4)
    assert np.abs(full[0] - full[1]).max() > 0.1
    part = dropped(dropout, 4, jnp.array([1, 2]), slice(1, None))
    np.testing.assert_array_equal(part, full[1:])
    np.testing.assert_array_equal(dropped(dropout, 4), full)


def test_variational_drops_the_hidden_state_too() -> None:
    """In a window of two steps, a hidden unit that the mask drops gives its kernel row no gradient."""
    model = network(dropout="variational", dropout_rate=0.5, num_layers=1)
    params = variables(model)["params"]
    lstm = params["lstm_0"]
    key = jax.random.key(2)

    def trained(params: Any) -> jax.Array:
        inputs = {"inputs": words()[:, :2]}
        return model.apply({"params": params}, inputs, train=True, key=key)[0]["logits"]

    slopes = jax.jit(
        jax.grad(
            lambda kernel: jnp.sum(
                jnp.sin(trained(params | {"lstm_0": lstm | {"hidden_kernel": kernel}}))[:1]
            )
        )
    )(lstm["hidden_kernel"])
    rows = (
        np.abs(slopes).max(1) > 0
    )  # rows of the kernel that the first example's mask does not drop
    assert 0 < rows.sum() < FEATURES


def test_fields_of_the_papers() -> None:
    shapes = {
        size: jax.eval_shape(
            models.build("lstm_lm", **fields).init, jax.random.key(0), {"inputs": words()}
        )["params"]
        for size, fields in SIZES.items()
    }
    sizes = {
        size: sum(leaf.size for leaf in jax.tree.leaves(tree)) for size, tree in shapes.items()
    }
    # Two layers of 4 h (2 h + 1), an embedding and a kernel of 10,000 h, and 10,000 biases.
    assert sizes == {
        size: 2 * 4 * h * (2 * h + 1) + 10_000 * (2 * h + 1)
        for size, h in (("small", 200), ("medium", 650), ("large", 1500))
    }


def test_matrix_products_in_bfloat16_keep_a_float32_carry() -> None:
    exact, rounded = network(), network(dtype="bfloat16")
    params = variables(exact)
    expected = applied(exact, params, {"inputs": words()})
    actual = applied(rounded, params, {"inputs": words()})
    assert actual["carry"].dtype == actual["logits"].dtype == jnp.float32
    difference = np.abs(actual["logits"] - expected["logits"]).max()
    assert 0 < difference < 0.02


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"dropout": "weekly"}, ("config.model.dropout", "weekly", "is unknown")),
        ({"num_layers": 0}, ("config.model.num_layers", 0, "is out of range", "use at least 1")),
        ({"dropout_rate": 1.0}, ("dropout_rate", 1.0, "is out of range")),
    ],
)
def test_errors(fields: dict[str, Any], message: tuple[Any, ...]) -> None:
    with rejected(*message):
        variables(network(**fields))
    assert LSTMLanguageModel().carry_shape == (2, 2, 200)

"""Every shipped network and its loss, traced with strict dtype promotion."""

import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from lamb_tpu import models, tasks
from lamb_tpu.models.efficientnet import BlockStage
from lamb_tpu.models.promotion import Dense, LayerNorm

ROWS, LENGTH = 4, 8
Fields = dict[str, Any]


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ROWS, *shape), dtype)


def _images(side: int, channels: int = 3) -> Fields:
    return {"image": _array(side, side, channels, dtype=jnp.uint8), "label": _array()}


WORDS = _array(LENGTH)
TEXT = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), WORDS)
MASKED = {
    **TEXT,
    "masked_positions": _array(3),
    "masked_ids": _array(3),
    "masked_weights": _array(3, dtype=jnp.float32),
    "next_sentence_label": _array(),
}
SPANS = {
    **TEXT,
    "start_position": _array(),
    "end_position": _array(),
    "token_mask": _array(LENGTH, dtype=jnp.bool_),
}
STREAM = {"inputs": WORDS, "targets": WORDS, "start": _array(dtype=jnp.bool_), "length": _array()}
PAIRS = {
    "source_ids": WORDS,
    "source_length": _array(),
    "target_ids": WORDS,
    "target_length": _array(),
}
BERT = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 11,
    "max_positions": LENGTH,
}
LSTM = {"vocab_size": 11, "features": 8, "num_layers": 2, "dropout_rate": 0.1}
STAGES = (BlockStage(1, 3, 1, 1, 8), BlockStage(2, 5, 2, 6, 8))
SMOOTHED = {"label_smoothing": 0.1}

SCANNED = {**BERT, "scan_layers": True, "remat": "full"}
TIED = {**LSTM, "tied": True, "dropout": "variational"}
NORMED = {"batch_norm": True, "dropout_rate": 0.1}
GNMT = {"vocab_size": 11, "features": 8, "num_layers": 3}
# Network, possibly with a suffix -> network fields, task, task fields, batch.
CASES: dict[str, tuple[Fields, str, Fields, Fields]] = {
    "mlp": (NORMED, "classification", {**SMOOTHED, "mixup_alpha": 0.2}, _images(8)),
    "lenet": ({}, "classification", SMOOTHED, _images(28, 1)),
    "lenet5": ({}, "classification", {}, _images(28, 1)),
    "row_lstm": ({}, "classification", {}, _images(8, 1)),
    "resnet18": ({}, "classification", {**SMOOTHED, "cutmix_alpha": 1.0}, _images(32)),
    "davidnet": ({"width": 8}, "classification", {}, _images(32)),
    "efficientnet_b0": ({"stages": STAGES}, "classification", {}, _images(16)),
    "bert": (BERT, "masked_lm", {}, MASKED),
    "bert-scanned": (SCANNED, "masked_lm", {}, MASKED),
    "bert-spans": ({**BERT, "heads": ("span",)}, "question_answering", {}, SPANS),
    "lstm_lm": (LSTM, "language_model", {}, STREAM),
    "lstm_lm-tied": (TIED, "language_model", {}, STREAM),
    "gnmt": (GNMT, "translation", {}, PAIRS),
}


def _network(name: str) -> str:
    return name.partition("-")[0]


def _has_dtype(name: str) -> bool:
    return "dtype" in inspect.signature(models.MODULES[_network(name)]).parameters


@pytest.mark.parametrize(
    "name, dtype",
    [
        (name, dtype)
        for name in CASES
        for dtype in (("float32", "bfloat16") if _has_dtype(name) else ("float32",))
    ],
)
def test_strict_promotion(name: str, dtype: str) -> None:
    fields, problem, options, batch = CASES[name]
    if _has_dtype(name):
        fields = {**fields, "dtype": dtype}
    model = models.build(_network(name), **fields)
    task = tasks.build(problem, model, **options)
    key = jax.random.key(0)

    def loss(params: Any, rest: Any, batch: Any) -> Any:
        terms, after = task.loss(params, rest, batch, key)
        means = [terms[name] / weight for name, weight in task.weights(batch).items()]
        return sum(means[1:], means[0]), after

    with jax.numpy_dtype_promotion("strict"):
        variables = jax.eval_shape(task.init, key, batch)
        params = variables["params"]
        rest = {name: part for name, part in variables.items() if name != "params"}
        training = dict(batch)
        if model.carry_shape:
            training["carry"] = _array(*model.carry_shape, dtype=jnp.float32)
        (value, _), slopes = jax.eval_shape(
            jax.value_and_grad(loss, has_aux=True), params, rest, training
        )
        evaluated = {**batch, "mask": _array(dtype=jnp.float32)}
        if problem == "language_model":  # consecutive windows of text
            evaluated |= {field: _array(2, LENGTH) for field in ("inputs", "targets")}
        jax.eval_shape(task.evaluate, params, rest, evaluated)
        if isinstance(task, tasks.HostScored):
            jax.eval_shape(task.predict, params, rest, evaluated)
    assert (value.shape, value.dtype) == ((), jnp.float32)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), slopes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), params
    )


def test_every_family_of_networks_has_a_case() -> None:
    def families(names: Iterable[str]) -> set[str]:
        return {name.partition("_b")[0].rstrip("0123456789") for name in names}

    assert families(map(_network, CASES)) == families(models.MODULES)


@pytest.mark.parametrize(
    "ours, flax, fields",
    [
        (Dense, nn.Dense, {"features": 3, "dtype": jnp.bfloat16}),
        (LayerNorm, nn.LayerNorm, {"dtype": jnp.bfloat16, "use_fast_variance": False}),
    ],
)
def test_layers_have_flaxs_values_and_names(ours: Any, flax: Any, fields: Fields) -> None:
    x = jax.random.normal(jax.random.key(1), (4, 5), jnp.bfloat16)
    variables = flax(**fields).init(jax.random.key(0), x)
    expected = flax(**fields).apply(variables, x)
    with jax.numpy_dtype_promotion("strict"):
        assert jax.tree.all(
            jax.tree.map(np.array_equal, ours(**fields).init(jax.random.key(0), x), variables)
        )
        np.testing.assert_array_equal(ours(**fields).apply(variables, x), expected)

"""Reproduces the recorded family `legw_lstm`: batch layouts of a text, and training runs of LSTMs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import models, optim, tasks
from lamb_tpu.data.text.streams import StreamOptions, TrainingStreams, cut
from lamb_tpu.data.text.words import encode, make_vocabulary, split_words
from lamb_tpu.optim import clipping, schedules
from lamb_tpu.store.metrics import mean_metrics
from tests.models.lstm_layouts import from_torch, to_tensorflow

Entry = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]

_LOSSES = {"sum_over_time": True, "mean": False}


def ptb_batching(entry: Entry, recorded: Arrays) -> dict[str, np.ndarray]:
    """Returns the batches of a short text in the layouts of TensorFlow, PyTorch and Zaremba."""
    hyper = entry["hyper"]
    count, steps = hyper["batch_size"], hyper["num_steps"]
    words = split_words(str(recorded["text"]))
    vocabulary = make_vocabulary(words)
    ids = encode(words, vocabulary, "text")

    def windows(layout: str) -> list[dict[str, np.ndarray]]:
        source = TrainingStreams("text:train", ids, vocabulary, count, StreamOptions(steps, layout))
        rows = np.arange(count)
        return [source.gather(start + rows) for start in range(0, len(source), count)]

    tensorflow, pytorch = windows("tensorflow"), windows("pytorch")
    lengths = [int(batch["length"][0]) for batch in pytorch]

    def joined(field: str) -> np.ndarray:
        # The steps are the first axis, and the padding is removed.
        parts = zip(pytorch, lengths, strict=True)
        return np.concatenate([batch[field][:, :length].T for batch, length in parts])

    return {
        "ids": ids,
        "words": np.array(vocabulary),
        "tf_x": np.stack([batch["inputs"] for batch in tensorflow]),
        "tf_y": np.stack([batch["targets"] for batch in tensorflow]),
        "pytorch_x": joined("inputs"),
        "pytorch_y": joined("targets"),
        "pytorch_lengths": np.array(lengths),
        "zaremba": cut(ids, count, "zaremba").T,
    }


def torch_lstm_lm(entry: Entry, recorded: Arrays) -> dict[str, np.ndarray]:
    """Repeats the training of an nn.LSTM by the rules of TensorFlow's tutorial.

    Parameters and gradients are in PyTorch's layout with two biases per layer: both biases are
    updated, and both count in the gradient norm.
    """
    hyper = entry["hyper"]
    epochs, windows = hyper["epochs"], hyper["windows_per_epoch"]
    model = models.build(
        "lstm_lm",
        vocab_size=hyper["vocabulary"],
        features=hyper["hidden"],
        num_layers=hyper["layers"],
    )
    task = tasks.build("language_model", model, sum_over_time=_LOSSES[hyper["loss"]])
    rate = _rate(hyper, epochs, windows)
    tx = optim.make_optimizer(
        {"name": "sgd", "rules": "all", "clip_global_norm": hyper["clip"]}, rate
    )

    @jax.jit
    def update(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            terms, rest = task.loss(_ours(params, hyper["layers"]), {}, batch, jax.random.key(0))
            (weight,) = task.weights(batch).values()
            return terms["cross_entropy"] / weight, rest

        (value, (rows, sums)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return new, state, grads, value, rows["carry"], sums

    params: Any = {
        key.removeprefix("p32/"): jnp.asarray(value[0])
        for key, value in recorded.items()
        if key.startswith("p32/")
    }
    state, carry = tx.init(params), jnp.zeros((hyper["batch"], *model.carry_shape))
    trained, slopes, losses, carries, perplexities = [params], [], [], [], []
    for _ in range(epochs):
        costs = []
        for window in range(windows):
            batch = {
                "inputs": jnp.asarray(recorded["x"][window], jnp.int32),
                "targets": jnp.asarray(recorded["y"][window], jnp.int32),
                "start": jnp.full(hyper["batch"], window == 0),
                "carry": carry,
            }
            params, state, grads, value, carry, sums = update(params, state, batch)
            trained.append(params)
            slopes.append(grads)
            losses.append(value)
            carries.append(carry.transpose(2, 1, 0, 3))
            costs.append(sums)
        perplexities.append(mean_metrics(costs)["perplexity"])
    actual = {
        "loss": np.array(losses),
        "norm": np.array([clipping.global_norm(grads) for grads in slopes]),
        "lr": np.array([rate(step) for step in range(epochs * windows)]),
        "state": np.stack(carries),
        "ppl": np.array(perplexities),
    }
    for name in params:
        actual[f"p32/{name}"] = np.stack([tree[name] for tree in trained])
        actual[f"grad32/{name}"] = np.stack([tree[name] for tree in slopes])
    for layer in range(hyper["layers"]):
        first = to_tensorflow(_ours(trained[0], hyper["layers"])[f"lstm_{layer}"])
        actual |= {f"tf_layout/{name}{layer}": value for name, value in first.items()}
    return {key: actual[key] for key in recorded if key in actual}


def _rate(hyper: Mapping[str, Any], epochs: int, windows: int) -> optax.Schedule:
    """Returns the schedule lr * lr_decay ^ max(epoch + 1 - max_epoch, 0), with epochs counted from 0."""
    first = max(hyper["max_epoch"], 1)
    peak = hyper["lr"] * hyper["lr_decay"] ** (first - hyper["max_epoch"])
    edges = [windows * epoch for epoch in range(first, epochs)]
    if not edges or hyper["lr_decay"] == 1:
        return lambda count: jnp.full(jnp.shape(count), peak, jnp.float32)
    decay = schedules.step_decay(edges, hyper["lr_decay"])
    return schedules.warmup(peak, epochs * windows, decay=decay, decay_from="zero")


def _ours(params: Any, layers: int) -> dict[str, Any]:
    """Converts the parameters of a PyTorch module to those of our network."""
    actual: dict[str, Any] = {
        "embedding": {"embedding": params["embed"]},
        "output": {"kernel": params["out_w"].T, "bias": params["out_b"]},
    }
    for layer in range(layers):
        weights = {
            f"{long}_l{layer}": params[f"{short}{layer}"]
            for long, short in (
                ("weight_ih", "w_ih"),
                ("weight_hh", "w_hh"),
                ("bias_ih", "b_ih"),
                ("bias_hh", "b_hh"),
            )
        }
        actual[f"lstm_{layer}"] = from_torch(weights, f"_l{layer}")
    return actual


def _of(repeat: Callable[[Entry, Arrays], dict[str, np.ndarray]]) -> Callable[..., Any]:
    """Adapts `repeat` for `golden_families`: the result has only the arrays that were recorded."""

    def repeated(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
        del inputs  # every entry has its own inputs
        actual = repeat(entry, recorded)
        return {
            key: value.astype(recorded[key].dtype)
            for key, value in actual.items()
            if key in recorded
        }

    return repeated


REPEATS = {"ptb_batching": _of(ptb_batching), "torch_lstm_lm": _of(torch_lstm_lm)}

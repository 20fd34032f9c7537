"""Reproduces recorded results of published code: GNMT, its beam search, and label smoothing."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.models import beam_search, gnmt
from lamb_tpu.tasks.smoothing import smoothed_cross_entropy
from tests.models.lstm_layouts import from_torch, to_torch

Entry = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray]

_INPUTS = ("param/", "source", "target")
# Our dense layers -> their names in the published code.
_DENSE = {
    ("encoder", "keys"): "decoder.att_rnn.attn.linear_k",
    ("decoder", "attention", "queries"): "decoder.att_rnn.attn.linear_q",
    ("decoder", "output"): "decoder.classifier.classifier",
}
_VECTORS = {"vector": "linear_att", "scale": "normalize_scalar", "bias": "normalize_bias"}


def _lstms(layers: int) -> dict[tuple[str, str], tuple[str, str]]:
    """Returns our LSTM layers, with the prefix and suffix of their names in the published code."""
    actual = {
        ("encoder", "forward"): ("encoder.rnn_layers.0.", "_l0"),
        ("encoder", "backward"): ("encoder.rnn_layers.0.", "_l0_reverse"),
        ("decoder", "layer_0"): ("decoder.att_rnn.rnn.", "_l0"),
    }
    for number in range(1, layers):
        actual["encoder", f"layer_{number}"] = (f"encoder.rnn_layers.{number}.", "_l0")
        actual["decoder", f"layer_{number}"] = (f"decoder.rnn_layers.{number - 1}.", "_l0")
    return actual


def from_published(weights: Arrays, layers: int) -> dict[str, Any]:
    """Converts the published code's parameters to those of our network."""
    params: dict[str, Any] = {
        "embedding": weights["encoder.embedder.weight"],
        "encoder": {},
        "decoder": {"attention": {}},
    }
    for (part, name), (prefix, suffix) in _lstms(layers).items():
        inside = {
            key.removeprefix(prefix): value
            for key, value in weights.items()
            if key.startswith(prefix)
        }
        params[part][name] = from_torch(inside, suffix)
    for (*path, name), theirs in _DENSE.items():
        node = params
        for part in path:
            node = node[part]
        node[name] = {"kernel": weights[f"{theirs}.weight"].T}
        if f"{theirs}.bias" in weights:
            node[name]["bias"] = weights[f"{theirs}.bias"]
    for name, theirs in _VECTORS.items():
        params["decoder"]["attention"][name] = weights[f"decoder.att_rnn.attn.{theirs}"]
    return params


def gradient_to_published(slope: Mapping[str, Any], layers: int) -> dict[str, np.ndarray]:
    """Returns the gradient under the published code's names.

    Each LSTM of the published code has two biases, which get the same gradient.
    """
    actual = {"encoder.embedder.weight": slope["embedding"]}
    for (part, name), (prefix, suffix) in _lstms(layers).items():
        theirs = to_torch(slope[part][name], suffix)
        theirs[f"bias_hh{suffix}"] = theirs[f"bias_ih{suffix}"]
        actual |= {prefix + key: value for key, value in theirs.items()}
    for path, theirs in _DENSE.items():
        node = slope
        for part in path:
            node = node[part]
        actual[f"{theirs}.weight"] = node["kernel"].T
        if "bias" in node:
            actual[f"{theirs}.bias"] = node["bias"]
    for name, theirs in _VECTORS.items():
        actual[f"decoder.att_rnn.attn.{theirs}"] = slope["decoder"]["attention"][name]
    return {key: np.asarray(value) for key, value in actual.items()}


def repeat_gnmt(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Reproduces an entry's outputs, loss with gradients, and searches.

    Uses float64: with float32, sums of many terms have errors of 1e-5 in both implementations.
    """
    del inputs  # the entry has its own inputs
    with jax.enable_x64(True):
        actual = _gnmt(entry, recorded)
    return {
        key: np.asarray(actual[key], value.dtype)
        for key, value in recorded.items()
        if not key.startswith(_INPUTS)
    }


def _gnmt(entry: Entry, recorded: Arrays) -> dict[str, Any]:
    hyper = entry["hyper"]
    layers, special = hyper["layers"], hyper["special"]
    weights = {
        key.removeprefix("param/"): value.astype(np.float64)
        for key, value in recorded.items()
        if key.startswith("param/")
    }
    params = from_published(weights, layers)
    network = gnmt.GNMT(hyper["vocabulary"], hyper["hidden"], layers, 0.0, dtype="float64")
    decode = gnmt.decode(network)
    batch = {
        "source_ids": recorded["source"].T,
        "target_ids": recorded["target"].T,
        "source_length": recorded.get("source_lengths", np.array(hyper["lengths"])),
    }
    labels = batch["target_ids"][:, 1:]

    @jax.jit
    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = network.apply({"params": params}, batch, train=False)["logits"]
        total, _ = smoothed_cross_entropy(
            logits, labels, labels != special["PAD"], hyper["smoothing"]
        )
        return total, logits

    (total, logits), slope = jax.value_and_grad(loss, has_aux=True)(params)
    memory, state = jax.jit(decode.start)({"params": params}, batch)
    actual = {
        "encoder_output": memory.outputs.swapaxes(0, 1),
        "logits": logits.swapaxes(0, 1),
        "loss": total,
        **{f"grad32/{k}": v for k, v in gradient_to_published(slope, layers).items()},
    }

    def step(memory: Any, state: Any, tokens: jax.Array) -> Any:
        return decode.step({"params": params}, memory, state, tokens)

    for number, options in enumerate(hyper["searches"]):
        settings = beam_search.Search(
            hyper["max_seq_len"],
            special["BOS"],
            special["EOS"],
            max(options["beam"], 1),
            options["len_norm_factor"],
            options["len_norm_const"],
            options["cov_penalty_factor"],
            published=True,
        )
        result = beam_search.search(step, memory, state, settings)
        chosen = jnp.argmax(result.scores, -1)[:, None]
        lengths = jnp.take_along_axis(result.lengths, chosen, 1)[:, 0]
        if options["beam"]:
            tokens = jnp.take_along_axis(result.tokens, chosen[..., None], 1)[:, 0]
            values = {
                "tokens": tokens,
                "steps": result.steps,
                "beam_scores": result.scores,
                "beam_tokens": result.tokens,
                "beam_lengths": result.lengths,
                "coverage": result.coverage,
            }
        else:  # the published greedy search ends a row at its end token
            tokens = beam_search.best(result, settings.end)
            values = {"tokens": tokens, "steps": lengths.max() - 1}
        actual |= {f"search{number}/{k}": v for k, v in (values | {"lengths": lengths}).items()}
    return actual


def repeat_smoothing(entry: Entry, recorded: Arrays, inputs: Arrays) -> dict[str, np.ndarray]:
    """Reproduces the three published losses of an entry, with their gradients."""
    del inputs
    hyper = entry["hyper"]
    smoothing, classes = hyper["smoothing"], recorded["logits"].shape[-1]
    counts = recorded["targets"] != hyper["padding_index"]
    actual = {}
    for name, share in {
        "gnmt": smoothing,
        "torch": smoothing,
        "fairseq": smoothing * classes / (classes - 1),
    }.items():

        def loss(logits: jax.Array) -> jax.Array:
            total, weight = smoothed_cross_entropy(logits, recorded["targets"], counts, share)
            return {"sum": total, "mean": total / weight}[hyper["reduction"]]

        value, slope = jax.value_and_grad(loss)(jnp.asarray(recorded["logits"]))
        actual |= {f"{name}/loss": value, f"{name}/grad": slope}
    return {key: np.asarray(actual[key]) for key in recorded if key in actual}


REPEATS = {"mlperf_gnmt": repeat_gnmt, "label_smoothing": repeat_smoothing}

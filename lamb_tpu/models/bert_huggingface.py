"""BERT checkpoints in the layout of Hugging Face's transformers."""

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError
from safetensors.numpy import save_file

from lamb_tpu.errors import UserError, unreadable
from lamb_tpu.files import reading, writing
from lamb_tpu.files import tensors as tensors_lib
from lamb_tpu.files.tensors import INDEX, WEIGHTS
from lamb_tpu.models.bert_network import BertConfig
from lamb_tpu.models.transformer import unstack_layers

CONFIG = "config.json"

# Fields of BertConfig, and their names in config.json.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "max_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "initializer_range": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}
# `hidden_act` -> our name. transformers has two names for the tanh approximation.
_GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# Heads -> the class in transformers that has exactly these heads.
_ARCHITECTURES = {
    ("mlm", "nsp"): "BertForPreTraining",
    ("mlm",): "BertForMaskedLM",
    ("nsp",): "BertForNextSentencePrediction",
    ("span",): "BertForQuestionAnswering",
}
# For each head, a tensor that only checkpoints with this head have.
_HEAD_TENSORS = {
    "mlm": "cls.predictions.bias",
    "nsp": "cls.seq_relationship.weight",
    "span": "qa_outputs.weight",
}
_PREFIX, _ENCODER_PREFIXES = "bert.", ("embeddings.", "encoder.", "pooler.")
# Copies of tied tensors -> the originals. Some published files contain both.
_DECODER = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Modules of an encoder layer: our path -> Hugging Face's name.
_LAYER = {
    "attention/query": "attention.self.query",
    "attention/key": "attention.self.key",
    "attention/value": "attention.self.value",
    "attention/output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def _modules(config: BertConfig) -> Iterator[tuple[str, str]]:
    """Yields our path and Hugging Face's name of every dense layer and LayerNorm."""
    yield "embeddings/norm", "bert.embeddings.LayerNorm"
    for index in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            yield f"encoder/layer_{index}/{ours}", f"bert.encoder.layer.{index}.{theirs}"
    if "mlm" in config.heads:
        yield "mlm/dense", "cls.predictions.transform.dense"
        yield "mlm/norm", "cls.predictions.transform.LayerNorm"
    if "nsp" in config.heads:
        yield "pooler", "bert.pooler.dense"
        yield "nsp", "cls.seq_relationship"
    if "span" in config.heads:
        yield "span", "qa_outputs"


def _names(config: BertConfig) -> dict[str, str]:
    """Returns our path -> Hugging Face's name for every parameter, with unrolled layers."""
    names = {
        f"embeddings/{name}": f"bert.embeddings.{name}_embeddings.weight"
        for name in ("word", "position", "token_type")
    }
    for ours, theirs in _modules(config):
        names[f"{ours}/{'scale' if ours.endswith('norm') else 'kernel'}"] = f"{theirs}.weight"
        names[f"{ours}/bias"] = f"{theirs}.bias"
    if "mlm" in config.heads:
        names["mlm/bias"] = "cls.predictions.bias"
    return names


def from_huggingface(directory: str | os.PathLike[str]) -> tuple[BertConfig, dict[str, Any]]:
    """Reads a BERT in Hugging Face's format.

    Args:
      directory: folder with config.json, and with model.safetensors or the shards that
        model.safetensors.index.json lists. The network may be a BertForPreTraining,
        BertForMaskedLM, BertForNextSentencePrediction, BertForQuestionAnswering, or a BertModel,
        which has no head. The tensors determine the heads. Without the head 'nsp', a pooler is
        ignored.

    Returns:
      The config, with float32 activations and unrolled layers (see `transformer.stack_layers`), and
      the parameters as float32 NumPy arrays.

    Raises:
      UserError: a file is missing or malformed; config.json does not describe a BERT; a tensor is
        missing, unexpected, not finite or of another shape than the config requires; or the output
        matrix differs from the word embeddings.
    """
    directory = pathlib.Path(directory)
    settings = _read_settings(directory)
    file = tensors_lib.find(directory)
    if file is None:
        for other in sorted(directory.iterdir()):
            tensors_lib.check_format(other, str(directory))
        problem = f"has no {WEIGHTS}, and no {INDEX} with its shards"
        raise UserError(directory, ..., problem, "copy the weights into this folder")
    tensors = tensors_lib.load(file)
    has_prefix = any(name.startswith(_PREFIX) for name in tensors)

    def renamed(name: str) -> str:
        # Checkpoints converted from TensorFlow have TensorFlow's names.
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        # BertModel, which is only the encoder, saves its tensors without the prefix.
        return name if has_prefix or not name.startswith(_ENCODER_PREFIXES) else _PREFIX + name

    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    # config.json may not list the heads.
    heads = tuple(head for head, name in _HEAD_TENSORS.items() if name in tensors)
    config = _config(settings, heads, directory / CONFIG)
    _check_tied(tensors, config, file)
    return config, _params(tensors, config, file)


def to_huggingface(
    config: BertConfig, params: Mapping[str, Any], directory: str | os.PathLike[str]
) -> None:
    """Writes config.json and model.safetensors for `from_pretrained` of transformers.

    As in transformers, the output matrix for masked words is not written, because it equals the word
    embeddings.

    Args:
      config: a config with the heads 'mlm' and 'nsp' (for BertForPreTraining), or only one of
        'mlm', 'nsp' and 'span'.
      params: the network's parameters, with layers unrolled or scanned; written in float32.
      directory: folder to write; created if it is missing. Existing files are replaced.

    Raises:
      UserError: transformers has no network with these heads, or the folder cannot be written.
      ValueError: the parameters do not match the config.
    """
    if config.heads not in _ARCHITECTURES:
        known = ", ".join("+".join(heads) for heads in _ARCHITECTURES)
        problem = "does not match a Hugging Face network"
        raise UserError("config.model.heads", config.heads, problem, f"use one of {known}")
    # transformers has no stacked layers.
    flat = flatten_dict(unstack_layers(params), sep="/")
    names = _names(config)
    if set(flat) != set(names):
        differing = ", ".join(sorted(set(flat) ^ set(names)))
        raise ValueError(f"params does not match the config; add or remove {differing}")
    tensors = {
        name: np.ascontiguousarray(_theirs(path, np.asarray(flat[path], np.float32)))
        for path, name in names.items()
    }
    settings = {
        "architectures": [_ARCHITECTURES[config.heads]],
        "model_type": "bert",
        "hidden_act": "gelu" if config.gelu == "erf" else "gelu_new",
        "position_embedding_type": "absolute",
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
    }
    write_folder(directory, settings, tensors)


def write_folder(
    directory: str | os.PathLike[str],
    settings: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
) -> None:
    """Writes `settings` as config.json and `tensors` as model.safetensors into a folder.

    Creates the folder if it is missing, and replaces existing files. Raises UserError if the folder
    cannot be written.
    """
    directory = pathlib.Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        writing.replace(directory / CONFIG, text, "the folder")
        # The metadata that transformers and timm write.
        save_file(dict(tensors), directory / WEIGHTS, {"format": "pt"})
        # safetensors makes its file readable only by the owner.
        shutil.copymode(directory / CONFIG, directory / WEIGHTS)
    except (OSError, SafetensorError) as error:  # no permission, or a full disk
        raise unreadable(directory, error, "give another folder", "cannot be written") from None


def _theirs(path: str, leaf: np.ndarray) -> np.ndarray:
    # PyTorch stores a dense layer's matrix as (outputs, inputs). This function is its own inverse.
    return leaf.T if path.endswith("/kernel") else leaf


def _read_settings(directory: pathlib.Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.exists():
        raise UserError(directory, ..., f"has no {CONFIG}", "copy this file into the folder")
    try:
        settings = reading.read_json(file)
    except ValueError as error:
        raise unreadable(file, error, "copy it again", "is not JSON") from None
    # Accepted values; None means that config.json may omit the key.
    expected = {
        "model_type": ("bert",),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "tie_word_embeddings": (True, None),
        "hidden_act": (*_GELUS, None),
    }
    for name, values in expected.items():
        value = settings.get(name) if isinstance(settings, dict) else None
        if value not in values:
            known = " or ".join(repr(value) for value in values if value is not None)
            raise UserError(file, ..., f"says {name}={value!r}", f"use a BERT with {name}={known}")
    return settings


def _config(settings: Mapping[str, Any], heads: tuple[str, ...], file: pathlib.Path) -> BertConfig:
    fields = {ours: settings[theirs] for ours, theirs in _FIELDS.items() if theirs in settings}
    gelu = _GELUS[settings.get("hidden_act") or "gelu"]
    try:
        return BertConfig(**fields, heads=heads, gelu=gelu, dtype="float32")
    except UserError as error:
        raise UserError(f"{file} does not describe a BERT: {error.key}", *error.args[1:]) from None


def _check_tied(tensors: Mapping[str, np.ndarray], config: BertConfig, file: pathlib.Path) -> None:
    # Our network has a single array for each of these pairs, so the two tensors must be equal.
    for copy, original in _DECODER.items():
        if copy in tensors and not (
            original in tensors and np.array_equal(tensors[copy], tensors[original])
        ):
            raise UserError(
                file, ..., f"has a {copy} that differs from {original}", "make the two equal"
            )


def _params(
    tensors: Mapping[str, np.ndarray], config: BertConfig, file: pathlib.Path
) -> dict[str, Any]:
    """Checks the names and shapes of the tensors, and returns the tree of parameters."""
    names = _names(config)
    missing = [name for name in names.values() if name not in tensors]
    if missing:
        raise tensors_lib.differ(file, "lacks", missing)
    # Older versions of transformers save `position_ids`, the constant 0, 1, 2, ...
    ignored = {*names.values(), *_DECODER, "bert.embeddings.position_ids"}
    extra = [
        name for name in tensors if name not in ignored and not name.startswith("bert.pooler.")
    ]
    if extra:
        raise tensors_lib.differ(file, "also has", extra)
    # Parameter shapes do not depend on the batch size or the sequence length.
    token = jax.ShapeDtypeStruct((1, 1), np.int32)
    inputs = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), token)
    init = functools.partial(config.module().init, train=False)
    shapes = jax.eval_shape(init, jax.random.key(0), inputs)["params"]
    params = {}
    for ours, shape in flatten_dict(shapes, sep="/").items():
        tensor = tensors[names[ours]]
        params[ours] = np.ascontiguousarray(_theirs(ours, np.asarray(tensor, np.float32)))
        if params[ours].shape != shape.shape:
            # Report the shape in the layout of the file.
            expected = shape.shape[::-1] if ours.endswith("/kernel") else shape.shape
            problem = f"has {names[ours]} of shape {tensor.shape}"
            raise UserError(file, ..., problem, f"use shape {expected}, as {CONFIG} says")
    return unflatten_dict(params, sep="/")

"""BERT checkpoints in the layout of Hugging Face's transformers."""

import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from lamb_tpu.errors import UserError
from lamb_tpu.files import reading
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
# `hidden_act` -> our name. transformers has two names for the same approximation by tanh.
_GELUS = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# Heads -> the class of transformers with exactly these heads.
_ARCHITECTURES = {
    ("mlm", "nsp"): "BertForPreTraining",
    ("mlm",): "BertForMaskedLM",
    ("nsp",): "BertForNextSentencePrediction",
    ("span",): "BertForQuestionAnswering",
}
# A tensor that only this head has.
_TELLING = {
    "mlm": "cls.predictions.bias",
    "nsp": "cls.seq_relationship.weight",
    "span": "qa_outputs.weight",
}
_PREFIX, _OF_ENCODER = "bert.", ("embeddings.", "encoder.", "pooler.")
# Copies of tied tensors -> the originals. Some published files hold both.
_DECODER = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# Modules of an encoder layer: our path -> their name.
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
    """Yields our path and their name of every dense layer and LayerNorm."""
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
    """Returns our path -> their name for every parameter, with unrolled layers."""
    names = {
        f"embeddings/{kind}": f"bert.embeddings.{kind}_embeddings.weight"
        for kind in ("word", "position", "token_type")
    }
    for ours, theirs in _modules(config):
        names[f"{ours}/{'scale' if ours.endswith('norm') else 'kernel'}"] = f"{theirs}.weight"
        names[f"{ours}/bias"] = f"{theirs}.bias"
    if "mlm" in config.heads:
        names["mlm/bias"] = "cls.predictions.bias"
    return names


def from_huggingface(directory: str | os.PathLike[str]) -> tuple[BertConfig, dict[str, Any]]:
    """Reads config.json and model.safetensors, or its shards by model.safetensors.index.json.

    Args:
      directory: folder with the tensors of BertForPreTraining, BertForMaskedLM,
        BertForNextSentencePrediction, BertForQuestionAnswering or BertModel, which has no head.
        The tensors decide which heads there are. A pooler without the head 'nsp' is left out.

    Returns:
      The config, with activations in float32 and unrolled layers (see `transformer.stack_layers`),
      and its parameters as float32 NumPy arrays.

    Raises:
      UserError: a file is missing or malformed; a setting belongs to another network than BERT; a
        tensor is missing, superfluous, not finite or of another shape than the config demands; or
        the output matrix differs from the word embeddings.
    """
    directory = pathlib.Path(directory)
    settings = _read_settings(directory)
    file = tensors_lib.find(directory)
    if file is None:
        for other in sorted(directory.iterdir()):
            tensors_lib.check_format(other, str(directory))
        raise UserError(f"{directory} has no {WEIGHTS}, and no {INDEX} with its shards")
    tensors = tensors_lib.load(file)
    # Checkpoints converted from TensorFlow keep its names.
    tensors = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in tensors.items()
    }
    # BertModel, which is the encoder alone, saves its tensors without the prefix of the others.
    if not any(name.startswith(_PREFIX) for name in tensors):
        tensors = {
            _PREFIX + name if name.startswith(_OF_ENCODER) else name: tensor
            for name, tensor in tensors.items()
        }
    # The heads are read from the tensors, because config.json need not list them.
    heads = tuple(head for head, name in _TELLING.items() if name in tensors)
    config = _config(settings, heads, directory / CONFIG)
    _check_tied(tensors, config, file)
    return config, _params(tensors, config, file)


def to_huggingface(
    config: BertConfig, params: Mapping[str, Any], directory: str | os.PathLike[str]
) -> None:
    """Writes config.json and model.safetensors, which `from_pretrained` of transformers reads.

    As in transformers, the output matrix of masked words, which equals the word embeddings, is not
    written again.

    Args:
      config: a config with the heads 'mlm' and 'nsp' (for BertForPreTraining), or only one of
        'mlm', 'nsp' and 'span'.
      params: the network's parameters, with layers unrolled or scanned; written in float32.
      directory: folder to write; created if it is missing. Files of these names are replaced.

    Raises:
      UserError: transformers has no network with these heads, or the folder cannot be written.
      ValueError: the parameters are not those of the config.
    """
    if config.heads not in _ARCHITECTURES:
        known = "; ".join(", ".join(heads) for heads in _ARCHITECTURES)
        raise UserError(
            f"config.model.heads is {config.heads}; there are Hugging Face networks with: {known}"
        )
    # transformers has no stacked layers.
    leaves, _ = jax.tree_util.tree_flatten_with_path(unstack_layers(params))
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    names = _names(config)
    if set(flat) != set(names):
        raise ValueError(f"parameters that differ: {', '.join(sorted(set(flat) ^ set(names)))}")
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
    """Writes `settings` as config.json and `tensors` as model.safetensors.

    Args:
      directory: folder to write; created if it is missing. Files of these names are replaced.
      settings: content of config.json.
      tensors: content of model.safetensors.

    Raises:
      UserError: the folder cannot be written.
    """
    directory = pathlib.Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        # The metadata that transformers and timm write.
        save_file(dict(tensors), directory / WEIGHTS, {"format": "pt"})
        # safetensors makes its file readable by the owner only.
        shutil.copymode(directory / CONFIG, directory / WEIGHTS)
    except (OSError, SafetensorError) as error:  # no right to write there, a full disk
        raise UserError(f"{directory} cannot be written ({error}); give another folder") from None


def _theirs(path: str, leaf: np.ndarray) -> np.ndarray:
    # PyTorch keeps a dense layer's matrix as (outputs, inputs). Its own inverse.
    return leaf.T if path.endswith("/kernel") else leaf


def _read_settings(directory: pathlib.Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.exists():
        raise UserError(f"{directory} has no {CONFIG}")
    try:
        settings = reading.read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error})") from None
    # Defaults of transformers for keys that config.json leaves out.
    expected = {
        "model_type": ("bert",),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "tie_word_embeddings": (True, None),
        "hidden_act": (*_GELUS, None),
    }
    for name, values in expected.items():
        found = settings.get(name) if isinstance(settings, dict) else None
        if found not in values:
            known = ", ".join(repr(value) for value in values if value is not None)
            raise UserError(f"{file} says {name}={found!r}; a BERT that can be read has {known}")
    return settings


def _config(settings: Mapping[str, Any], heads: tuple[str, ...], file: pathlib.Path) -> BertConfig:
    fields = {ours: settings[theirs] for ours, theirs in _FIELDS.items() if theirs in settings}
    gelu = _GELUS[settings.get("hidden_act") or "gelu"]
    try:
        return BertConfig(**fields, heads=heads, gelu=gelu, dtype="float32")
    except UserError as error:
        raise UserError(f"{file} does not describe a BERT: {error}") from None


def _check_tied(tensors: Mapping[str, np.ndarray], config: BertConfig, file: pathlib.Path) -> None:
    # The network has one matrix for both, so two different ones could not be represented.
    for copy, original in _DECODER.items():
        if copy in tensors and not (
            original in tensors and np.array_equal(tensors[copy], tensors[original])
        ):
            raise UserError(f"{file} has a {copy} of its own; it must be equal to {original}")


def _params(
    tensors: Mapping[str, np.ndarray], config: BertConfig, file: pathlib.Path
) -> dict[str, Any]:
    """Returns the tree of parameters, each checked against the network's shape."""
    names = _names(config)
    missing = [name for name in names.values() if name not in tensors]
    if missing:
        raise UserError(f"{file} lacks {len(missing)} tensor(s): {', '.join(missing[:4])}")
    # Older versions of transformers save `position_ids`, which is only 0, 1, 2, ...
    ignored = {*names.values(), *_DECODER, "bert.embeddings.position_ids"}
    extra = [
        name for name in tensors if name not in ignored and not name.startswith("bert.pooler.")
    ]
    if extra:
        raise UserError(f"{file} has {len(extra)} tensor(s) too many: {', '.join(extra[:4])}")
    # No parameter's shape depends on the size of the batch or on the sequence length.
    token = jax.ShapeDtypeStruct((1, 1), np.int32)
    inputs = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), token)
    shapes = jax.eval_shape(
        lambda inputs: config.module().init(jax.random.key(0), inputs, train=False), inputs
    )["params"]

    def place(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        ours = jax.tree_util.keystr(path, simple=True, separator="/")
        tensor = tensors[names[ours]]
        leaf = np.ascontiguousarray(_theirs(ours, np.asarray(tensor, np.float32)))
        if leaf.shape != shape.shape:
            # The message gives the shape in the layout of the file, as the user sees it there.
            expected = shape.shape[::-1] if ours.endswith("/kernel") else shape.shape
            raise UserError(
                f"{file} has {names[ours]} of shape {tensor.shape}; by {CONFIG} it must be "
                f"{expected}"
            )
        return leaf

    return jax.tree_util.tree_map_with_path(place, shapes)

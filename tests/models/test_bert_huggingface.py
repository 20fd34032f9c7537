"""Checkpoints in Hugging Face's layout: names, shapes, round trips, and what is refused."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from lamb_tpu.errors import UserError
from lamb_tpu.models.bert import HEADS, BertConfig
from lamb_tpu.models.bert_huggingface import from_huggingface, to_huggingface
from lamb_tpu.models.transformer import stack_layers

CONFIG = BertConfig(
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    intermediate_size=12,
    vocab_size=21,
    max_positions=9,
    num_token_types=3,
    dropout_rate=0.2,
    attention_dropout_rate=0.3,
    dtype="float32",
)
DENSE = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
NAMES = {
    f"bert.encoder.layer.{index}.{module}.{kind}"
    for index in (0, 1)
    for module in (*DENSE, "attention.output.LayerNorm", "output.LayerNorm")
    for kind in ("weight", "bias")
} | {
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.position_embeddings.weight",
    "bert.embeddings.token_type_embeddings.weight",
    "bert.embeddings.LayerNorm.weight",
    "bert.embeddings.LayerNorm.bias",
    "bert.pooler.dense.weight",
    "bert.pooler.dense.bias",
    "cls.predictions.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
}


def make(config: BertConfig) -> Any:
    """Random parameters."""
    token = jax.ShapeDtypeStruct((1, 1), np.int32)
    inputs = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), token)
    init = config.module().init
    shapes = jax.eval_shape(lambda x: init(jax.random.key(0), x, train=False), inputs)
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes["params"]
    )


PARAMS = make(CONFIG)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    to_huggingface(CONFIG, PARAMS, tmp_path)
    return tmp_path


def tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return safetensors_numpy.load_file(folder / "model.safetensors")


def rewrite(folder: pathlib.Path, **changes: np.ndarray | None) -> None:
    """Sets or, by None, removes tensors."""
    kept = {**tensors(folder), **changes}
    kept = {name: value for name, value in kept.items() if value is not None}
    safetensors_numpy.save_file(kept, folder / "model.safetensors")


def shard(folder: pathlib.Path) -> None:
    """Splits model.safetensors into two shards with an index, as transformers writes them."""
    found = tensors(folder)
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(found)}
    for file in set(places.values()):
        part = {name: found[name] for name in found if places[name] == file}
        safetensors_numpy.save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


def settings(folder: pathlib.Path, **changes: Any) -> None:
    """Sets or, by ..., removes settings."""
    file = folder / "config.json"
    kept = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in kept.items() if v is not ...}))


def assert_equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_names_and_layout(folder: pathlib.Path) -> None:
    written = tensors(folder)
    assert set(written) == NAMES
    assert {tensor.dtype for tensor in written.values()} == {np.dtype(np.float32)}
    layer = PARAMS["encoder"]["layer_1"]
    for theirs, ours in (
        ("attention.self.query.weight", layer["attention"]["query"]["kernel"].T),
        ("attention.self.key.bias", layer["attention"]["key"]["bias"]),
        ("attention.output.dense.weight", layer["attention"]["output"]["kernel"].T),
        ("attention.output.LayerNorm.weight", layer["attention_norm"]["scale"]),
        ("intermediate.dense.weight", layer["intermediate"]["kernel"].T),
        ("output.dense.weight", layer["output"]["kernel"].T),
        ("output.LayerNorm.bias", layer["output_norm"]["bias"]),
    ):
        np.testing.assert_array_equal(written[f"bert.encoder.layer.1.{theirs}"], ours)
    word = written["bert.embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(word, PARAMS["embeddings"]["word"])
    said = json.loads((folder / "config.json").read_text())
    assert said["architectures"] == ["BertForPreTraining"] and said["model_type"] == "bert"
    assert said["num_hidden_layers"] == 2 and said["type_vocab_size"] == 3
    assert said["hidden_dropout_prob"] == 0.2 and said["attention_probs_dropout_prob"] == 0.3
    assert said["hidden_act"] == "gelu" and said["layer_norm_eps"] == 1e-12


@pytest.mark.parametrize(
    "fields", [{}, {"heads": ("span",)}, {"heads": ("mlm",)}, {"heads": ("nsp",)}, {"gelu": "tanh"}]
)
def test_there_and_back(fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, **fields)
    params = make(config)
    to_huggingface(config, params, tmp_path / "new" / "folder")
    found, read = from_huggingface(tmp_path / "new" / "folder")
    assert found == config
    assert_equal(read, params)


def test_stacked_layers_and_other_dtypes_are_written_alike(folder: pathlib.Path) -> None:
    expected = tensors(folder)
    scanned = dataclasses.replace(CONFIG, scan_layers=True, dtype="bfloat16", remat="full")
    to_huggingface(scanned, stack_layers(PARAMS), folder)
    assert_equal(tensors(folder), expected)
    config, params = from_huggingface(folder)
    assert config == CONFIG
    assert_equal(params, PARAMS)
    low = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMS)
    to_huggingface(CONFIG, low, folder)
    assert_equal(from_huggingface(folder)[1], jax.tree.map(lambda x: x.astype(np.float32), low))


def test_what_published_files_have_besides(folder: pathlib.Path) -> None:
    held = tensors(folder)
    old = {}
    for name in held:
        if "LayerNorm" in name:
            old[name] = None
            renamed = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            old[renamed] = held[name]
    rewrite(
        folder,
        **old,
        **{
            "bert.embeddings.position_ids": np.arange(9)[None],
            "cls.predictions.decoder.weight": held["bert.embeddings.word_embeddings.weight"],
            "cls.predictions.decoder.bias": held["cls.predictions.bias"],
        },
    )
    settings(
        folder,
        position_embedding_type=...,
        tie_word_embeddings=...,
        hidden_act=...,
        gradient_checkpointing=False,
        layer_norm_eps=...,
    )
    config, params = from_huggingface(folder)
    assert config == CONFIG
    assert_equal(params, PARAMS)
    # For question answering the pooler is left out, which no head needs.
    removed = dict.fromkeys(name for name in tensors(folder) if name.startswith("cls."))
    rewrite(
        folder,
        **removed,
        **{
            "qa_outputs.weight": np.zeros((2, 8), np.float32),
            "qa_outputs.bias": np.zeros(2, np.float32),
        },
    )
    config, params = from_huggingface(folder)
    assert config.heads == ("span",) and "pooler" not in params


def test_half_precision_is_read_as_float32(folder: pathlib.Path) -> None:
    for dtype in (jnp.bfloat16, np.float16):
        half = {name: tensor.astype(dtype) for name, tensor in tensors(folder).items()}
        rewrite(folder, **half)
        for leaf in jax.tree.leaves(from_huggingface(folder)[1]):
            assert leaf.dtype == np.float32
        name = "bert.pooler.dense.weight"
        assert_equal(
            from_huggingface(folder)[1]["pooler"]["kernel"], half[name].T.astype(np.float32)
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"vocab_size": 22},
            r"word_embeddings.weight of shape \(21, 8\); by config.json it must be "
            r"\(22, 8\)",
        ),
        ({"intermediate_size": 16}, r"intermediate.dense.bias of shape \(12,\); .* be \(16,\)"),
        ({"num_hidden_layers": 3}, "lacks 16 tensor.s.: bert.encoder.layer.2.attention"),
        ({"num_hidden_layers": 1}, "has 16 tensor.s. too many: bert.encoder.layer.1."),
        (
            {"model_type": "roberta"},
            "says model_type='roberta'; a BERT that can be read has 'bert'",
        ),
        ({"model_type": ...}, "says model_type=None"),
        ({"hidden_act": "relu"}, "says hidden_act='relu'; a BERT that can be read has 'gelu', "),
        (
            {"position_embedding_type": "relative_key"},
            "says position_embedding_type='relative_key'",
        ),
        ({"is_decoder": True}, "says is_decoder=True"),
        ({"tie_word_embeddings": False}, "says tie_word_embeddings=False"),
        ({"num_attention_heads": 3}, "config.json does not describe a BERT: .*does not divide"),
    ],
)
def test_settings_that_do_not_fit(
    folder: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    settings(folder, **changes)
    with pytest.raises(UserError, match=message):
        from_huggingface(folder)


def test_shards_with_an_index(folder: pathlib.Path) -> None:
    config, params = from_huggingface(folder)
    shard(folder)
    assert not (folder / "model.safetensors").exists()
    assert from_huggingface(folder)[0] == config
    assert_equal(from_huggingface(folder)[1], params)


def test_bert_model_saves_no_prefix_and_no_head(folder: pathlib.Path) -> None:
    _, params = from_huggingface(folder)
    safetensors_numpy.save_file(
        {
            name.removeprefix("bert."): tensor
            for name, tensor in tensors(folder).items()
            if name.startswith("bert.")
        },
        folder / "model.safetensors",
    )
    config, found = from_huggingface(folder)
    assert config == dataclasses.replace(CONFIG, heads=())
    assert_equal(found, {part: params[part] for part in ("embeddings", "encoder")})


def test_prefixes_are_not_mixed(folder: pathlib.Path) -> None:
    rewrite(folder, **{"encoder.extra": np.zeros(2, np.float32)})
    with pytest.raises(UserError, match="has 1 tensor.s. too many: encoder.extra"):
        from_huggingface(folder)


def test_another_format_is_named(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin is a pickle of PyTorch's, .* convert"):
        from_huggingface(folder)
    (folder / "pytorch_model.bin").rename(folder / "tf_model.h5")
    with pytest.raises(UserError, match="tf_model.h5 is a file of Keras, .* save the network as"):
        from_huggingface(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"cls.predictions.bias": np.full(21, np.nan, np.float32)},
            "not finite .* in 1 tensor.s.: cls.predictions.bias",
        ),
        ({"bert.pooler.dense.bias": None}, "lacks 1 tensor.s.: bert.pooler.dense.bias"),
        ({"classifier.weight": np.zeros(2)}, "has 1 tensor.s. too many: classifier.weight"),
        (
            {"cls.predictions.decoder.weight": np.zeros((21, 8), np.float32)},
            "has a cls.predictions.decoder.weight of its own; it must be equal to bert.embeddings.word",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    folder: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(folder, **changes)
    with pytest.raises(UserError, match=message):
        from_huggingface(folder)


def test_files_that_are_none(folder: pathlib.Path, tmp_path_factory: Any) -> None:
    with pytest.raises(UserError, match="has no config.json"):
        from_huggingface(tmp_path_factory.mktemp("empty"))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-5])
    with pytest.raises(UserError, match="model.safetensors is no complete safetensors file"):
        from_huggingface(folder)
    weights.unlink()
    with pytest.raises(UserError, match="has no model.safetensors"):
        from_huggingface(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json is not JSON"):
        from_huggingface(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="says model_type=None"):
        from_huggingface(folder)


def test_what_cannot_be_written(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, heads=HEADS)
    with pytest.raises(UserError, match="heads is .*; there are Hugging Face networks with: mlm, "):
        to_huggingface(config, make(config), tmp_path)
    with pytest.raises(ValueError, match="parameters that differ: mlm/bias, mlm/dense/bias, "):
        to_huggingface(CONFIG, {k: v for k, v in PARAMS.items() if k != "mlm"}, tmp_path)
    assert not list(tmp_path.iterdir())

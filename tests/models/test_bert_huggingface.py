"""Checkpoints in Hugging Face's layout: names, shapes, round trips, and rejected files."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

from lamb_tpu.models.bert import HEADS, BertConfig
from lamb_tpu.models.bert_huggingface import from_huggingface, to_huggingface
from lamb_tpu.models.transformer import stack_layers
from tests.raising import rejected

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
    """Replaces or adds tensors; the value None removes a tensor."""
    remaining = {**tensors(folder), **changes}
    remaining = {name: value for name, value in remaining.items() if value is not None}
    safetensors_numpy.save_file(remaining, folder / "model.safetensors")


def shard(folder: pathlib.Path) -> None:
    """Splits model.safetensors into two shards with an index, like transformers."""
    actual = tensors(folder)
    places = {name: f"model-0000{1 + n % 2}-of-00002.safetensors" for n, name in enumerate(actual)}
    for file in set(places.values()):
        part = {name: actual[name] for name in actual if places[name] == file}
        safetensors_numpy.save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


def settings(folder: pathlib.Path, **changes: Any) -> None:
    """Changes settings in config.json; the value `...` removes a setting."""
    file = folder / "config.json"
    remaining = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in remaining.items() if v is not ...}))


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
    pattern = json.loads((folder / "config.json").read_text())
    assert pattern["architectures"] == ["BertForPreTraining"] and pattern["model_type"] == "bert"
    assert pattern["num_hidden_layers"] == 2 and pattern["type_vocab_size"] == 3
    assert pattern["hidden_dropout_prob"] == 0.2 and pattern["attention_probs_dropout_prob"] == 0.3
    assert pattern["hidden_act"] == "gelu" and pattern["layer_norm_eps"] == 1e-12


@pytest.mark.parametrize(
    "fields", [{}, {"heads": ("span",)}, {"heads": ("mlm",)}, {"heads": ("nsp",)}, {"gelu": "tanh"}]
)
def test_there_and_back(fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, **fields)
    params = make(config)
    to_huggingface(config, params, tmp_path / "new" / "folder")
    actual, read = from_huggingface(tmp_path / "new" / "folder")
    assert actual == config
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


def test_extra_tensors_of_published_files(folder: pathlib.Path) -> None:
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
    omitted = ("position_embedding_type", "tie_word_embeddings", "hidden_act", "layer_norm_eps")
    settings(folder, gradient_checkpointing=False, **dict.fromkeys(omitted, ...))
    config, params = from_huggingface(folder)
    assert config == CONFIG
    assert_equal(params, PARAMS)
    # For question answering the pooler is ignored, because no head needs it.
    removed = dict.fromkeys(name for name in tensors(folder) if name.startswith("cls."))
    span = {"weight": np.zeros((2, 8), np.float32), "bias": np.zeros(2, np.float32)}
    rewrite(folder, **removed, **{f"qa_outputs.{name}": value for name, value in span.items()})
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
            ("embeddings.weight of shape (21, 8)", "use shape (22, 8), as config.json"),
        ),
        (
            {"intermediate_size": 16},
            ("intermediate.dense.bias of shape (12,)", "use shape (16,), as"),
        ),
        ({"num_hidden_layers": 3}, ("lacks 16 tensor(s): bert.encoder.layer.2.attention",)),
        ({"num_hidden_layers": 1}, ("also has 16 tensor(s): bert.encoder.layer.1.",)),
        (
            {"model_type": "roberta"},
            ("says model_type='roberta'", "use a BERT with model_type='bert'"),
        ),
        ({"model_type": ...}, ("says model_type=None",)),
        ({"hidden_act": "relu"}, ("says hidden_act='relu'", "a BERT with hidden_act='gelu' or ")),
        ({"position_embedding_type": "relative"}, ("says position_embedding_type='relative'",)),
        ({"is_decoder": True}, ("says is_decoder=True",)),
        ({"tie_word_embeddings": False}, ("says tie_word_embeddings=False",)),
        ({"num_attention_heads": 3}, ("is not divisible by config.model.num_heads=3",)),
    ],
)
def test_settings_that_do_not_fit(
    folder: pathlib.Path, changes: dict[str, Any], message: tuple[str, ...]
) -> None:
    settings(folder, **changes)
    of_config = "num_attention_heads" in changes
    key = "*config.json does not describe a BERT: config.model.hidden_size" if of_config else "*"
    with rejected(key, ..., *message):
        from_huggingface(folder)


def test_shards_with_an_index(folder: pathlib.Path) -> None:
    config, params = from_huggingface(folder)
    shard(folder)
    assert not (folder / "model.safetensors").exists()
    assert from_huggingface(folder)[0] == config
    assert_equal(from_huggingface(folder)[1], params)


def test_bert_model_saves_no_prefix_and_no_head(folder: pathlib.Path) -> None:
    _, params = from_huggingface(folder)
    bare = {
        name.removeprefix("bert."): tensor
        for name, tensor in tensors(folder).items()
        if name.startswith("bert.")
    }
    safetensors_numpy.save_file(bare, folder / "model.safetensors")
    config, actual = from_huggingface(folder)
    assert config == dataclasses.replace(CONFIG, heads=())
    assert_equal(actual, {part: params[part] for part in ("embeddings", "encoder")})


def test_prefixes_are_not_mixed(folder: pathlib.Path) -> None:
    rewrite(folder, **{"encoder.extra": np.zeros(2, np.float32)})
    with rejected("*/model.safetensors", ..., "also has 1 tensor(s): encoder.extra"):
        from_huggingface(folder)


def test_another_format_is_named(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with rejected("*pytorch_model.bin", ..., "is a PyTorch pickle", "convert it"):
        from_huggingface(folder)
    (folder / "pytorch_model.bin").rename(folder / "tf_model.h5")
    with rejected("*tf_model.h5", ..., "is a Keras file", "convert it to model"):
        from_huggingface(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"cls.predictions.bias": np.full(21, np.nan, np.float32)},
            "has NaN or infinity in 1 tensor(s): cls.predictions.bias",
        ),
        ({"bert.pooler.dense.bias": None}, "lacks 1 tensor(s): bert.pooler.dense.bias"),
        ({"classifier.weight": np.zeros(2)}, "also has 1 tensor(s): classifier.weight"),
        (
            {"cls.predictions.decoder.weight": np.zeros((21, 8), np.float32)},
            "has a cls.predictions.decoder.weight that differs from bert.embeddings.word",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    folder: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    rewrite(folder, **changes)
    with rejected("*/model.safetensors", ..., message):
        from_huggingface(folder)


def test_files_that_are_none(folder: pathlib.Path, tmp_path_factory: Any) -> None:
    with rejected("*", ..., "has no config.json"):
        from_huggingface(tmp_path_factory.mktemp("empty"))
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-5])
    with rejected(weights, ..., "is not a complete safetensors file ("):
        from_huggingface(folder)
    weights.unlink()
    with rejected(folder, ..., "has no model.safetensors"):
        from_huggingface(folder)
    (folder / "config.json").write_text("{")
    with rejected("*/config.json", ..., "is not JSON ("):
        from_huggingface(folder)
    (folder / "config.json").write_text("[]")
    with rejected("*/config.json", ..., "says model_type=None"):
        from_huggingface(folder)


def test_unsupported_heads_and_params(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(CONFIG, heads=HEADS)
    with rejected(
        "config.model.heads", HEADS, "does not match a Hugging Face network", "use one of mlm+nsp, "
    ):
        to_huggingface(config, make(config), tmp_path)
    with pytest.raises(ValueError, match="add or remove mlm/bias, mlm/dense/bias, "):
        to_huggingface(CONFIG, {k: v for k, v in PARAMS.items() if k != "mlm"}, tmp_path)
    assert not list(tmp_path.iterdir())

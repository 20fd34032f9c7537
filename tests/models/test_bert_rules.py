"""BERT's rules: decay and adaptation, a separate trust ratio for each stacked layer, tensor parallelism."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import optim
from lamb_tpu.models import bert_rules
from lamb_tpu.models.bert import HEADS, SIZES, BertConfig
from lamb_tpu.models.transformer import stack_layers
from lamb_tpu.optim import parameters
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules

KEY = jax.random.key(0)
CONFIG = BertConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    intermediate_size=24,
    vocab_size=30,
    max_positions=8,
    dropout_rate=0.0,
    attention_dropout_rate=0.0,
    dtype="float32",
)
SCANNED = dataclasses.replace(CONFIG, scan_layers=True)
METADATA = {False: bert_rules.PARAMETERS, True: bert_rules.PARAMETERS_SCANNED}
SPLITS = {False: bert_rules.TENSOR_PARALLEL, True: bert_rules.TENSOR_PARALLEL_SCANNED}
RNG = np.random.default_rng(0)
BATCH = {
    "input_ids": RNG.integers(0, 30, (4, 8), np.int32),
    "token_type_ids": RNG.integers(0, 2, (4, 8), np.int32),
    "attention_mask": (np.arange(8) < np.array([[8], [5], [8], [2]])).astype(np.int32),
    "masked_positions": np.array([[1, 3], [4, 0], [7, 2], [1, 0]], np.int32),
}


def shapes(config: BertConfig) -> Any:
    init = config.module().init
    return jax.eval_shape(lambda x: init(KEY, x, train=False), BATCH)["params"]


def table(config: BertConfig, metadata: Any) -> dict[str, parameters.ParameterMetadata]:
    tree = shapes(config)
    resolved = jax.tree.leaves(parameters.resolve(tree, metadata))
    return dict(zip(parameters.leaf_paths(tree), resolved, strict=True))


@pytest.mark.parametrize("heads", [HEADS, ("span",), ()])
def test_biases_and_layer_norm_neither_decay_nor_adapt(heads: tuple[str, ...]) -> None:
    config = dataclasses.replace(CONFIG, heads=heads)
    actual = table(config, bert_rules.PARAMETERS)
    assert actual == table(config, "bert")
    for path, metadata in actual.items():
        matrix = path.split("/")[-1] not in ("bias", "scale")
        assert metadata == parameters.ParameterMetadata(matrix, matrix, ()), path
    # Exactly the matrices decay.
    matrices = [leaf.ndim > 1 for leaf in jax.tree.leaves(shapes(config))]
    assert matrices == [metadata.decay for metadata in actual.values()]


def test_large_has_as_many_that_decay() -> None:
    config = BertConfig(**SIZES["large"])
    actual = table(config, bert_rules.PARAMETERS)
    # 6 matrices per layer; 3 embeddings, the pooler, and the heads for masked words and next
    # sentence.
    assert len(actual) == 398 and sum(metadata.decay for metadata in actual.values()) == 24 * 6 + 6


@pytest.mark.parametrize("heads", [HEADS, ("span",), ()])
def test_stacked_layers_have_the_same_metadata_and_an_axis(heads: tuple[str, ...]) -> None:
    unrolled = table(dataclasses.replace(CONFIG, heads=heads), bert_rules.PARAMETERS)
    scanned = table(dataclasses.replace(SCANNED, heads=heads), bert_rules.PARAMETERS_SCANNED)
    for path, metadata in scanned.items():
        inside = path.startswith("encoder/layers/")
        assert metadata.layer_axes == ((0,) if inside else ()), path
        mirrored = unrolled[path.replace("layers", "layer_1")]
        assert (metadata.decay, metadata.adapt) == (mirrored.decay, mirrored.adapt), path


def test_an_update_of_lamb_is_the_same_for_stacked_layers() -> None:
    rng = np.random.default_rng(3)

    def draw(scale: float) -> Any:
        return jax.tree.map(
            lambda leaf: jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype),
            shapes(CONFIG),
        )

    params, grads = draw(1.0), draw(0.1)
    # Layers of different norms have different ratios.
    params["encoder"]["layer_1"] = jax.tree.map(lambda x: 50 * x, params["encoder"]["layer_1"])

    def update(params: Any, grads: Any, metadata: Any) -> Any:
        tx = optim.lamb(0.1, weight_decay=0.01, rules=metadata)
        return jax.jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads)

    unrolled = stack_layers(update(params, grads, bert_rules.PARAMETERS))
    scanned = update(stack_layers(params), stack_layers(grads), bert_rules.PARAMETERS_SCANNED)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), unrolled, scanned)


def loss(config: BertConfig, params: Any, batch: Any) -> jax.Array:
    outputs = config.module().apply({"params": params}, batch, train=True)
    words = jax.nn.log_softmax(outputs["mlm_logits"])[..., 7]
    return -jnp.mean(words) - jnp.mean(jax.nn.log_softmax(outputs["nsp_logits"])[:, 1])


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [False, True])
def test_split_over_devices_the_loss_and_gradients_are_those_of_one(scan_layers: bool) -> None:
    config = SCANNED if scan_layers else CONFIG
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0.5, 0.3, leaf.shape), leaf.dtype), shapes(config)
    )
    mesh = mesh_lib.make_mesh({"data": 2, "model": 4})
    metadata = parameters.resolve(params, METADATA[scan_layers])
    # Pass the rules through a ConfigDict, as a config file does.
    split = ConfigDict({"rules": SPLITS[scan_layers]}).rules
    shardings = rules.partition_params(params, split, mesh, metadata)
    batch = mesh_lib.batch_sharding(mesh)

    def run(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda p: loss(config, p, batch))(params)

    many = jax.jit(run, in_shardings=(shardings, batch), out_shardings=(None, shardings))
    (one_loss, one), (many_loss, grads) = jax.jit(run)(params, BATCH), many(params, BATCH)
    np.testing.assert_allclose(many_loss, one_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), grads, one)
    assert max(float(jnp.max(jnp.abs(g))) for g in jax.tree.leaves(one)) > 0.1

    # Each device has a quarter of every encoder matrix and of all embeddings.
    for path, leaf in zip(parameters.leaf_paths(grads), jax.tree.leaves(grads), strict=True):
        held = leaf.addressable_shards[0].data.size
        column = any(f"{name}/bias" in path for name in ("query", "key", "value", "intermediate"))
        matrix = path.startswith("encoder") and path.endswith("kernel")
        embedding = path.startswith("embeddings") and "norm" not in path
        quarter = matrix or embedding or column
        assert leaf.size == held * (4 if quarter else 1), path
    per_layer = leaf_named(shardings, "intermediate", "kernel").spec
    assert tuple(per_layer) == ((None,) if scan_layers else ()) + (None, "model")
    assert tuple(leaf_named(shardings, "attention", "output", "kernel").spec)[-1:] == ("model",)


def leaf_named(tree: Any, *keys: str) -> Any:
    encoder = tree["encoder"]
    node = encoder["layers"] if "layers" in encoder else encoder["layer_0"]
    for key in keys:
        node = node[key]
    return node

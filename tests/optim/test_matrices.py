"""Tests the matrix axes that leaf names imply, for this package's and other libraries' networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.optim import make_optimizer, parameters
from lamb_tpu.optim.parameters import ParameterMetadata

CONV, ROWS, TORCH = ((0, 1, 2), (3,)), ((0,), (1,)), ((1,), (0,))
TORCH_CONV = ((1, 2, 3), (0,))
# A path, the number of axes, and the rows and columns; None for a leaf that Adam updates.
LEAVES = [
    # networks of this package
    ("stem_conv/kernel", 4, CONV),
    ("stage1_block1/projection/kernel", 4, CONV),
    ("stage1_block1/depthwise/kernel", 4, None),
    ("stage1_block1/squeeze_excite/reduce/kernel", 2, ROWS),
    ("encoder/layer_0/attention/output/kernel", 2, ROWS),
    ("encoder/layer_0/output/kernel", 2, ROWS),
    ("embeddings/word", 2, None),
    ("embeddings/position", 2, None),
    ("embeddings/token_type", 2, None),
    ("mlm/dense/kernel", 2, ROWS),
    ("nsp/kernel", 2, None),
    ("span/kernel", 2, None),
    ("output/kernel", 2, None),
    ("decoder/output/kernel", 2, None),
    ("embedding", 2, None),
    ("embedding/embedding", 2, None),
    ("lstm_0/input_kernel", 2, ROWS),
    ("decoder/attention/queries/kernel", 2, ROWS),
    # GPT-2
    ("model/wte", 2, None),
    ("model/wpe", 2, None),
    ("model/h0/attn/c_attn/w", 2, ROWS),
    ("model/h0/attn/c_attn/w", 3, ((0, 1), (2,))),
    ("lm_head", 2, None),
    ("lm_head/w", 2, None),
    # Flax, NNX and Hugging Face's Flax
    ("params/Conv_0/kernel", 3, ((0, 1), (2,))),
    ("params/Conv_0/kernel", 5, ((0, 1, 2, 3), (4,))),
    ("attention/query/kernel", 3, ((0,), (1, 2))),
    ("attention/out/kernel", 3, ((0, 1), (2,))),
    ("attention/query/bias", 2, None),
    ("attention/qkv/kernel", 4, ((0,), (1, 2, 3))),
    ("attention/value/kernel/value", 3, ((0,), (1, 2))),
    ("conv/kernel/value", 4, CONV),
    ("embed/embedding/value", 2, None),
    ("blocks/0/kernel/value", 2, ROWS),
    ("norm/scale/value", 2, None),
    ("model/embed_tokens/embedding", 2, None),
    ("model/layers/0/self_attn/q_proj/kernel", 2, ROWS),
    ("score/kernel", 2, None),
    ("bert/embeddings/position_embeddings/embedding", 2, None),
    ("lm_head/kernel", 2, None),
    ("cls/predictions/transform/dense/kernel", 2, ROWS),
    ("cls/seq_relationship/kernel", 2, None),
    ("classifier/kernel", 2, None),
    ("classifier/dense/kernel", 2, ROWS),
    ("classifier/out_proj/kernel", 2, None),
    ("qa_outputs/kernel", 2, None),
    ("vit/embeddings/patch_embeddings/projection/kernel", 4, CONV),
    ("head/kernel", 2, None),
    ("vit/embeddings/position_embeddings", 3, None),
    ("decoder/logits_dense/kernel", 2, None),
    ("relpos_bias/rel_embedding", 2, None),
    ("layers/mlp/kernel", 3, None),  # possibly a stack
    # Haiku
    ("res_net/~/initial_conv/w", 4, CONV),
    ("res_net/~/logits/w", 2, None),
    ("transformer/~/embed/embeddings", 2, None),
    ("mlp/~/linear_0/w", 2, ROWS),
    ("lstm/linear/w", 2, ROWS),
    ("layer_norm/offset", 2, None),
    # Equinox and PyTorch
    ("conv/weight", 4, TORCH_CONV),
    ("layers/0/weight", 2, TORCH),
    ("lstm/weight_ih", 2, TORCH),
    ("attention/query_proj/weight", 2, TORCH),
    ("attention/output_proj/weight", 2, TORCH),
    ("embedding/weight", 2, None),
    ("embed_positions/weight", 2, None),
    ("fc/weight", 2, None),
    ("layer1/0/conv1/weight", 4, TORCH_CONV),
    ("time_embedding/linear_1/weight", 2, TORCH),
    ("encoder/layer/0/output/dense/weight", 2, TORCH),
    ("lm_head/weight", 2, None),
    ("norm/weight", 1, None),
    ("layers/0/attention/in_proj_weight", 2, TORCH),
    # plain trees
    ("0", 2, ROWS),
    ("w1", 2, ROWS),
    ("pos_emb", 2, None),
    ("position_embeddings", 2, None),
    ("cls_token", 2, None),
    ("pos_proj/kernel", 2, ROWS),
    ("", 1, None),
]


@pytest.mark.parametrize(("path", "num_axes", "expected"), LEAVES)
def test_axes_by_name(path, num_axes, expected):
    tree = jax.ShapeDtypeStruct((2,) * num_axes, jnp.float32)
    for key in reversed(path.split("/") if path else []):
        tree = {key: tree}
    for rules in ("all", "no_bias_no_norm_decay", [("", {})]):
        (metadata,) = jax.tree.leaves(parameters.resolve(tree, rules))
        assert metadata.matrix(num_axes) == expected
    # APOLLO only uses the number of axes.
    assert metadata.matrix(num_axes, by_name=False) == (ROWS if num_axes == 2 else None)


def test_stacks_of_layers_are_matrices_each():
    params = {
        "layers": {
            "query": {"kernel": jnp.ones((3, 8, 2, 4))},
            "output": {"kernel": jnp.ones((3, 2, 4, 8))},
            "dense": {"kernel": jnp.ones((3, 8, 16))},
            "conv": {"kernel": jnp.ones((3, 3, 3, 8, 4))},
            "bias": jnp.ones((3, 8)),
        }
    }
    metadata = parameters.resolve(params, [("", {"layer_axes": (0,)})])["layers"]
    assert metadata["query"]["kernel"].matrix(4) == ((1,), (2, 3))
    assert metadata["output"]["kernel"].matrix(4) == ((1, 2), (3,))
    assert metadata["dense"]["kernel"].matrix(3) == ((1,), (2,))
    assert metadata["conv"]["kernel"].matrix(5) == ((1, 2, 3), (4,))
    assert metadata["bias"].matrix(2) is None


def test_a_rule_goes_before_the_name():
    params = {"embedding": jnp.ones((4, 4)), "dense": {"kernel": jnp.ones((4, 4))}}
    rules = [("embedding", {"matrix_axes": ROWS}), ("", {"matrix_axes": ()})]
    metadata = parameters.resolve(params, rules)
    assert metadata["embedding"].matrix(2) == ROWS and metadata["dense"]["kernel"].matrix(2) is None
    assert metadata["embedding"] == ParameterMetadata(matrix_axes=ROWS)


def test_names_do_not_show_in_the_table():
    # A resumed run compares this table with the stored one, so it must not change.
    text = parameters.table({"conv": {"kernel": jnp.ones((3, 3, 4, 8))}}, "all")
    assert "matrix" not in text


def test_a_name_is_no_field_of_a_rule():
    with pytest.raises(ValueError, match="unknown field 'axes_by_name'"):
        parameters.check_rules([("", {"axes_by_name": ()})])


@pytest.mark.parametrize("rules", ["resnet", "bert", "all"])
def test_muon_takes_hidden_layers_and_adam_takes_tables_and_outputs(rules):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        jnp.asarray,
        {
            "embeddings": {"word": rng.normal(size=(12, 4))},
            "wpe": rng.normal(size=(6, 4)),
            "conv": {"kernel": rng.normal(size=(3, 3, 4, 16))},
            "empty": jnp.ones((0, 4)),
            "output": {"kernel": rng.normal(size=(16, 10))},
        },
    )
    tx = make_optimizer({"name": "muon", "rules": rules}, 0.01)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)

    def spread(update):  # the ratio of the largest to the smallest singular value
        values = np.linalg.svd(np.asarray(update).reshape(-1, update.shape[-1]), compute_uv=False)
        return values.max() / values.min()

    assert spread(updates["conv"]["kernel"]) < 2.0
    for update in (updates["embeddings"]["word"], updates["wpe"], updates["output"]["kernel"]):
        # Adam's first step has the same size for every value.
        np.testing.assert_allclose(np.abs(update), np.abs(update[0, 0]), rtol=1e-3)

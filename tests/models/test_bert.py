"""BERT's embeddings and heads, its sizes, and what a config refuses."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import models
from lamb_tpu.errors import UserError
from lamb_tpu.models import bert, bert_huggingface
from lamb_tpu.models.bert import HEADS, SIZES, BertConfig
from tests.quick import jit

KEY = jax.random.key(0)
CONFIG = BertConfig(
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    intermediate_size=12,
    vocab_size=21,
    max_positions=9,
    heads=HEADS,
    dtype="float32",
)
ROWS, LENGTH = 3, 6
RNG = np.random.default_rng(0)
INPUTS = {
    "input_ids": RNG.integers(0, 21, (ROWS, LENGTH), np.int32),
    "token_type_ids": np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0] * 6], np.int32),
    "attention_mask": np.array([[1] * 6, [1, 1, 1, 1, 0, 0], [1] + [0] * 5], np.int32),
    "masked_positions": np.array([[1, 4], [3, 3], [0, 5]], np.int32),
}


def init(config: BertConfig) -> Any:
    """Parameters without the zeros and ones that biases and LayerNorm begin with."""
    rng = np.random.default_rng(1)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        mean = float("scale" in jax.tree_util.keystr(path))
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape), leaf.dtype)

    shapes = jax.eval_shape(lambda x: config.module().init(KEY, x, train=False), INPUTS)
    return jax.tree_util.tree_map_with_path(draw, shapes)


VARIABLES = init(CONFIG)


def run(inputs: Any = INPUTS, config: BertConfig = CONFIG, **changes: Any) -> dict[str, jax.Array]:
    module = dataclasses.replace(config, **changes).module()
    return jit(lambda inputs: module.apply(VARIABLES, inputs, train=False))(inputs)


def test_published_sizes() -> None:
    listed = {
        "tiny": (2, 128, 2, 512),
        "mini": (4, 256, 4, 1024),
        "small": (4, 512, 8, 2048),
        "medium": (8, 512, 8, 2048),
        "base": (12, 768, 12, 3072),
        "large": (24, 1024, 16, 4096),
    }
    names = ("num_layers", "hidden_size", "num_heads", "intermediate_size")
    assert {name: tuple(size[n] for n in names) for name, size in SIZES.items()} == listed
    assert BertConfig() == BertConfig(**SIZES["base"])


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize(
    "size, published, heads",
    [
        # Encoder with pooler as in the papers' 110M and 340M, and the two heads of pre-training.
        ("base", 109_482_240, 624_188),
        ("large", 335_141_888, 1_084_220),
        ("tiny", 4_385_920, 47_548),
    ],
)
def test_numbers_of_parameters(size: str, published: int, heads: int, scan_layers: bool) -> None:
    config = BertConfig(**SIZES[size], scan_layers=scan_layers)
    shapes = jax.eval_shape(lambda x: config.module().init(KEY, x, train=False), INPUTS)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}
    counts = {
        name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(part))
        for name, part in shapes.items()
    }
    assert counts["embeddings"] + counts["encoder"] + counts["pooler"] == published
    assert counts["mlm"] + counts["nsp"] == heads
    layers, h = config.num_layers, config.hidden_size
    assert counts["embeddings"] == (30522 + 512 + 2 + 2) * h
    assert counts["encoder"] == layers * (12 * h * h + 13 * h)
    assert len(jax.tree.leaves(shapes)) == (16 if scan_layers else 16 * layers) + 14


@pytest.mark.long
def test_embeddings_and_heads_are_their_formulas() -> None:
    outputs = run()
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), VARIABLES["params"])

    def norm(scales: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
        centred = y - y.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return centred / deviation * scales["scale"] + scales["bias"]

    def dense(name: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
        return y @ name["kernel"] + name["bias"]

    emb = p["embeddings"]
    summed = emb["word"][INPUTS["input_ids"]] + emb["token_type"][INPUTS["token_type_ids"]]
    expected = norm(emb["norm"], summed + emb["position"][np.arange(LENGTH)])
    found = CONFIG.module().apply(
        VARIABLES, INPUTS, train=False, capture_intermediates=lambda m, _: m.name == "embeddings"
    )[1]["intermediates"]["embeddings"]["__call__"][0]
    np.testing.assert_allclose(found, expected, atol=1e-5)

    hidden = np.asarray(outputs["hidden"], np.float64)
    pooled = np.tanh(dense(p["pooler"], hidden[:, 0]))
    np.testing.assert_allclose(outputs["nsp_logits"], dense(p["nsp"], pooled), atol=1e-5)
    spans = np.stack([outputs["start_logits"], outputs["end_logits"]], -1)
    np.testing.assert_allclose(spans, dense(p["span"], hidden), atol=1e-5)
    y = dense(p["mlm"]["dense"], hidden)
    y = norm(p["mlm"]["norm"], y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2))))
    scores = y @ emb["word"].T + p["mlm"]["bias"]
    gathered = np.stack([scores[row, INPUTS["masked_positions"][row]] for row in range(ROWS)])
    np.testing.assert_allclose(outputs["mlm_logits"], gathered, atol=1e-5)


def test_the_gathered_head_is_the_full_one_at_its_places() -> None:
    everywhere = {k: v for k, v in INPUTS.items() if k != "masked_positions"}
    full, gathered = run(everywhere)["mlm_logits"], run()["mlm_logits"]
    assert full.shape == (ROWS, LENGTH, 21) and gathered.shape == (ROWS, 2, 21)
    for row in range(ROWS):
        for place, position in enumerate(INPUTS["masked_positions"][row]):
            np.testing.assert_allclose(gathered[row, place], full[row, position], atol=1e-5)
    # A place that is not in the sequence does not pass for another one.
    beyond = run({**INPUTS, "masked_positions": np.full((ROWS, 1), LENGTH, np.int32)})
    assert np.all(np.isnan(beyond["mlm_logits"]))


def test_the_output_matrix_is_that_of_the_words() -> None:
    module = dataclasses.replace(CONFIG, heads=("mlm",)).module()
    params = {k: VARIABLES["params"][k] for k in ("embeddings", "encoder", "mlm")}

    def loss(params: Any) -> jax.Array:
        logits = module.apply({"params": params}, INPUTS, train=False)["mlm_logits"]
        return -jnp.sum(jax.nn.log_softmax(logits)[..., 20])

    grad = jit(jax.grad(loss))(params)["embeddings"]["word"]
    absent = sorted(set(range(21)) - set(INPUTS["input_ids"].ravel()))
    assert absent and np.all(np.any(grad[np.array(absent)] != 0, axis=-1))


def test_padding_changes_no_token_and_no_length_does() -> None:
    real = INPUTS["attention_mask"] > 0
    other = {**INPUTS, "input_ids": np.where(real, INPUTS["input_ids"], 20)}
    other["token_type_ids"] = np.where(real, INPUTS["token_type_ids"], 1)
    one, two = run(), run(other)
    np.testing.assert_array_equal(one["hidden"][real], two["hidden"][real])
    np.testing.assert_array_equal(one["nsp_logits"], two["nsp_logits"])
    assert not np.array_equal(one["hidden"][~real], two["hidden"][~real])
    longer = {k: np.pad(v, ((0, 0), (0, 3))) for k, v in INPUTS.items() if k != "masked_positions"}
    np.testing.assert_allclose(run(longer)["hidden"][:, :6][real], one["hidden"][real], atol=1e-5)
    # A mask of booleans says the same.
    same = run({**INPUTS, "attention_mask": real})
    np.testing.assert_array_equal(same["hidden"], one["hidden"])


def test_dtypes() -> None:
    outputs = run(dtype="bfloat16")
    assert outputs.pop("hidden").dtype == jnp.bfloat16
    assert {name: x.dtype.name for name, x in outputs.items()} == dict.fromkeys(
        ("mlm_logits", "nsp_logits", "start_logits", "end_logits"), "float32"
    )
    # Not float32 of bfloat16 numbers.
    for x in outputs.values():
        assert np.any(x != x.astype(jnp.bfloat16))
    np.testing.assert_allclose(outputs["mlm_logits"], run()["mlm_logits"], atol=0.1)


def test_heads_bring_their_parameters_and_outputs() -> None:
    for heads, modules in (
        ((), set()),
        (("span",), {"span"}),
        (("mlm",), {"mlm"}),
        (["nsp"], {"pooler", "nsp"}),
    ):
        config = dataclasses.replace(CONFIG, heads=heads)
        outputs, variables = jax.eval_shape(
            lambda x, module=config.module(): module.init_with_output(KEY, x, train=False), INPUTS
        )
        assert set(variables["params"]) == {"embeddings", "encoder"} | modules
        assert len(outputs) == 1 + len(heads) + ("span" in heads)
    assert dataclasses.replace(CONFIG, heads=["nsp", "mlm"]).heads == ("mlm", "nsp")


def test_first_values() -> None:
    config = BertConfig(**{**SIZES["tiny"], "num_layers": 1}, vocab_size=2000)
    params = jit(lambda: config.module().init(KEY, INPUTS, train=False))()["params"]
    word = np.asarray(params["embeddings"]["word"])
    # A normal cut at two standard deviations has 0.8796 of its standard deviation.
    assert abs(word.std() - 0.8796 * 0.02) < 1e-4 and 0.0399 < np.abs(word).max() <= 0.04
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name in ("bias", "scale"):
            assert np.all(leaf == (name == "scale"))
        else:
            assert abs(np.std(leaf) / 0.02 - 0.8796) < 0.06, path


@pytest.mark.long
def test_as_the_trainer_sees_it() -> None:
    model = models.linen(dataclasses.replace(CONFIG, dropout_rate=0.5).module())
    shapes = jax.eval_shape(model.init, KEY, INPUTS)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, VARIABLES)
    outputs, state = model.apply(VARIABLES, INPUTS, train=False)
    assert not state and outputs["nsp_logits"].shape == (ROWS, 2)
    dropped, _ = model.apply(VARIABLES, INPUTS, train=True, key=KEY)
    assert not np.allclose(dropped["nsp_logits"], outputs["nsp_logits"])


def test_a_sequence_that_is_too_long() -> None:
    longer = {k: np.zeros((1, 10), np.int32) for k in ("input_ids", "token_type_ids")}
    longer["attention_mask"] = np.ones((1, 10), bool)
    with pytest.raises(ValueError, match="sequences of 10 tokens; this BERT has positions for 9"):
        run(longer)


def test_a_word_that_is_not_in_the_vocabulary() -> None:
    ids = INPUTS["input_ids"].copy()
    ids[1, 2] = 21
    hidden = run({**INPUTS, "input_ids": ids})["hidden"]
    assert np.all(np.isnan(hidden[1])) and np.all(np.isfinite(hidden[0]))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_layers": 0}, "num_layers is 0; it must be a whole number of at least 1"),
        ({"vocab_size": 30522.0}, "vocab_size is 30522.0; it must be a whole number"),
        (
            {"num_heads": 7},
            "hidden_size is 768, which does not divide over config.model.num_heads=7",
        ),
        ({"dropout_rate": 1}, r"dropout_rate is 1; it must be a number in \[0, 1\)"),
        ({"attention_dropout_rate": "0.1"}, "attention_dropout_rate is '0.1'; it must be a number"),
        ({"gelu": "new"}, "gelu is 'new'; known: erf, tanh"),
        ({"remat": "all"}, "remat is 'all'; known: none, dots, full"),
        ({"dtype": "float16"}, "dtype is 'float16'; known: float32, bfloat16"),
        ({"scan_layers": 1}, "scan_layers is 1; it must be True or False"),
        ({"heads": "mlm"}, "heads is 'mlm'; it must be a list of some of mlm, nsp, span"),
        (
            {"heads": ("mlm", "sop")},
            "heads is .*'sop'.*; it must be a list of some of mlm, nsp, span",
        ),
        ({"heads": ("mlm", "mlm")}, "heads is .*; it must be a list of some of"),
        ({"heads": 5}, "heads is 5; it must be a list of some of"),
        ({"heads": (["mlm"],)}, r"heads is \(\['mlm'\],\); it must be a list of some of"),
    ],
)
def test_mistakes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="config.model." + message):
        BertConfig(**fields)


def test_hugging_faces_layout_is_found_here() -> None:
    for name in ("from_huggingface", "to_huggingface"):
        assert getattr(bert, name) is getattr(bert_huggingface, name)

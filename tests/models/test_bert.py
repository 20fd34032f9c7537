"""BERT's embeddings and heads, its sizes, and the validation of its config."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.models.bert import HEADS, SIZES, BertConfig
from tests.models import numpy_layers
from tests.models.numpy_layers import dense, gelu, layer_norm
from tests.raising import rejected

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


VARIABLES = numpy_layers.normal_variables(CONFIG.module(), INPUTS)


def run(inputs: Any = INPUTS, config: BertConfig = CONFIG, **changes: Any) -> dict[str, jax.Array]:
    module = dataclasses.replace(config, **changes).module()
    return jax.jit(lambda inputs: module.apply(VARIABLES, inputs, train=False))(inputs)


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
        # Numbers of parameters of encoder and pooler (110M and 340M in the paper), and of both heads.
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

    emb = p["embeddings"]
    summed = emb["word"][INPUTS["input_ids"]] + emb["token_type"][INPUTS["token_type_ids"]]
    expected = layer_norm(emb["norm"], summed + emb["position"][np.arange(LENGTH)])
    actual = CONFIG.module().apply(
        VARIABLES, INPUTS, train=False, capture_intermediates=lambda m, _: m.name == "embeddings"
    )[1]["intermediates"]["embeddings"]["__call__"][0]
    np.testing.assert_allclose(actual, expected, atol=1e-5)

    hidden = np.asarray(outputs["hidden"], np.float64)
    pooled = np.tanh(dense(p["pooler"], hidden[:, 0]))
    np.testing.assert_allclose(outputs["nsp_logits"], dense(p["nsp"], pooled), atol=1e-5)
    spans = np.stack([outputs["start_logits"], outputs["end_logits"]], -1)
    np.testing.assert_allclose(spans, dense(p["span"], hidden), atol=1e-5)
    y = dense(p["mlm"]["dense"], hidden)
    y = layer_norm(p["mlm"]["norm"], gelu(y))
    scores = y @ emb["word"].T + p["mlm"]["bias"]
    gathered = np.stack([scores[row, INPUTS["masked_positions"][row]] for row in range(ROWS)])
    np.testing.assert_allclose(outputs["mlm_logits"], gathered, atol=1e-5)


def test_the_gathered_head_equals_the_full_head_at_its_positions() -> None:
    everywhere = {k: v for k, v in INPUTS.items() if k != "masked_positions"}
    full, gathered = run(everywhere)["mlm_logits"], run()["mlm_logits"]
    assert full.shape == (ROWS, LENGTH, 21) and gathered.shape == (ROWS, 2, 21)
    for row in range(ROWS):
        for place, position in enumerate(INPUTS["masked_positions"][row]):
            np.testing.assert_allclose(gathered[row, place], full[row, position], atol=1e-5)
    # An index outside the sequence must not be clipped to another position.
    beyond = run({**INPUTS, "masked_positions": np.full((ROWS, 1), LENGTH, np.int32)})
    assert np.all(np.isnan(beyond["mlm_logits"]))


def test_the_output_matrix_is_that_of_the_words() -> None:
    module = dataclasses.replace(CONFIG, heads=("mlm",)).module()
    params = {k: VARIABLES["params"][k] for k in ("embeddings", "encoder", "mlm")}

    def loss(params: Any) -> jax.Array:
        logits = module.apply({"params": params}, INPUTS, train=False)["mlm_logits"]
        return -jnp.sum(jax.nn.log_softmax(logits)[..., 20])

    grad = jax.jit(jax.grad(loss))(params)["embeddings"]["word"]
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
    # A boolean mask is equivalent.
    same = run({**INPUTS, "attention_mask": real})
    np.testing.assert_array_equal(same["hidden"], one["hidden"])


def test_dtypes() -> None:
    outputs = run(dtype="bfloat16")
    assert outputs.pop("hidden").dtype == jnp.bfloat16
    assert {name: x.dtype.name for name, x in outputs.items()} == dict.fromkeys(
        ("mlm_logits", "nsp_logits", "start_logits", "end_logits"), "float32"
    )
    # The product is float32 and not rounded to bfloat16.
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
    params = jax.jit(lambda: config.module().init(KEY, INPUTS, train=False))()["params"]
    word = np.asarray(params["embeddings"]["word"])
    # Truncation at two standard deviations multiplies the standard deviation by 0.8796.
    assert abs(word.std() - 0.8796 * 0.02) < 1e-4 and 0.0399 < np.abs(word).max() <= 0.04
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        if name in ("bias", "scale"):
            assert np.all(leaf == (name == "scale"))
        else:
            assert abs(np.std(leaf) / 0.02 - 0.8796) < 0.06, path


def test_a_sequence_that_is_too_long() -> None:
    longer = {k: np.zeros((1, 10), np.int32) for k in ("input_ids", "token_type_ids")}
    longer["attention_mask"] = np.ones((1, 10), bool)
    with rejected("max_positions", 9, "is less than the 10 tokens of the sequences", "at least 10"):
        run(longer)


def test_a_word_that_is_not_in_the_vocabulary() -> None:
    ids = INPUTS["input_ids"].copy()
    ids[1, 2] = 21
    hidden = run({**INPUTS, "input_ids": ids})["hidden"]
    assert np.all(np.isnan(hidden[1])) and np.all(np.isfinite(hidden[0]))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_layers": 0}, ("is out of range", "use a whole number of at least 1")),
        ({"vocab_size": 30522.0}, ("is out of range", "use a whole number")),
        ({"num_layers": 10**9}, ("is out of range", "use at most ")),
        ({"hidden_size": 100}, ("is not divisible by config.model.num_heads=12", "use 96 or 108")),
        ({"dropout_rate": 1}, ("is out of range", "use a number of at least 0 and less than 1")),
        ({"attention_dropout_rate": "0.1"}, ("is out of range", "use a number")),
        ({"gelu": "new"}, ("is unknown", "use erf or tanh")),
        ({"remat": "all"}, ("is unknown", "use none, dots or full")),
        ({"dtype": "float16"}, ("is unknown", "use float32 or bfloat16")),
        ({"scan_layers": 1}, ("has the wrong type", "use True or False")),
        ({"heads": "mlm"}, ("is not a list of different heads", "use some of mlm, nsp, span")),
        ({"heads": ("mlm", "sop")}, ("is not a list of different heads", "use some of mlm, ")),
        ({"heads": ("mlm", "mlm")}, ("is not a list of different heads",)),
        ({"heads": 5}, ("is not a list of different heads",)),
        ({"heads": (["mlm"],)}, ("is not a list of different heads",)),
    ],
)
def test_errors(fields: dict[str, Any], message: tuple[str, ...]) -> None:
    ((name, value),) = fields.items()
    with rejected(f"config.model.{name}", value, *message):
        BertConfig(**fields)

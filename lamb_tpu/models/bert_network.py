"""The BERT network: embeddings, encoder, and heads for pre-training and question answering."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.errors import ArgumentError, UserError, not_divisible, out_of_range, unknown
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.transformer import GELUS, REMATS, Encoder, LayerConfig

HEADS = ("mlm", "nsp", "span")
DTYPES = ("float32", "bfloat16")
_MOST_LAYERS = 10_000  # the deepest published Transformer has 1,000


def _size(num_layers: int, hidden_size: int) -> dict[str, int]:
    """Returns the fields of a published size: heads of width 64, and an MLP of width 4 * hidden_size."""
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size,
    }


# Fields of `BertConfig`. Base and Large are from the paper, the smaller sizes from Turc et al.
# (2019), Well-Read Students Learn Better. The README of google-research/bert lists all of them.
SIZES: dict[str, dict[str, int]] = {
    "tiny": _size(2, 128),
    "mini": _size(4, 256),
    "small": _size(4, 512),
    "medium": _size(8, 512),
    "base": _size(12, 768),
    "large": _size(24, 1024),
}


@dataclasses.dataclass(frozen=True)
class BertConfig(LayerConfig):
    """Settings of a BERT; the defaults are BERT-Base, and `**SIZES['large']` gives BERT-Large.

    Google's code uses gelu='tanh', but Hugging Face publishes Google's checkpoints with 'erf'. The
    values of the two functions differ by less than 0.0005.

    Attributes:
      num_layers: number of encoder layers.
      vocab_size: number of words in the vocabulary.
      max_positions: length of the longest sequence.
      num_token_types: number of segments that a token can belong to.
      heads: some of 'mlm' (masked words; its output matrix is the word embeddings), 'nsp' (next
        sentence, from the pooled first token) and 'span' (start and end of an answer).
      scan_layers: see `transformer.Encoder`; needs the rules `bert_rules.PARAMETERS_SCANNED`.
      remat: see `transformer.Encoder`.

    Raises:
      UserError: a value is out of range; the message names the key of config.model.
    """

    num_layers: int = 12
    vocab_size: int = 30522
    max_positions: int = 512
    num_token_types: int = 2
    heads: tuple[str, ...] = ("mlm", "nsp")
    scan_layers: bool = False
    remat: str = "none"

    def __post_init__(self) -> None:
        # `field.type` is a type and not a string, because this file has no `from __future__ import
        # annotations`. Compare `type(value)`, because True is an instance of int.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            key = f"config.model.{field.name}"
            if field.type is int and (type(value) is not int or value < 1):
                raise out_of_range(key, value, "a whole number of at least 1")
            if field.type is float and (type(value) not in (int, float) or not 0 <= value < 1):
                raise out_of_range(key, value, "a number of at least 0 and less than 1")
            if field.type is bool and type(value) is not bool:
                raise UserError(key, value, "has the wrong type", "use True or False")
        for name, known in (("gelu", GELUS), ("remat", REMATS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise unknown(f"config.model.{name}", getattr(self, name), known)
        if self.num_layers > _MOST_LAYERS:  # tracing a billion layers would take years
            valid = f"at most {_MOST_LAYERS:,}"
            raise out_of_range("config.model.num_layers", self.num_layers, valid)
        if self.hidden_size % self.num_heads:
            of, key = f"config.model.num_heads={self.num_heads}", "config.model.hidden_size"
            raise not_divisible(key, self.hidden_size, self.num_heads, of)
        heads = self.heads
        is_list = isinstance(heads, (list, tuple)) and all(head in HEADS for head in heads)
        if not is_list or len(set(heads)) < len(heads):
            problem = "is not a list of different heads"
            raise UserError("config.model.heads", heads, problem, f"use some of {', '.join(HEADS)}")
        # A config file has a list, in any order; a tuple is hashable, and its order is fixed here.
        object.__setattr__(self, "heads", tuple(head for head in HEADS if head in heads))

    def module(self) -> "Bert":
        """Builds the network of this config."""
        return Bert(self)


class Embeddings(nn.Module):
    """The sum of word, position and token type embeddings, followed by LayerNorm and dropout."""

    config: BertConfig

    # `setup` instead of `nn.compact`, because `scores` multiplies by the same word matrix.
    def setup(self) -> None:
        config = self.config
        init, width = config.matrix_init(), config.hidden_size
        self.word = self.param("word", init, (config.vocab_size, width))
        self.position = self.param("position", init, (config.max_positions, width))
        self.token_type = self.param("token_type", init, (config.num_token_types, width))
        self.norm = config.layer_norm("norm")
        self.dropout = Dropout(config.dropout_rate)

    def __call__(self, inputs: Mapping[str, jax.Array], train: bool) -> jax.Array:
        """Returns (batch, length, hidden); tokens with an id outside the vocabulary get NaN."""
        # Use a product with one-hot vectors: because there are few token types, its gradient is
        # faster than a gather's, which is a scatter over all tokens.
        types = jax.nn.one_hot(inputs["token_type_ids"], self.config.num_token_types)
        x = jnp.take(self.word, inputs["input_ids"], axis=0)
        x = x + jnp.einsum("blt,th->blh", types, self.token_type)
        x = self.norm(x + self.position[: x.shape[1]])
        return self.dropout(x, train)

    def scores(self, x: jax.Array) -> jax.Array:
        """Multiplies vectors (..., hidden) by all word embeddings; returns float32 (..., vocab_size)."""
        word = self.word.astype(x.dtype)
        return jnp.einsum("...h,vh->...v", x, word, preferred_element_type=jnp.float32)


class MaskedWords(nn.Module):
    """Dense layer, GELU and LayerNorm: the masked-word head up to the product with word embeddings."""

    config: BertConfig

    # `setup` instead of `nn.compact`, because `Bert` adds `bias` after the product with the embeddings.
    def setup(self) -> None:
        self.dense = self.config.dense(self.config.hidden_size, "dense")
        self.norm = self.config.layer_norm("norm")
        self.bias = self.param("bias", nn.initializers.zeros, (self.config.vocab_size,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., hidden) to the same shape."""
        return self.norm(self.config.activation(self.dense(x)))


class Bert(nn.Module):
    """The network of a `BertConfig`.

    Parameters are under 'embeddings' and 'encoder', and for the heads under 'mlm', 'pooler', 'nsp'
    and 'span'.

    References:
      Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language
      Understanding, 2018.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array], train: bool) -> dict[str, jax.Array]:
        """Returns the last layer's output and the heads' logits.

        Args:
          inputs: `input_ids`, `token_type_ids` (both int32) and `attention_mask` (nonzero at
            tokens, 0 at padding), each (batch, length). If the inputs have `masked_positions`,
            int32 (batch, P), the head 'mlm' predicts only these positions, otherwise all.
          train: whether to apply dropout.

        Returns:
          `hidden` (batch, length, hidden) in the activations' dtype; float32 logits of the
          network's heads: `mlm_logits` (batch, P or length, vocab_size), `nsp_logits` (batch, 2),
          `start_logits` and `end_logits` (batch, length).

        Raises:
          ValueError: the sequence is longer than config.max_positions.
        """
        config = self.config
        length = inputs["input_ids"].shape[1]
        if length > config.max_positions:
            problem = f"is less than the {length} tokens of the sequences"
            remedy = f"use at least {length}"
            raise ArgumentError("max_positions", config.max_positions, problem, remedy)
        embeddings = Embeddings(config, name="embeddings")
        encoder = Encoder(
            config, config.num_layers, config.scan_layers, config.remat, name="encoder"
        )
        x = encoder(embeddings(inputs, train), inputs["attention_mask"] != 0, train)
        outputs = {"hidden": x}
        if "mlm" in config.heads:
            words = MaskedWords(config, name="mlm")
            at = inputs.get("masked_positions")
            # Gather before the head, whose product with the word embeddings is the largest in the
            # network: for 20 of 128 positions, this product costs only a sixth.
            gathered = x if at is None else jnp.take_along_axis(x, at[..., None], axis=1)
            outputs["mlm_logits"] = embeddings.scores(words(gathered)) + words.bias
        if "nsp" in config.heads:
            # The vector of the first token, [CLS], represents the pair of segments.
            pooled = jnp.tanh(config.dense(config.hidden_size, "pooler")(x[:, 0]))
            outputs["nsp_logits"] = config.dense(2, "nsp", jnp.float32)(pooled)
        if "span" in config.heads:
            logits = config.dense(2, "span", jnp.float32)(x)
            outputs["start_logits"], outputs["end_logits"] = logits[..., 0], logits[..., 1]
        return outputs

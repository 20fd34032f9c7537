"""BERT: embeddings, encoder and the heads of pre-training and of question answering."""

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from lamb_tpu.errors import UserError
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.transformer import GELUS, REMATS, Encoder, LayerConfig

HEADS = ("mlm", "nsp", "span")
DTYPES = ("float32", "bfloat16")
_MOST_LAYERS = 10_000  # the deepest Transformer published has 1,000


def _size(num_layers: int, hidden_size: int) -> dict[str, int]:
    """Returns the fields of a published size: heads of width 64, and a four times wider MLP."""
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size,
    }


# Fields of `BertConfig`. Base and Large are of the paper, the smaller ones of Turc et al. (2019),
# Well-Read Students Learn Better; all are listed in the README of google-research/bert.
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
    """A BERT, by default Base: `BertConfig(**SIZES['large'], scan_layers=True)`.

    Google's code has gelu='tanh'; its checkpoints as Hugging Face publishes them say 'erf'. The two
    differ by less than 0.0005.

    Attributes:
      num_layers: number of encoder layers.
      vocab_size: number of words.
      max_positions: length of the longest sequence.
      num_token_types: number of segments that a token can belong to.
      heads: some of 'mlm' (masked words; its output matrix is that of the word embeddings), 'nsp'
        (next sentence, on the pooled first token) and 'span' (start and end of an answer).
      scan_layers: see `transformer.Encoder`; to be trained by `bert_rules.PARAMETERS_SCANNED`.
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
        # `field.type` is the type itself; under `from __future__ import annotations` it would be a
        # string. `type(value)` is compared, because True is an instance of int.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            where = f"config.model.{field.name} is {value!r}; it must be"
            if field.type is int and (type(value) is not int or value < 1):
                raise UserError(f"{where} a whole number of at least 1")
            if field.type is float and (type(value) not in (int, float) or not 0 <= value < 1):
                raise UserError(f"{where} a number in [0, 1)")
            if field.type is bool and type(value) is not bool:
                raise UserError(f"{where} True or False")
        for name, known in (("gelu", GELUS), ("remat", REMATS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise UserError(
                    f"config.model.{name} is {getattr(self, name)!r}; known: {', '.join(known)}"
                )
        if self.num_layers > _MOST_LAYERS:  # each layer is traced; a billion would take years
            raise UserError(
                f"config.model.num_layers is {self.num_layers:,}; it must be at most "
                f"{_MOST_LAYERS:,}"
            )
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"config.model.hidden_size is {self.hidden_size}, which does not divide over "
                f"config.model.num_heads={self.num_heads}"
            )
        heads = self.heads
        is_list = isinstance(heads, (list, tuple)) and all(head in HEADS for head in heads)
        if not is_list or len(set(heads)) < len(heads):
            raise UserError(
                f"config.model.heads is {heads!r}; it must be a list of some of {', '.join(HEADS)}"
            )
        # In one order and hashable, whatever list a config file has.
        object.__setattr__(self, "heads", tuple(head for head in HEADS if head in heads))

    def module(self) -> "Bert":
        """Returns the network of this config."""
        return Bert(self)


class Embeddings(nn.Module):
    """Sum of the embeddings of words, positions and token types; LayerNorm and dropout after it."""

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
        """Returns (batch, length, hidden); NaN for an id that is not in the vocabulary."""
        # There are few types, so a product is faster than a scatter of all tokens' gradients.
        types = jax.nn.one_hot(inputs["token_type_ids"], self.config.num_token_types)
        x = jnp.take(self.word, inputs["input_ids"], axis=0)
        x = x + jnp.einsum("blt,th->blh", types, self.token_type)
        x = self.norm(x + self.position[: x.shape[1]])
        return self.dropout(x, train)

    def scores(self, x: jax.Array) -> jax.Array:
        """Returns products of vectors (..., hidden) with all words, float32 (..., vocab_size)."""
        word = self.word.astype(x.dtype)
        return jnp.einsum("...h,vh->...v", x, word, preferred_element_type=jnp.float32)


class MaskedWords(nn.Module):
    """Layers of the masked-word head before the product with the words: dense, GELU, LayerNorm."""

    config: BertConfig

    # `setup` instead of `nn.compact`, because `Bert` adds `bias` after the product with the words.
    def setup(self) -> None:
        self.dense = self.config.dense(self.config.hidden_size, "dense")
        self.norm = self.config.layer_norm("norm")
        self.bias = self.param("bias", nn.initializers.zeros, (self.config.vocab_size,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., hidden) to the same shape."""
        return self.norm(self.config.activation(self.dense(x)))


class Bert(nn.Module):
    """The network of a `BertConfig`.

    Parameters are under 'embeddings' and 'encoder', and for the heads under 'mlm', 'pooler' and
    'nsp', 'span'.

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
            tokens, 0 at padding), each (batch, length). With `masked_positions`, int32 (batch, P),
            the head 'mlm' predicts these positions only, otherwise all.
          train: whether to drop values.

        Returns:
          `hidden` (batch, length, hidden) in the activations' dtype; float32 logits of the
          network's heads: `mlm_logits` (batch, P, vocab_size), `nsp_logits` (batch, 2),
          `start_logits` and `end_logits` (batch, length).

        Raises:
          ValueError: the sequence is longer than config.max_positions.
        """
        config = self.config
        length = inputs["input_ids"].shape[1]
        if length > config.max_positions:
            raise ValueError(
                f"sequences of {length} tokens; this BERT has positions for {config.max_positions}"
            )
        embeddings = Embeddings(config, name="embeddings")
        encoder = Encoder(
            config, config.num_layers, config.scan_layers, config.remat, name="encoder"
        )
        x = encoder(embeddings(inputs, train), inputs["attention_mask"] != 0, train)
        outputs = {"hidden": x}
        if "mlm" in config.heads:
            words = MaskedWords(config, name="mlm")
            at = inputs.get("masked_positions")
            # Gathered before the head: the product with the vocabulary is the largest of all, and
            # at 20 of 128 positions it shrinks to a sixth.
            gathered = x if at is None else jnp.take_along_axis(x, at[..., None], axis=1)
            outputs["mlm_logits"] = embeddings.scores(words(gathered)) + words.bias
        if "nsp" in config.heads:
            # The first token is [CLS], whose vector stands for the pair of segments.
            pooled = jnp.tanh(config.dense(config.hidden_size, "pooler")(x[:, 0]))
            outputs["nsp_logits"] = config.dense(2, "nsp", jnp.float32)(pooled)
        if "span" in config.heads:
            logits = config.dense(2, "span", jnp.float32)(x)
            outputs["start_logits"], outputs["end_logits"] = logits[..., 0], logits[..., 1]
        return outputs

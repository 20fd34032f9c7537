"""GNMT: a translation network with an LSTM encoder, an LSTM decoder and attention."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.errors import out_of_range
from lamb_tpu.kernels.recurrence import Carry
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.lstm import LSTM, uniform_dense, uniform_within

# Attention score of padding; a token's score is at most `scale` times the square root of `features`.
_PADDING = -1e9
_LEAST_LAYERS = 2  # the second layer maps the bidirectional layer's 2 * features to features


class Memory(NamedTuple):
    """The encoded source sentences, which the decoder attends to."""

    outputs: jax.Array  # outputs of the last layer, (batch, source steps, features)
    keys: jax.Array  # projection of these outputs for the attention, with the same shape
    mask: jax.Array  # bool (batch, source steps), true at tokens


class Decode(NamedTuple):
    """Functions that a search calls to generate sentences word by word.

    Attributes:
      start: `(variables, inputs) -> (memory, state)`: encodes the sources. Each leaf of the two
        trees has the batch as its first axis.
      step: `(variables, memory, state, tokens) -> (logits, weights, state)`: takes the previous
        words, int32 (batch,), and returns the next word's logits (batch, vocab_size) and the
        attention weights (batch, source steps).
    """

    start: Callable[[Any, Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


class GNMT(nn.Module):
    """The translation network of Wu et al. as in MLPerf's reference, with 160,634,433 parameters.

    The reference has 160,671,297 parameters, because PyTorch's LSTMs have a second bias.

    The encoder's first layer is bidirectional, and its second layer reads the outputs of both
    directions. The decoder's first layer gives the queries of the attention; the context vectors are
    concatenated to the input of every later layer. Encoder and decoder have residual connections from
    the third layer up. Source and target share one vocabulary and one embedding. Initial values are
    uniform in (-init_scale, init_scale), as in MLPerf's code (from memory).

    Attributes:
      vocab_size: number of words.
      features: width of the embedding and of every layer.
      num_layers: number of layers of the encoder, and of the decoder; at least 2.
      dropout_rate: fraction of each layer's inputs that is dropped.
      init_scale: bound of the initial values.
      dtype: dtype of the operands of matrix products, 'float32' or 'bfloat16'.

    References:
      Wu et al., Google's Neural Machine Translation System, arXiv:1609.08144.
    """

    vocab_size: int = 32_320
    features: int = 1024
    num_layers: int = 4
    dropout_rate: float = 0.2
    init_scale: float = 0.1
    dtype: str = "float32"

    def setup(self) -> None:
        for name, least in (("vocab_size", 1), ("features", 1), ("num_layers", _LEAST_LAYERS)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise out_of_range(
                    f"config.model.{name}", value, f"a whole number of at least {least}"
                )
        self.embedding = self.param(
            "embedding", uniform_within(self.init_scale), (self.vocab_size, self.features)
        )
        shared = {
            name: getattr(self, name)
            for name in ("features", "num_layers", "dropout_rate", "init_scale", "dtype")
        }
        self.encoder = Encoder(**shared)
        self.decoder = Decoder(vocab_size=self.vocab_size, **shared)

    def __call__(self, inputs: Mapping[str, jax.Array], train: bool) -> dict[str, jax.Array]:
        """Predicts each target word from the source sentence and the target words before it.

        Args:
          inputs: `source_ids` int32 (batch, source steps) and `source_length` int32 (batch,), at
            least 1; `target_ids` int32 (batch, target steps + 1), which starts with the start
            token.
          train: whether to apply dropout.

        Returns:
          `logits`, float32 (batch, target steps, vocab_size), for the words `target_ids[:, 1:]`.
        """
        memory, state = self.start(inputs, train)
        # The last word has no successor to predict.
        words = jnp.take(self.embedding, inputs["target_ids"][:, :-1], axis=0)
        logits, _, _ = self.decoder(words, memory, state, train)
        return {"logits": logits}

    def start(
        self, inputs: Mapping[str, jax.Array], train: bool = False
    ) -> tuple[Memory, tuple[Carry, ...]]:
        """Returns the encoded sources, and the decoder's state before the first word."""
        ids, lengths = inputs["source_ids"], inputs["source_length"]
        mask = jnp.arange(ids.shape[1]) < lengths[:, None]
        memory = self.encoder(jnp.take(self.embedding, ids, axis=0), mask, train)
        zero = jnp.zeros_like(memory.outputs[:, 0])
        return memory, (Carry(zero, zero),) * self.num_layers

    def step(
        self, memory: Memory, state: tuple[Carry, ...], tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[Carry, ...]]:
        """Predicts the next word of each sentence, see `Decode`."""
        words = jnp.take(self.embedding, tokens[:, None], axis=0)
        logits, weights, state = self.decoder(words, memory, state, False)
        return logits[:, 0], weights[:, 0], state


class _Layers(nn.Module):
    """The fields that encoder and decoder share."""

    features: int
    num_layers: int
    dropout_rate: float
    init_scale: float
    dtype: str

    @nn.nowrap
    def layer(
        self,
        name: str,
        x: jax.Array,
        train: bool,
        carry: Carry | None = None,
        valid: jax.Array | None = None,
        reverse: bool = False,
    ) -> tuple[jax.Array, Carry]:
        """Applies dropout and then a named LSTM layer to (batch, steps, ...)."""
        # Apply dropout before swapping the axes: the first axis of its input must be the rows.
        x = Dropout(self.dropout_rate, name=f"{name}_dropout")(x, train)
        lstm = LSTM(
            self.features, self.init_scale, reverse=reverse, dtype=jnp.dtype(self.dtype), name=name
        )
        outputs, last = lstm(x.swapaxes(0, 1), carry, valid)
        return outputs.swapaxes(0, 1), last


class Encoder(_Layers):
    """The encoder's layers, and the projection of its outputs to the attention's keys."""

    @nn.compact
    def __call__(self, words: jax.Array, mask: jax.Array, train: bool) -> Memory:
        """Encodes embedded words (batch, steps, features), padded where `mask` is false."""
        outputs = [
            self.layer(name, words, train, valid=mask.T, reverse=name == "backward")[0]
            for name in ("forward", "backward")
        ]
        # Later layers read forward. Padding comes last, so it does not change any word's output.
        x = jnp.where(mask[..., None], jnp.concatenate(outputs, -1), 0)
        x, _ = self.layer("layer_1", x, train)
        for number in range(2, self.num_layers):
            x = x + self.layer(f"layer_{number}", x, train)[0]
        keys = uniform_dense(self.features, self.init_scale, self.dtype, "keys", use_bias=False)
        return Memory(x, keys(x), mask)


class Decoder(_Layers):
    """The decoder's layers, its attention and the output layer."""

    vocab_size: int

    @nn.compact
    def __call__(
        self, words: jax.Array, memory: Memory, state: tuple[Carry, ...], train: bool
    ) -> tuple[jax.Array, jax.Array, tuple[Carry, ...]]:
        """Reads embedded target words (batch, steps, features), starting from `state`.

        Returns the logits of each next word, float32 (batch, steps, vocab_size), the attention
        weights (batch, steps, source steps), and the state after the last word.
        """
        x, carry = self.layer("layer_0", words, train, state[0])
        carries = [carry]
        attention = Attention(self.features, self.init_scale, self.dtype, name="attention")
        context, weights = attention(x, memory)
        for number in range(1, self.num_layers):
            with_context = jnp.concatenate([x, context], -1)
            y, carry = self.layer(f"layer_{number}", with_context, train, state[number])
            x = y if number == 1 else x + y
            carries.append(carry)
        output = uniform_dense(self.vocab_size, self.init_scale, self.dtype, "output")
        return output(x), weights, tuple(carries)


class Attention(nn.Module):
    """Normalised additive attention: the score of a key is g v/|v| . tanh(W q + k + b).

    W and v are drawn uniformly from (-init_scale, init_scale); g starts at features^-1/2, b at 0.

    References:
      Bahdanau et al., arXiv:1409.0473; the normalisation: Salimans and Kingma, arXiv:1602.07868.
    """

    features: int
    init_scale: float
    dtype: str

    @nn.compact
    def __call__(self, queries: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """Returns contexts (batch, steps, features) and weights (batch, steps, source steps)."""
        projection = uniform_dense(
            self.features, self.init_scale, self.dtype, "queries", use_bias=False
        )
        queries = projection(queries)
        vector = self.param("vector", uniform_within(self.init_scale), (self.features,))
        scale = self.param("scale", nn.initializers.constant(self.features**-0.5), (1,))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        direction = scale * vector / jnp.linalg.norm(vector)

        # Recompute this for the gradient, to avoid storing (batch, steps, source steps, features).
        @jax.checkpoint
        def scores(queries: jax.Array, keys: jax.Array, direction: jax.Array) -> jax.Array:
            summed = queries[:, :, None] + keys[:, None]
            return jnp.sum(direction * jnp.tanh(summed), -1)

        logits = scores(queries + bias, memory.keys.astype(queries.dtype), direction)
        weights = jax.nn.softmax(jnp.where(memory.mask[:, None], logits, _PADDING), -1)
        dtype = jnp.dtype(self.dtype)
        context = jnp.einsum(
            "bts,bsh->bth",
            weights.astype(dtype),
            memory.outputs.astype(dtype),
            preferred_element_type=np.promote_types(dtype, jnp.float32),
        )
        return context, weights


def decode(module: GNMT) -> Decode:
    """Returns the functions that a beam search calls to generate sentences with this network."""
    apply: Callable[..., Any] = module.apply
    return Decode(
        functools.partial(apply, method=GNMT.start), functools.partial(apply, method=GNMT.step)
    )

"""GNMT: an LSTM encoder and decoder with attention, which translates sentences."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.errors import UserError
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.lstm import LSTM, uniform_within
from lamb_tpu.models.product import dot_general
from lamb_tpu.models.promotion import Dense
from lamb_tpu.models.recurrence import Carry

# Score of padding, below every score of a token: the vector's length bounds those.
_PADDING = -1e9
_LEAST_LAYERS = 2  # the second layer halves the width of the bidirectional one


class Memory(NamedTuple):
    """The encoder's view of the source sentences, which the decoder attends to.

    Attributes:
      outputs: outputs of the last layer, (batch, source steps, features).
      keys: their projection for the attention, of the same shape.
      mask: bool (batch, source steps), true at tokens.
    """

    outputs: jax.Array
    keys: jax.Array
    mask: jax.Array


class Decode(NamedTuple):
    """Functions of a network that writes one word after the other, for a search.

    Attributes:
      start: `(variables, inputs) -> (memory, state)`: reads the sources; each leaf of the two
        trees has the batch as its first axis.
      step: `(variables, memory, state, tokens) -> (logits, weights, state)`: takes the previous
        words, int32 (batch,), and returns the next word's logits (batch, vocab_size) and the
        attention's weights (batch, source steps).
    """

    start: Callable[[Any, Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]


class GNMT(nn.Module):
    """The translation network of Wu et al. as MLPerf's reference has it: 160,634,433 parameters.

    PyTorch's second bias of each LSTM makes them 160,671,297 there.

    The encoder's first layer reads in both directions, the second takes both outputs, and from the
    third on each layer's input is added to its output. The decoder's first layer asks the
    attention, whose context is joined to the input of every later layer; residuals again from the
    third on. Source and target share one vocabulary and one embedding. Initial values are uniform
    in (-init_scale, init_scale), as in MLPerf's code (recalled).

    Attributes:
      vocab_size: number of words.
      features: width of the embedding and of every layer.
      num_layers: number of layers of the encoder, and of the decoder; at least 2.
      dropout_rate: share of each layer's inputs that is dropped.
      init_scale: bound of the initial values.
      dtype: 'float32' or 'bfloat16', of the matrix products' factors.

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
                raise UserError(
                    f"config.model.{name} is {value!r}; it must be a whole number of at least "
                    f"{least}"
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
        """Predicts each word of the targets from the sources and the words before it.

        Args:
          inputs: `source_ids` int32 (batch, source steps) and `source_length` int32 (batch,), at
            least 1; `target_ids` int32 (batch, target steps + 1), whose first is the sign that
            begins a sentence.
          train: whether to drop values.

        Returns:
          `logits`, float32 (batch, target steps, vocab_size), of the words `target_ids[:, 1:]`.
        """
        memory, state = self.start(inputs, train)
        # The last word predicts none.
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
        """Predicts one word, see `Decode`."""
        words = jnp.take(self.embedding, tokens[:, None], axis=0)
        logits, weights, state = self.decoder(words, memory, state, False)
        return logits[:, 0], weights[:, 0], state


class Encoder(nn.Module):
    """The encoder's layers, and the projection of its outputs to the attention's keys."""

    features: int
    num_layers: int
    dropout_rate: float
    init_scale: float
    dtype: str

    @nn.compact
    def __call__(self, words: jax.Array, mask: jax.Array, train: bool) -> Memory:
        """Encodes embedded words (batch, steps, features), padded where `mask` is false."""
        layer = _layers(self, train)
        outputs = [
            layer(name, words, valid=mask.T, reverse=name == "backward")[0]
            for name in ("forward", "backward")
        ]
        # Later layers read forward, so that padding, which comes last, changes no word's output.
        x = jnp.where(mask[..., None], jnp.concatenate(outputs, -1), 0)
        x, _ = layer("layer_1", x)
        for number in range(2, self.num_layers):
            x = x + layer(f"layer_{number}", x)[0]
        return Memory(x, _dense(self, self.features, "keys", use_bias=False)(x), mask)


class Decoder(nn.Module):
    """The decoder's layers, its attention and the output layer."""

    vocab_size: int
    features: int
    num_layers: int
    dropout_rate: float
    init_scale: float
    dtype: str

    @nn.compact
    def __call__(
        self, words: jax.Array, memory: Memory, state: tuple[Carry, ...], train: bool
    ) -> tuple[jax.Array, jax.Array, tuple[Carry, ...]]:
        """Continues sentences by embedded words (batch, steps, features).

        Returns:
          Logits of the words after each, float32 (batch, steps, vocab_size); the attention's
          weights (batch, steps, source steps); and the state after the last word.
        """
        layer = _layers(self, train)
        x, carry = layer("layer_0", words, state[0])
        carries = [carry]
        attention = Attention(self.features, self.init_scale, self.dtype, name="attention")
        context, weights = attention(x, memory)
        for number in range(1, self.num_layers):
            joined = jnp.concatenate([x, context], -1)
            y, carry = layer(f"layer_{number}", joined, state[number])
            x = y if number == 1 else x + y
            carries.append(carry)
        logits = _dense(self, self.vocab_size, "output")(x)
        return logits, weights, tuple(carries)


class Attention(nn.Module):
    """Normalised additive attention: the score of a key is g v/|v| . tanh(W q + k + b).

    Attributes:
      features: width of queries and keys.
      init_scale: bound of the initial values of W and v; g begins as features^-1/2, and b as 0.
      dtype: of the matrix products' factors.

    References:
      Bahdanau et al., arXiv:1409.0473; the normalisation: Salimans and Kingma, arXiv:1602.07868.
    """

    features: int
    init_scale: float
    dtype: str

    @nn.compact
    def __call__(self, queries: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        """Returns contexts (batch, steps, features) and weights (batch, steps, source steps)."""
        queries = _dense(self, self.features, "queries", use_bias=False)(queries)
        vector = self.param("vector", uniform_within(self.init_scale), (self.features,))
        scale = self.param("scale", nn.initializers.constant(self.features**-0.5), (1,))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        direction = scale * vector / jnp.linalg.norm(vector)

        # Computed again for the gradient: (batch, steps, source steps, features) is never stored.
        @jax.checkpoint
        def scores(queries: jax.Array, keys: jax.Array, direction: jax.Array) -> jax.Array:
            summed = queries[:, :, None] + keys[:, None]
            return jnp.sum(direction * jnp.tanh(summed), -1)

        found = scores(queries + bias, memory.keys.astype(queries.dtype), direction)
        weights = jax.nn.softmax(jnp.where(memory.mask[:, None], found, _PADDING), -1)
        dtype = jnp.dtype(self.dtype)
        context = jnp.einsum(
            "bts,bsh->bth",
            weights.astype(dtype),
            memory.outputs.astype(dtype),
            preferred_element_type=np.promote_types(dtype, jnp.float32),
        )
        return context, weights


def decode(module: GNMT) -> Decode:
    """Returns the functions by which a search writes with a network."""

    def start(variables: Any, inputs: Any) -> tuple[Any, Any]:
        return module.apply(variables, inputs, method=GNMT.start)

    def step(
        variables: Any, memory: Any, state: Any, tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        found: Any = module.apply(variables, memory, state, tokens, method=GNMT.step)
        return found

    return Decode(start, step)


def _layers(module: Encoder | Decoder, train: bool) -> Callable[..., tuple[jax.Array, Carry]]:
    """Returns a function that applies a named LSTM layer, after dropout, to (batch, steps, ...)."""

    def apply(
        name: str,
        x: jax.Array,
        carry: Carry | None = None,
        valid: jax.Array | None = None,
        reverse: bool = False,
    ) -> tuple[jax.Array, Carry]:
        # Before the axes change places, because masks belong to rows.
        x = Dropout(module.dropout_rate, name=f"{name}_dropout")(x, train)
        layer = LSTM(
            module.features,
            module.init_scale,
            reverse=reverse,
            dtype=jnp.dtype(module.dtype),
            name=name,
        )
        outputs, last = layer(x.swapaxes(0, 1), carry, valid)
        return outputs.swapaxes(0, 1), last

    return apply


def _dense(
    module: Encoder | Decoder | Attention, features: int, name: str, use_bias: bool = True
) -> nn.Dense:
    init, dtype = uniform_within(module.init_scale), jnp.dtype(module.dtype)
    # By default a product of bfloat16 is rounded to it.
    product = functools.partial(
        dot_general, preferred_element_type=np.promote_types(dtype, jnp.float32)
    )
    return Dense(
        features,
        use_bias=use_bias,
        kernel_init=init,
        bias_init=init,
        dtype=dtype,
        dot_general=product,
        name=name,
    )

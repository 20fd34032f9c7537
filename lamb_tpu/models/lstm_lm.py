"""An LSTM language model, which passes its state from one window of a text to the next."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.errors import out_of_range, unknown
from lamb_tpu.kernels.recurrence import Carry
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.lstm import LSTM, uniform_dense, uniform_within

DROPOUTS = ("plain", "variational")

# Fields of the networks of Zaremba et al. The small network has no dropout.
SIZES: dict[str, dict[str, Any]] = {
    "small": {"features": 200, "dropout_rate": 0.0, "init_scale": 0.1},
    "medium": {"features": 650, "dropout_rate": 0.5, "init_scale": 0.05},
    "large": {"features": 1500, "dropout_rate": 0.65, "init_scale": 0.04},
}


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers of the same width, and a dense layer onto the vocabulary.

    Every parameter is drawn uniformly from (-init_scale, init_scale), as in Zaremba's code;
    TensorFlow's tutorial of the same networks starts the LSTM's biases at 0.

    Attributes:
      vocab_size: number of words.
      features: width of the embedding and number of cells of each layer.
      num_layers: number of LSTM layers.
      dropout_rate: fraction of dropped values, in [0, 1).
      dropout: 'plain' draws a new mask in each step for the input of each layer and the output of
        the last layer, and none for the recurrent connections (Zaremba et al.). 'variational' uses
        the same masks in all steps of a window, and also drops units of the hidden state between
        steps (Gal and Ghahramani, but without their dropout of words).
      tied: whether the dense layer's kernel is the transposed embedding; it still has a bias.
      init_scale: bound of the initial values.
      forget_bias: added to the forget gates' initial bias.
      dtype: dtype of the operands of matrix products, 'float32' or 'bfloat16'. Sums, carry and
        logits are float32.

    References:
      Zaremba, Sutskever and Vinyals, Recurrent Neural Network Regularization, arXiv:1409.2329.
      Gal and Ghahramani, A Theoretically Grounded Application of Dropout in Recurrent Neural
      Networks, arXiv:1512.05287.
      Press and Wolf, Using the Output Embedding to Improve Language Models, arXiv:1608.05859.
    """

    vocab_size: int = 10_000
    features: int = 200
    num_layers: int = 2
    dropout_rate: float = 0.0
    dropout: str = "plain"
    tied: bool = False
    init_scale: float = 0.1
    forget_bias: float = 0.0
    dtype: str = "float32"

    @property
    def carry_shape(self) -> tuple[int, ...]:
        """The shape of a row's carry: (layers, 2, features), for hidden state and cells."""
        return self.num_layers, 2, self.features

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array], train: bool) -> dict[str, jax.Array]:
        """Reads a window of each row's text.

        Args:
          inputs: `inputs`, int32 (rows, steps), the words; and `carry`, float32 (rows, layers, 2,
            features), the state after the previous window. Without `carry`, the state is zero.
          train: whether to apply dropout.

        Returns:
          `logits`, float32 (rows, steps, vocab_size), for each next word; and the new `carry`.

        Raises:
          ValueError: a field of the network is out of range.
        """
        if self.dropout not in DROPOUTS:
            raise unknown("config.model.dropout", self.dropout, DROPOUTS)
        for name in ("vocab_size", "features", "num_layers"):
            if getattr(self, name) < 1:
                raise out_of_range(f"config.model.{name}", getattr(self, name), "at least 1")
        words, uniform = inputs["inputs"], uniform_within(self.init_scale)
        dtype = jnp.dtype(self.dtype)
        embed = nn.Embed(
            self.vocab_size, self.features, embedding_init=uniform, dtype=dtype, name="embedding"
        )
        x, carries = self._drop(embed(words), train), []
        for layer in range(self.num_layers):
            first = None
            if "carry" in inputs:
                first = Carry(*jnp.moveaxis(inputs["carry"][:, layer], 1, 0))
            lstm = LSTM(
                self.features, self.init_scale, self.forget_bias, dtype=dtype, name=f"lstm_{layer}"
            )
            factor = None
            if self.dropout == "variational" and train and self.dropout_rate:
                ones = jnp.ones((len(words), self.features), jnp.float32)
                factor = Dropout(self.dropout_rate)(ones, train)
            # The LSTM layer needs the steps as the first axis, and dropout needs the rows.
            outputs, last = lstm(x.swapaxes(0, 1), first, factor=factor)
            x = self._drop(outputs.swapaxes(0, 1), train)
            carries.append(jnp.stack(last, axis=1))
        if self.tied:
            bias = self.param("output_bias", uniform, (self.vocab_size,), jnp.float32)
            logits = embed.attend(x)
            logits = logits.astype(np.promote_types(logits.dtype, bias.dtype)) + bias
        else:
            output = uniform_dense(self.vocab_size, self.init_scale, self.dtype, "output")
            logits = output(x)
        return {
            "logits": logits.astype(jnp.float32),
            "carry": jnp.stack(carries, axis=1).astype(jnp.float32),
        }

    def _drop(self, x: jax.Array, train: bool) -> jax.Array:
        if self.dropout == "plain":
            return Dropout(self.dropout_rate)(x, train)
        return x * Dropout(self.dropout_rate)(jnp.ones_like(x[:, :1]), train)

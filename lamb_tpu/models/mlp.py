"""A fully connected network."""

from collections.abc import Sequence

import flax.linen as nn
import jax


class MLP(nn.Module):
    """Dense layers with ReLU between them.

    Attributes:
      num_classes: width of the output.
      hidden_sizes: widths of the hidden layers.
    """

    num_classes: int = 10
    hidden_sizes: Sequence[int] = (128, 64)

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Logits of shape (batch, num_classes) for inputs of shape (batch, ...)."""
        del train
        sizes = self.hidden_sizes
        if isinstance(sizes, str) or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"hidden_sizes must be whole numbers of at least 1, not {sizes!r}")
        x = inputs.reshape(inputs.shape[0], -1)
        for index, size in enumerate(self.hidden_sizes):
            x = nn.relu(nn.Dense(size, name=f"hidden{index}")(x))
        return nn.Dense(self.num_classes, name="output")(x)

"""A fully connected network."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.norm import BatchNorm

_MOST_LAYERS = 10_000  # each layer is traced separately, which takes time


class MLP(nn.Module):
    """Dense layers; BatchNorm (optional), ReLU and dropout follow every layer except the last.

    Attributes:
      num_classes: width of the output.
      hidden_sizes: widths of the hidden layers.
      batch_norm: whether to apply BatchNorm before the ReLU; the hidden layers then have no bias.
      group_size, axis_name: see `norm.BatchNorm`.
      dropout_rate: fraction of the hidden units dropped in training.
    """

    num_classes: int = 10
    hidden_sizes: Sequence[int] = (128, 64)
    batch_norm: bool = False
    group_size: int | None = None
    dropout_rate: float = 0.0
    axis_name: str | Sequence[str] | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Returns logits (batch, num_classes) for inputs (batch, ...)."""
        sizes = self.hidden_sizes
        # Reject strings explicitly, because `all` of an empty string is true.
        if isinstance(sizes, str) or not all(type(size) is int and size > 0 for size in sizes):
            problem = "has an invalid layer size"
            raise ArgumentError("hidden_sizes", sizes, problem, "use whole numbers of at least 1")
        if len(sizes) > _MOST_LAYERS:
            problem = f"has {len(sizes):,} layers"
            raise ArgumentError("hidden_sizes", ..., problem, f"use at most {_MOST_LAYERS:,}")
        if type(self.batch_norm) is not bool:
            problem = "has the wrong type"
            raise ArgumentError("batch_norm", self.batch_norm, problem, "use True or False")
        if self.group_size is not None and not self.batch_norm:
            problem = "needs BatchNorm"
            raise ArgumentError("group_size", self.group_size, problem, "use batch_norm=True")
        x = inputs.reshape(inputs.shape[0], -1)
        for index, size in enumerate(self.hidden_sizes):
            # BatchNorm subtracts the mean, including any bias, and adds its own bias.
            x = nn.Dense(size, use_bias=not self.batch_norm, name=f"hidden{index}")(x)
            if self.batch_norm:
                norm = BatchNorm(self.group_size, not train, self.axis_name, name=f"norm{index}")
                x = norm(x)
            x = Dropout(self.dropout_rate, name=f"dropout{index}")(nn.relu(x), train)
        return nn.Dense(self.num_classes, name="output")(x)

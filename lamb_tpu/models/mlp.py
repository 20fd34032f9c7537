"""A fully connected network."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from lamb_tpu.models.dropout import Dropout
from lamb_tpu.models.norm import BatchNorm

_MOST_LAYERS = 10_000  # each layer is traced by itself, which takes time


class MLP(nn.Module):
    """Dense layers; after each but the last, optional BatchNorm, ReLU and dropout.

    Attributes:
      num_classes: width of the output.
      hidden_sizes: widths of the hidden layers.
      batch_norm: whether to normalise before the ReLU; the dense layers then have no bias.
      group_size: examples per group of BatchNorm; None for the whole batch.
      dropout_rate: share of the hidden units dropped in training.
      axis_name: inside shard_map or pmap the mesh axes that split the batch; None under jit.
    """

    num_classes: int = 10
    hidden_sizes: Sequence[int] = (128, 64)
    batch_norm: bool = False
    group_size: int | None = None
    dropout_rate: float = 0.0
    axis_name: str | Sequence[str] | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool) -> jax.Array:
        """Logits of shape (batch, num_classes) for inputs of shape (batch, ...)."""
        sizes = self.hidden_sizes
        # `all` of an empty string is true.
        if isinstance(sizes, str) or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"hidden_sizes must be whole numbers of at least 1, not {sizes!r}")
        if len(sizes) > _MOST_LAYERS:
            raise ValueError(
                f"hidden_sizes are {len(sizes):,} layers; they must be at most {_MOST_LAYERS:,}"
            )
        if type(self.batch_norm) is not bool:
            raise ValueError(f"batch_norm must be True or False, not {self.batch_norm!r}")
        if self.group_size is not None and not self.batch_norm:
            raise ValueError(f"group_size is {self.group_size!r}; it needs batch_norm=True")
        x = inputs.reshape(inputs.shape[0], -1)
        for index, size in enumerate(self.hidden_sizes):
            # BatchNorm subtracts the mean and with it any bias, and adds its own.
            x = nn.Dense(size, use_bias=not self.batch_norm, name=f"hidden{index}")(x)
            if self.batch_norm:
                norm = BatchNorm(self.group_size, not train, self.axis_name, name=f"norm{index}")
                x = norm(x)
            x = Dropout(self.dropout_rate, name=f"dropout{index}")(nn.relu(x), train)
        return nn.Dense(self.num_classes, name="output")(x)

"""BERT's Transformer encoder with post-LayerNorm and unrolled or scanned layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lamb_tpu.kernels.attention import attend
from lamb_tpu.kernels.axes import WITHIN_EXAMPLES
from lamb_tpu.models.dropout import Dropout, draw_kept, rounded
from lamb_tpu.models.promotion import LayerNorm

# Axes of a mesh.
HEADS_AXIS, SEQUENCE_AXIS = WITHIN_EXAMPLES
GELUS = ("erf", "tanh")
REMATS = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Settings that all encoder layers share.

    Attributes:
      hidden_size: width of the activations between layers.
      num_heads: attention heads, each of width hidden_size / num_heads.
      intermediate_size: width between the two dense layers that follow attention.
      dropout_rate: dropped fraction of each sub-layer's output and of the embeddings.
      attention_dropout_rate: dropped fraction of the attention probabilities.
      gelu: 'erf' for the exact GELU, or 'tanh' for its approximation.
      layer_norm_eps: added to the variance.
      initializer_range: standard deviation of the initial matrices' normal distribution, which is
        truncated at two standard deviations.
      dtype: dtype of the activations. Parameters, softmax and LayerNorm's statistics are float32.
    """

    hidden_size: int = 768
    num_heads: int = 12
    intermediate_size: int = 3072
    dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1
    gelu: str = "erf"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    dtype: str = "bfloat16"

    def matrix_init(self) -> nn.initializers.Initializer:
        return nn.initializers.truncated_normal(self.initializer_range)

    def dense(self, size: int, name: str, dtype: Any = None) -> nn.Dense:
        """Returns a dense layer with bias; `dtype` defaults to that of the activations."""
        return nn.Dense(size, dtype=dtype or self.dtype, kernel_init=self.matrix_init(), name=name)

    def layer_norm(self, name: str) -> nn.LayerNorm:
        # The fast variance, mean of squares minus squared mean, loses digits.
        return LayerNorm(
            epsilon=self.layer_norm_eps, dtype=self.dtype, use_fast_variance=False, name=name
        )

    def activation(self, x: jax.Array) -> jax.Array:
        return nn.gelu(x, approximate=self.gelu == "tanh")


def split_sequence(x: jax.Array, heads: bool = False) -> jax.Array:
    """Splits activations over the mesh axis 'sequence' if the current mesh has this axis.

    The compiler chooses the split over the other mesh axes. Between two layers, each device has a
    segment of every sequence; in attention, it has some of the heads for all tokens. The compiler
    therefore inserts all-to-alls that exchange tokens for heads and back.

    Args:
      x: (batch, length, ...); with `heads` (batch, length, heads, width).
      heads: split the heads instead of the length, over the axes 'model' and 'sequence'.

    References:
      Jacobs et al., DeepSpeed Ulysses, 2023.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if SEQUENCE_AXIS not in mesh.axis_names:
        return x
    # None would mean replicated, but the compiler must choose the sharding of the batch axis.
    free = PartitionSpec.UNCONSTRAINED
    if heads:
        axes = tuple(axis for axis in (HEADS_AXIS, SEQUENCE_AXIS) if axis in mesh.axis_names)
        spec = PartitionSpec(free, None, axes, None)
    else:
        spec = PartitionSpec(free, SEQUENCE_AXIS, *(free,) * (x.ndim - 2))
    return jax.lax.with_sharding_constraint(x, spec)


class SelfAttention(nn.Module):
    """Attention of all heads from every token to every token of the same example."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """Maps (batch, length, hidden) to the same shape; see `Encoder` for `mask`."""
        config = self.config
        heads = (*x.shape[:2], config.num_heads, config.hidden_size // config.num_heads)
        query, key, value = (
            split_sequence(config.dense(config.hidden_size, name)(x).reshape(heads), heads=True)
            for name in ("query", "key", "value")
        )
        rate, keep = rounded(config.attention_dropout_rate) if train else 0.0, None
        if rate:
            # Draw the mask with the queries on the last axis, because the TPU compiler lays out the
            # scores in this way; otherwise it would copy the mask.
            shape = (heads[0], heads[2], heads[1], heads[1])
            keep = jnp.swapaxes(draw_kept(self.make_rng("dropout"), rate, shape), 2, 3)
        mixed = attend(query, key, value, mask, keep, rate)
        mixed = split_sequence(mixed.reshape(x.shape))
        return config.dense(config.hidden_size, "output")(mixed)


class EncoderLayer(nn.Module):
    """Attention and an MLP; dropout, residual sum and LayerNorm follow each of these two sub-layers."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """Maps (batch, length, hidden) to the same shape; see `Encoder` for `mask`."""
        config = self.config
        # LayerNorm follows the residual sum (post-LayerNorm), as in the original BERT.
        y = SelfAttention(config, name="attention")(x, mask, train)
        x = config.layer_norm("attention_norm")(x + Dropout(config.dropout_rate)(y, train))
        y = config.activation(config.dense(config.intermediate_size, "intermediate")(x))
        y = config.dense(config.hidden_size, "output")(y)
        return config.layer_norm("output_norm")(x + Dropout(config.dropout_rate)(y, train))


class Encoder(nn.Module):
    """A stack of `EncoderLayer`s.

    The layers' parameters are under 'layer_0', 'layer_1', ..., or stacked under 'layers' with a
    leading axis of size num_layers; `stack_layers` and `unstack_layers` convert between the two forms.
    Unrolled layers give the faster program; the compile time of scanned layers hardly grows with
    their number. From the same key, unrolled and scanned layers draw different initial values and
    dropout masks.

    Attributes:
      scan_layers: stack the layers' parameters and run the layers in a loop.
      remat: what the backward pass recomputes: with 'none' nothing; with 'dots' everything except
        the products of dense layers, so also attention; with 'full' everything except the layers'
        inputs.
    """

    config: LayerConfig
    num_layers: int
    scan_layers: bool = False
    remat: str = "none"

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        """Returns the last layer's output (batch, length, hidden).

        Args:
          x: (batch, length, hidden).
          mask: bool (batch, length), true at tokens, and false at padding, which gets no attention.
          train: whether to apply dropout.
        """
        x = split_sequence(x)
        layer = EncoderLayer
        if self.remat != "none":
            # Products of attention have batch dimensions, so this policy recomputes them and only
            # saves the products of dense layers.
            dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            layer = nn.remat(
                layer,
                policy=dots if self.remat == "dots" else None,
                # A scan does not need this barrier, because its loop separates the recomputation.
                prevent_cse=not self.scan_layers,
                # `train` is argument 3, counting self. Dropout needs a Python bool, not a tracer.
                static_argnums=(3,),
            )
        if not self.scan_layers:
            for index in range(self.num_layers):
                x = layer(self.config, name=f"layer_{index}")(x, mask, train)
            return x
        scan = nn.scan(
            lambda layer, x, _: (layer(x, mask, train), None),
            # Stack parameters on axis 0, and draw separate initial values and masks per layer.
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.num_layers,
        )
        x, _ = scan(layer(self.config, name="layers"), x, None)
        return x


def stack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Stacks the parameters of an encoder's unrolled layers for `scan_layers`.

    Values are copied exactly. The encoder may be anywhere in the tree. Other parameters, and a tree
    without unrolled layers, are returned unchanged.
    """
    if not isinstance(params, Mapping):
        return params
    if "layer_0" not in params:
        return {name: stack_layers(value) for name, value in params.items()}
    # An encoder only contains its layers, so the number of keys is the number of layers.
    layers = [params[f"layer_{index}"] for index in range(len(params))]
    return {"layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


def unstack_layers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Reverses `stack_layers`."""
    if not isinstance(params, Mapping):
        return params
    if "layers" not in params:
        return {name: unstack_layers(value) for name, value in params.items()}
    num_layers = len(jax.tree.leaves(params["layers"])[0])

    def layer(index: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[index], params["layers"])

    return {f"layer_{index}": layer(index) for index in range(num_layers)}

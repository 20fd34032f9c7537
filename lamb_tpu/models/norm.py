"""Batch normalisation over groups of examples, independent of the number of devices."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax import lax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.models.groups import Groups, groups_of
from lamb_tpu.types import PyTree

MOMENTS = "batch_moments"  # collection of a microbatch's moments, see `combine_moments`


class BatchNorm(nn.Module):
    """Normalises each channel by its mean and variance over the example's group.

    For a group G of examples with n positions each,

        mean = sum over G of x / (|G| n),    var = sum over G of (x - mean)^2 / (|G| n),
        y = scale (x - mean) / sqrt(var + epsilon) + bias.

    A group consists of `group_size` consecutive examples of the global batch. With groups smaller than
    a device's share of the batch, this is ghost batch normalisation; with groups as large as the
    share, local batch normalisation; and with larger groups, the distributed batch normalisation of
    Wongpanich et al. Under jit the program does not depend on the number of devices, and the compiler
    reduces over groups of devices. Inside shard_map or pmap a module sees only one device's examples,
    so `axis_name` must name the mesh axes that split the batch; the results then equal those under jit.
    `lamb_tpu.parallel.torus` orders the mesh so that a group's devices are neighbours.

    Parameters and running averages are float32, and statistics are float32 or, for float64 inputs,
    float64; the output has the input's dtype. One pass over the activations computes the mean and
    variance of each example from E[d] and E[d^2] - E[d]^2; d is the difference from one pixel of the
    example. With differences from a value far from the mean, this subtraction would lose digits. The
    moments of a group are combined from those of its examples.

    For bfloat16 inputs, d is the difference from the running mean. The running mean is known before
    the activations, so the sums fuse with the computation of the activations, and need one round of
    communication instead of two. If the running mean is 100 standard deviations away, the relative
    error of the variance is a thousandth. This error is small beside the rounding of bfloat16 values
    to 8 bits, and disappears when the running mean has converged.

    The running averages are those of the full batch, whatever the groups: the batch's mean is the mean
    of the groups' means, and its variance, by the law of total variance, is the mean of the groups'
    variances plus the variance of their means. All variances are biased (divided by the count), as
    in Flax and in TensorFlow's layer with fused=False; PyTorch and TensorFlow's fused layer multiply
    the variance in the running average by count / (count - 1). Parameters and collections have the
    same names as in `flax.linen.BatchNorm`.

    Each microbatch is normalised separately. `combine_moments` computes the running averages of a
    batch from the moments of its microbatches.

    Inside shard_map, a group of several devices should span complete innermost axes: with
    axis_name=('group', 'inner'), for example, groups are averaged over 'inner'. Groups that split
    an axis require shard_map with check_vma=False.

    Attributes:
      group_size: examples per group; None for the full batch.
      use_running_average: whether to normalise by the running averages, as in evaluation; can also
        be an argument of the call.
      axis_name: inside shard_map or pmap the mesh axes that split the batch, outermost first; None
        under jit.
      momentum: weight of the old running average in an update, in [0, 1]; Flax has the same default.
      epsilon: added to the variance, at least 0; Flax has the same default.
      scale_init: initial scale; zeros for the last normalisation of a residual branch.
      packed: number of examples packed along the channel axis, see `lamb_tpu.kernels.lanes`.

    References:
      Wongpanich et al., Training EfficientNets at Supercomputer Scale, arXiv:2011.00071.
      Hoffer et al., Train longer, generalize better, arXiv:1705.08741.

    >>> x = jnp.array([[0.0], [2.0], [10.0], [14.0]])
    >>> norm = BatchNorm(group_size=2, use_running_average=False, momentum=0.0)
    >>> y, state = norm.apply(norm.init(jax.random.key(0), x), x, mutable="batch_stats")
    >>> print(y.ravel().round(3))
    [-1.  1. -1.  1.]
    >>> print(state["batch_stats"]["mean"], state["batch_stats"]["var"], x.var())
    [6.5] [32.75] 32.75
    """

    group_size: int | None = None
    use_running_average: bool | None = None
    axis_name: str | Sequence[str] | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    packed: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool | None = None) -> jax.Array:
        """Normalises activations (batch, ..., channels) with two or more axes.

        Packed examples have the shape (batch / packed, ..., packed x channels). In `init` the
        running averages do not change, and the batch is one group.

        Raises:
          ValueError: `group_size` does not fit the batch or the mesh, `axis_name` is missing
            although the batch is split, or an argument is out of range.
        """
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            remedy = "use a floating-point array (batch, ..., channels)"
            raise ArgumentError("input of BatchNorm", ..., f"is {x.dtype}{x.shape}", remedy)
        if not 0 <= self.momentum <= 1:
            raise ArgumentError("momentum", self.momentum, "is out of range", "use 0 to 1")
        if not self.epsilon >= 0:
            raise ArgumentError("epsilon", self.epsilon, "is out of range", "use at least 0")
        dtype, rows, channels = x.dtype, len(x) * self.packed, x.shape[-1] // self.packed
        # Convert once, so that gradients with respect to x are also summed in float32.
        x = x.astype(np.promote_types(dtype, jnp.float32))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        scale = self.param("scale", self.scale_init, (channels,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (channels,), jnp.float32)

        if use_running_average:
            mean, var = running_mean.value, running_var.value
        else:
            # `init` may run outside the mesh, and with a batch that is not divisible into groups.
            if self.is_initializing():
                groups = Groups(rows)
            else:
                groups = groups_of(rows, self.group_size, self.axis_name)
            centre = running_mean.value[None] if dtype == jnp.bfloat16 else None
            mean, var = _group_moments(x, groups, centre, self.packed)
            if not self.is_initializing():
                batch_mean, batch_var = _batch_moments(mean, var, groups)
                momentum = jnp.float32(self.momentum)
                # Accumulation over microbatches needs the moments. `combine_moments` only receives
                # arrays, so the momentum is one of them.
                if self.is_mutable_collection(MOMENTS):
                    moments = {"mean": batch_mean, "var": batch_var, "momentum": momentum}
                    for name, value in moments.items():
                        self.put_variable(MOMENTS, name, value.astype(jnp.float32))
                running_mean.value = _moved(running_mean.value, batch_mean, momentum)
                running_var.value = _moved(running_var.value, batch_var, momentum)
        # One multiplication per activation instead of two.
        factor = scale * lax.rsqrt(var + self.epsilon)
        mean, factor, bias = (_per_example(each, x, self.packed) for each in (mean, factor, bias))
        y = (x - mean) * factor + bias
        return y.astype(dtype)


def combine_moments(model_state: PyTree, moments: PyTree) -> Any:
    """Returns the collections of all `BatchNorm`s after a batch that is split into microbatches.

    All microbatches have the same size, and no group spans several of them. The mean and variance of
    the full batch follow from those of the microbatches by the law of total variance, as in
    `BatchNorm`.

    Args:
      model_state: the collections before the batch, from which every microbatch starts.
      moments: the collections 'batch_moments' of the microbatches, stacked on a leading axis. A
        `BatchNorm` fills this collection if `apply` gets it empty and mutable.

    Raises:
      ValueError: `model_state` has other entries than `BatchNorm`'s running averages.
    """

    moments_by_name = flatten_dict({"batch_stats": moments}, sep="/")

    def combined(path: Any, old: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        layer, _, moment = name.rpartition("/")
        if moment not in ("mean", "var") or name not in moments_by_name:
            raise ValueError(
                f"the model's state has {name}, which is not a running average of "
                "lamb_tpu.models.norm.BatchNorm; use that layer, or only one microbatch"
            )
        # (microbatches, channels); with stacked layers (microbatches, layers, channels).
        means = moments_by_name[f"{layer}/mean"]
        mean = jnp.mean(means, 0)
        new = mean
        if moment == "var":
            new = jnp.mean(moments_by_name[name] + (means - mean) ** 2, 0)
        # Add a trailing axis, because stacked layers have axes before the channels.
        return _moved(old, new, moments_by_name[f"{layer}/momentum"][0][..., None])

    return jax.tree_util.tree_map_with_path(combined, model_state)


def add_moments(total: PyTree, new: Any, index: jax.Array | int) -> Any:
    """Adds the moments of one more microbatch to a running total, for `combine_moments`.

    The total holds the mean of the microbatches' means, the mean of their variances, and the variance
    of their means as `between`. `as_one` converts a total for `combine_moments`. `index` is the number
    of previous microbatches; if it is 0, the values of `total` are ignored. If `total` is None, the
    result is a total of `new` alone.
    """
    if not isinstance(new.get("momentum"), jax.Array):
        return {name: add_moments(total and total[name], each, index) for name, each in new.items()}
    if total is None:
        return {**new, "between": jnp.zeros_like(new["mean"])}

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(index == 0, new, old + (new - old) / (index + 1))

    mean = moved(total["mean"], new["mean"])
    spread = (new["mean"] - total["mean"]) * (new["mean"] - mean)
    between = jnp.where(index == 0, 0.0, moved(total["between"], spread))
    return {
        "mean": mean,
        "var": moved(total["var"], new["var"]),
        "between": between,
        "momentum": new["momentum"],
    }


def as_one(total: PyTree) -> Any:
    """Converts a total of `add_moments` to the moments of one microbatch."""
    if not isinstance(total.get("momentum"), jax.Array):
        return {name: as_one(each) for name, each in total.items()}
    return {
        "mean": total["mean"][None],
        "var": (total["var"] + total["between"])[None],
        "momentum": total["momentum"][None],
    }


def _group_moments(
    x: jax.Array, groups: Groups, centre: jax.Array | None, packed: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and variance of each group, (groups, channels).

    Differences are taken from `centre`, (1, channels), or, if it is None, from values near `x`. Apart
    from rounding, the centre changes neither the result nor its derivatives of any order. It is
    therefore treated as a constant, which saves a round of communication in the backward pass.
    """

    def mean_of_group(values: jax.Array) -> jax.Array:
        # Group examples only here, on (batch, channels): if the activations were reshaped, the
        # compiler might move them between devices.
        mean = jnp.mean(values.reshape(-1, groups.rows, values.shape[-1]), 1)
        if not groups.axes:
            return mean
        try:
            return lax.pmean(mean, groups.axes, axis_index_groups=groups.index_groups)
        except NotImplementedError as error:
            if groups.index_groups is None:
                raise
            key = f"groups of {len(groups.index_groups[0])} devices"
            problem = f"are smaller than the mesh axes {', '.join(groups.axes)}"
            remedy = (
                "use shard_map with check_vma=False, or a mesh with an innermost axis of that size"
            )
            raise ArgumentError(key, ..., problem, remedy) from error

    def of_examples(values: jax.Array) -> jax.Array:
        return values.reshape(len(values) * packed, -1)

    # First compute the moments of each example, (batch, channels), in one pass.
    positions = tuple(range(1, x.ndim - 1))
    pixel = of_examples(x[(slice(None), *(0,) * len(positions))])
    near = lax.stop_gradient(pixel if centre is None else centre)
    d = x - _per_example(near, x, packed)
    near_mean = of_examples(jnp.mean(d, positions))
    near_var = of_examples(jnp.mean(d * d, positions)) - near_mean**2

    if centre is None:
        centre = mean_of_group(near + near_mean)
    centre = lax.stop_gradient(centre)
    # Then compute the moments of each group by the law of total variance: the mean of the examples'
    # variances plus the variance of their means.
    offsets = near_mean + (near - _per_example(centre, near))
    offset = mean_of_group(offsets)
    var = mean_of_group(near_var + offsets**2) - offset**2
    # Rounding may make the difference negative, and its rsqrt would be NaN.
    return centre + offset, jnp.maximum(var, 0)


def _batch_moments(mean: jax.Array, var: jax.Array, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and variance of the full batch, (channels,), from those of the groups."""

    def mean_of_groups(values: jax.Array) -> jax.Array:
        mean = jnp.mean(values, 0)
        return lax.pmean(mean, groups.other_axes) if groups.other_axes else mean

    batch_mean = mean_of_groups(mean)
    return batch_mean, mean_of_groups(var + (mean - batch_mean) ** 2)


def _moved(running: jax.Array, new: jax.Array, momentum: jax.Array) -> jax.Array:
    return (momentum * running + (1 - momentum) * new).astype(running.dtype)


def _per_example(values: jax.Array, x: jax.Array, packed: int = 1) -> jax.Array:
    """Reshapes (channels,) or (groups, channels) to broadcast against the examples `x`."""
    # A single set of statistics broadcasts over the examples; repeat it for each packed example.
    if values.ndim == 1 or len(values) == 1:
        return jnp.tile(values.reshape(-1), packed)
    # A group has consecutive examples.
    values = jnp.repeat(values, len(x) * packed // len(values), 0).reshape(len(x), -1)
    return jnp.expand_dims(values, tuple(range(1, x.ndim - 1)))

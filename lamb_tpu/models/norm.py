"""Batch normalisation over groups of examples, the same on any number of devices.

The number of examples that share statistics is part of a large-batch recipe: few make them noisy,
many cost communication. It is `group_size`, counted in examples of the global batch. Smaller than a
device's part, it is ghost batch normalisation; equal to it, local; larger, the distributed batch
normalisation of the EfficientNet paper. None means the whole batch.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lamb_tpu.models.groups import Groups, groups_of

MOMENTS = "batch_moments"  # collection of a microbatch's moments, see `combine_moments`


class BatchNorm(nn.Module):
    """Normalises each channel by the statistics of its example's group.

    For a group G of examples with n positions each,

        mean = sum over G of x / (|G| n),    var = sum over G of (x - mean)^2 / (|G| n),
        y = scale (x - mean) / sqrt(var + epsilon) + bias.

    Groups are runs of `group_size` consecutive examples of the global batch. Under jit the program
    does not depend on the number of devices, and the compiler reduces over groups of devices.
    Inside shard_map or pmap a module sees one device's examples: `axis_name` must name the mesh
    axes that split the batch, and the numbers are the same. `lamb_tpu.parallel.torus` orders the
    devices so that a group's devices are neighbours.

    Statistics and parameters are float32 (statistics float64 for float64 inputs); the output has
    the input's dtype. One pass over the activations gives mean and variance of each example, as
    E[d] and E[d^2] - E[d]^2 of distances d from one of the example's own pixels; from a distant
    point the difference would lose its digits. Groups add the squared distances of their examples
    from their mean.

    For bfloat16 both distances are from the running mean. It is known before the activations, so
    the sums can be taken where those are computed, with one round of communication instead of two.
    A bfloat16 value holds 8 bits, so a running mean that is 100 standard deviations away costs the
    variance a thousandth, and only until the running mean has converged.

    The running averages are those of the whole batch, whatever the groups: the mean of the groups'
    means, and by the law of total variance the mean of their variances plus the variance of their
    means. Both variances are biased (divided by the count), as in Flax and in TensorFlow's layer
    with fused=False; PyTorch and TensorFlow's fused layer multiply that of the running average by
    count / (count - 1). Parameters and collection have the names of `flax.linen.BatchNorm`.

    A batch in microbatches is normalised microbatch by microbatch; for the running averages see
    `combine_moments`.

    Inside shard_map a group of several devices should be a whole number of the innermost axes: with
    axis_name=('group', 'inner') the sums run over 'inner'. To split an axis into groups, shard_map
    needs check_vma=False.

    Attributes:
      group_size: examples per group; None for the whole batch.
      use_running_average: normalise by the running averages, as in evaluation; may be an argument
        of the call instead.
      axis_name: inside shard_map or pmap the mesh axes over which the batch is split, outermost
        first; None under jit.
      momentum: weight of the old running average in an update, in [0, 1]; Flax's default.
      epsilon: added to the variance, at least 0; Flax's default.
      scale_init: initial scale; zeros for the last normalisation of a residual branch.
      packed: number of examples packed on the channel axis, see `lamb_tpu.models.lanes`.

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
        """Normalises activations of shape (batch, ..., channels), two axes or more.

        Packed examples have the shape (batch / packed, ..., packed x channels).

        In `init` the running averages stay as they are, and the batch counts as one group.

        Raises:
          ValueError: `group_size` does not fit the batch or the mesh, `axis_name` is missing
            although the batch is split, or an argument is out of range.
        """
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"BatchNorm takes floating-point (batch, ..., channels), not {x.dtype}{x.shape}"
            )
        if not 0 <= self.momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], not {self.momentum}")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, not {self.epsilon}")
        dtype, rows, channels = x.dtype, len(x) * self.packed, x.shape[-1] // self.packed
        # Once, so that gradients with respect to x are summed in float32 too.
        x = x.astype(np.promote_types(dtype, jnp.float32))
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        scale = self.param("scale", self.scale_init, (channels,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (channels,), jnp.float32)

        if use_running_average:
            mean, var = running_mean.value, running_var.value
        else:
            # `init` may run outside the mesh and with a batch that the groups do not divide.
            if self.is_initializing():
                groups = Groups(rows)
            else:
                groups = groups_of(rows, self.group_size, self.axis_name)
            centre = running_mean.value[None] if dtype == jnp.bfloat16 else None
            mean, var = _group_moments(x, groups, centre, self.packed)
            if not self.is_initializing():
                batch_mean, batch_var = _batch_moments(mean, var, groups)
                momentum = jnp.float32(self.momentum)
                # Accumulation over microbatches asks for the moments. `combine_moments` sees arrays
                # only, so the momentum travels with them.
                if self.is_mutable_collection(MOMENTS):
                    told = {"mean": batch_mean, "var": batch_var, "momentum": momentum}
                    for name, value in told.items():
                        self.put_variable(MOMENTS, name, value.astype(jnp.float32))
                running_mean.value = _moved(running_mean.value, batch_mean, momentum)
                running_var.value = _moved(running_var.value, batch_var, momentum)
        # One multiplication for each activation instead of two.
        factor = scale * lax.rsqrt(var + self.epsilon)
        mean, factor, bias = (_per_example(each, x, self.packed) for each in (mean, factor, bias))
        y = (x - mean) * factor + bias
        return y.astype(dtype)


def combine_moments(model_state: Any, moments: Any) -> Any:
    """Returns the running averages of all `BatchNorm`s after a batch in equal microbatches.

    Groups are those of the microbatches, as ghost batches of the large one. The averages become
    those of the large batch,

        momentum * old + (1 - momentum) * new,

    where the new mean is the mean of the microbatches' means, and by the law of total variance the
    new variance the mean of their variances plus the variance of their means.

    Args:
      model_state: the collections before the batch, from which every microbatch starts.
      moments: the collection 'batch_moments' of the microbatches, stacked on a leading axis. A
        `BatchNorm` writes it if `apply` gets that collection empty and mutable.

    Returns:
      The collections after the batch.

    Raises:
      ValueError: `model_state` holds something other than `BatchNorm`'s running averages.
    """

    def name_of(path: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator="/")

    leaves, _ = jax.tree_util.tree_flatten_with_path({"batch_stats": moments})
    found = {name_of(path): leaf for path, leaf in leaves}

    def combined(path: Any, old: jax.Array) -> jax.Array:
        name = name_of(path)
        layer, _, kind = name.rpartition("/")
        if kind not in ("mean", "var") or name not in found:
            raise ValueError(
                f"the model's state holds {name}, which is no running average of "
                "lamb_tpu.models.norm.BatchNorm: it cannot be combined over microbatches"
            )
        # (microbatches, channels); with stacked layers (microbatches, layers, channels).
        means = found[f"{layer}/mean"]
        mean = jnp.mean(means, 0)
        new = mean
        if kind == "var":
            new = jnp.mean(found[name] + (means - mean) ** 2, 0)
        # The trailing axis, because stacked layers have axes before the channels.
        return _moved(old, new, found[f"{layer}/momentum"][0][..., None])

    return jax.tree_util.tree_map_with_path(combined, model_state)


def add_moments(total: Any, new: Any, index: jax.Array | int) -> Any:
    """Returns the moments of one more microbatch with those before it, for `combine_moments`.

    With as many as there are, `combine_moments` gets them as one microbatch: their mean, and the
    mean of their variances plus the variance of their means, which is kept apart here as `between`.

    Args:
      total: what the microbatches before gave; None for their structure alone.
      new: the collection 'batch_moments' of a microbatch.
      index: number of microbatches before it; with 0 nothing of `total` is read.
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


def as_one(total: Any) -> Any:
    """Returns the moments of `add_moments` as `combine_moments` takes those of one microbatch."""
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
    """Returns mean and variance of each group, (groups, channels).

    Distances are taken from `centre`, (1, channels), or from points near to `x` if it is None. It
    changes neither the result nor its derivatives of any order, apart from rounding. So it counts
    as a constant, which also saves a round of communication in the backward pass.
    """

    def mean_of_group(values: jax.Array) -> jax.Array:
        # Examples are grouped only here, on (batch, channels): after a reshape of the activations
        # the compiler might move them between devices.
        mean = jnp.mean(values.reshape(-1, groups.rows, values.shape[-1]), 1)
        if not groups.axes:
            return mean
        try:
            return lax.pmean(mean, groups.axes, axis_index_groups=groups.index_groups)
        except NotImplementedError as error:
            if groups.index_groups is None:
                raise
            raise ValueError(
                f"groups of {len(groups.index_groups[0])} devices are parts of the mesh axes "
                f"{', '.join(groups.axes)}: give shard_map check_vma=False, or the mesh an "
                "innermost axis of that size"
            ) from error

    def of_examples(values: jax.Array) -> jax.Array:
        return values.reshape(len(values) * packed, -1)

    # First the moments of each example, (batch, channels), in one pass over the activations.
    positions = tuple(range(1, x.ndim - 1))
    pixel = of_examples(x[(slice(None), *(0,) * len(positions))])
    near = lax.stop_gradient(pixel if centre is None else centre)
    d = x - _per_example(near, x, packed)
    near_mean = of_examples(jnp.mean(d, positions))
    near_var = of_examples(jnp.mean(d * d, positions)) - near_mean**2

    if centre is None:
        centre = mean_of_group(near + near_mean)
    centre = lax.stop_gradient(centre)
    # Then the moments of each group, by the law of total variance: the mean of the examples'
    # variances plus the variance of their means.
    offsets = near_mean + (near - _per_example(centre, near))
    offset = mean_of_group(offsets)
    var = mean_of_group(near_var + offsets**2) - offset**2
    # Rounding may leave a difference below 0, of which rsqrt would be NaN.
    return centre + offset, jnp.maximum(var, 0)


def _batch_moments(mean: jax.Array, var: jax.Array, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of the whole batch, (channels,), from those of the groups."""

    def mean_of_groups(values: jax.Array) -> jax.Array:
        mean = jnp.mean(values, 0)
        return lax.pmean(mean, groups.other_axes) if groups.other_axes else mean

    batch_mean = mean_of_groups(mean)
    return batch_mean, mean_of_groups(var + (mean - batch_mean) ** 2)


def _moved(running: jax.Array, new: jax.Array, momentum: jax.Array) -> jax.Array:
    """A running average after a step."""
    return (momentum * running + (1 - momentum) * new).astype(running.dtype)


def _per_example(values: jax.Array, x: jax.Array, packed: int = 1) -> jax.Array:
    """Reshapes (channels,) or (groups, channels) to broadcast against the examples `x`."""
    # One set of statistics broadcasts; packed examples have it once for each.
    if values.ndim == 1 or len(values) == 1:
        return jnp.tile(values.reshape(-1), packed)
    # A group is a run of consecutive examples.
    values = jnp.repeat(values, len(x) * packed // len(values), 0).reshape(len(x), -1)
    return jnp.expand_dims(values, tuple(range(1, x.ndim - 1)))

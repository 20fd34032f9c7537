r"""Statistics of gradients inside a training step, from the gradients of parts of the batch.

The batch of an update consists of parts with equal numbers of examples. Under jit the program sees
only sums over devices, so a part is a microbatch. Inside shard_map a part is one device's rows of a
microbatch.

A part's share of the gradient is the contribution of its examples to the gradient of the full
batch, so the shares add up to the full gradient. With p parts, p times a share is the mean gradient
of a part. If examples have unequal weights, such as numbers of masked words, the loss is divided by
the weight of the full batch. An example then counts in proportion to its weight, but the size of a
part is still its number of examples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lamb_tpu.batching import noise_scale
from lamb_tpu.batching.similarity import similarity
from lamb_tpu.optim import checks
from lamb_tpu.optim.diagnostics import second_moments
from lamb_tpu.parallel import backends
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Sums
from lamb_tpu.types import PyTree

# Names of the two preconditioned metrics, corresponding to `noise_scale.PAIR`.
PRECONDITIONED = "noise_scale/preconditioned_grad_sq", "noise_scale/preconditioned_trace"


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of gradients that a run measures, see `MicrobatchStatistics`; none by default."""

    noise_scale: bool = False  # two estimates for the noise scale, see `noise_scale.estimate`
    preconditioned: bool = False  # the same estimates, for gradients scaled by second moments
    halves: bool = False  # cosine between the gradients of the two halves of the batch
    # Whether the optimizer's update gets the gradients of the halves, which `agvm` needs.
    to_optimizer: bool = False
    # Pairs (name, regular expression over paths): modules that each get a separate cosine.
    modules: tuple[tuple[str, str], ...] = ()
    per_example: int = 0  # number of examples with per-example gradients, see `per_example`
    interval: int = 100  # number of updates between per-example measurements

    def __bool__(self) -> bool:
        """Returns whether any statistic is measured."""
        return bool(self.noise_scale or self.preconditioned or self.halves or self.per_example)

    def is_due(self, step: int) -> bool:
        """Returns whether the update that follows `step` completed updates is measured per example."""
        return self.per_example > 0 and (step + 1) % self.interval == 0

    def next_due(self, step: int) -> int:
        """Returns the smallest number of completed updates, at least `step`, for which `is_due` is true."""
        return step + -(step + 1) % self.interval


NO_STATISTICS = Statistics()


class MicrobatchStatistics:
    r"""Statistics from the parts of a batch: shares of each microbatch, and metrics of the update.

    - `noise_scale/grad_sq` and `noise_scale/trace`: unbiased estimates of the squared norm of the
      true gradient and of the trace of the covariance of per-example gradients.
      `noise_scale.estimate` computes them from the mean squared norm of the parts and the squared
      norm of the full gradient. They need two parts or more.
    - `noise_scale/preconditioned_grad_sq` and `.../preconditioned_trace`: the same for gradients
      whose elements are divided by the fourth root of :math:`v / \bar v`, where :math:`v` are the
      optimizer's second moments before the update and :math:`\bar v` is their mean. Adam's step is
      the gradient over :math:`\sqrt v`, so the squared norm is the inner product of gradient and
      step. Elements with :math:`v = 0` are left out, so the first update has no value.
    - `similarity` and `similarity/<module>`: the cosine between the gradients of the two halves of
      the batch. Inside shard_map on several devices, one half is the rows of devices with an even
      index. Otherwise one half is the even microbatches, and the cosine is measured only if the
      number of microbatches is even. Gradients that are sent in bfloat16 are compared in bfloat16.

    A metric is a pair (value, 1), or (0, 0) in an update that does not measure it.

    Args:
      statistics, backend, layout: what to measure, and how gradients are summed and sharded.
      part: number of examples in a part.
      size: total number of elements of the parameters.
    """

    def __init__(
        self,
        statistics: Statistics,
        backend: backends.JitBackend | backends.ShardMapBackend,
        layout: Layout,
        part: int,
        size: int,
    ) -> None:
        self._statistics, self._backend, self._layout = statistics, backend, layout
        self._part, self._size = part, size
        self._is_named = isinstance(backend, backends.ShardMapBackend)
        self._devices = mesh_lib.num_batch_shards(layout.mesh) if self._is_named else 1

    def shares(self, grads: PyTree, state: TrainState, index: jax.Array) -> dict[str, Any]:
        """Returns what microbatch `index` adds on this device to the sums over microbatches.

        `grads` is this device's share of the gradient, and `state` the state before the update.
        """
        asked, found = self._statistics, {"parts": jnp.ones((), jnp.float32)}
        if asked.noise_scale:
            found["squares"] = _square(grads)
        if asked.preconditioned:
            moments = second_moments(state.opt_state)
            if self._is_named:  # second moments may be split, but the gradient is not
                moments = self._backend.whole_params(self._backend.from_microbatches(moments))
            found["whitened"] = _square(_whitened(grads, moments))
        if asked.halves and self._devices == 1:
            found["even"] = jax.tree.map(lambda g: jnp.where(index % 2 == 0, g, 0), grads)
        return found

    def places(self, whole: Any) -> dict[str, Any]:
        """Returns the shardings of `shares` under jit; `whole` is the sharding of a scalar."""
        asked, found = self._statistics, {"parts": whole}
        found |= {"squares": whole} if asked.noise_scale else {}
        found |= {"whitened": whole} if asked.preconditioned else {}
        return found | ({"even": self._layout.moments} if asked.halves else {})

    def measured(
        self, shares: Mapping[str, Any], local: Any, grads: PyTree, state: TrainState
    ) -> tuple[Sums, dict[str, Any]]:
        """Returns the metrics of an update, and extra arguments of the optimizer's update.

        The only such argument is `halves`, the mean gradients of the two halves of the batch; it
        exists if `Statistics.to_optimizer` is True.

        Args:
          shares: sums over the microbatches of what the method `shares` returned.
          local: this device's share of the gradient, summed over microbatches.
          grads: the full gradient, sharded like the optimizer's state.
          state: the state before the update.
        """
        asked = self._statistics
        total = self._backend.add({name: x for name, x in shares.items() if name != "even"})
        parts = total["parts"]
        found: dict[str, Any] = {}
        given: dict[str, Any] = {}
        if asked.noise_scale:
            found |= self._pair(noise_scale.PAIR, total["squares"], self._norm_sq(grads), parts)
        if asked.preconditioned:
            moments = second_moments(state.opt_state)
            mean = self._norm_sq(jax.tree.map(jnp.sqrt, moments)) / self._size
            # `scale` cancels the magnitude of the second moments, which are far too small early in
            # training.
            scale = jnp.sqrt(mean)
            whole = self._norm_sq(_whitened(grads, moments))
            pair = self._pair(PRECONDITIONED, scale * total["whitened"], scale * whole, parts)
            found |= {name: _where(mean > 0, *each) for name, each in pair.items()}
        if asked.halves:
            even, odd = self._halves(shares, local, grads)
            measured = (parts % 2 == 0) | (self._devices > 1)
            cosines = similarity(
                even,
                odd,
                dict(asked.modules) or None,
                self._layout.update_spec if self._is_named else None,
            )
            one = jnp.ones((), jnp.float32)
            found |= {name: _where(measured, value, one) for name, value in cosines.items()}
            if asked.to_optimizer:
                # A half's share of the gradient is half of its mean gradient.
                given["halves"] = jax.tree.map(lambda g: 2 * g, (even, odd))
        return found, given

    def _norm_sq(self, tree: PyTree) -> jax.Array:
        return jnp.square(self._backend.norm(tree))

    def _pair(
        self, names: tuple[str, str], squares: jax.Array, whole: jax.Array, parts: jax.Array
    ) -> dict[str, Any]:
        """Returns the two unbiased estimates as metrics, which are (0, 0) if there is only one part.

        `squares` is the sum of the shares' squared norms, and `whole` the squared norm of the full
        gradient.
        """
        several = jnp.maximum(parts, 2.0)
        # A part's mean gradient is its share times the number of parts.
        pair = noise_scale.estimate(squares * parts, whole, self._part, self._part * several)
        one = jnp.ones((), jnp.float32)
        return {
            name: _where(parts > 1, value, one) for name, value in zip(names, pair, strict=True)
        }

    def _halves(self, shares: Mapping[str, Any], local: Any, grads: PyTree) -> tuple[Any, Any]:
        """Returns the two halves' shares of the gradient, sharded like the optimizer's state."""
        even = shares.get("even")
        if even is None:
            index = lax.axis_index(mesh_lib.batch_axes(self._layout.mesh))
            even = jax.tree.map(lambda g: jnp.where(index % 2 == 0, g, 0), local)
        even, _ = self._backend.reduce(even, ())
        return even, jax.tree.map(jnp.subtract, grads, even)


def check_second_moments(state: TrainState) -> None:
    """Raises ValueError unless the optimizer has a second moment of each parameter."""
    checks.check_moments("the optimizer has", second_moments(state.opt_state), state.params)


def _whitened(grads: PyTree, moments: PyTree) -> Any:
    """Returns gradients divided by the fourth root of the second moments; 0 if a moment is 0."""

    def whitened(g: jax.Array, v: jax.Array) -> jax.Array:
        v = v.astype(jnp.float32)
        return jnp.where(v > 0, g * lax.rsqrt(jnp.sqrt(jnp.where(v > 0, v, 1.0))), 0.0)

    return jax.tree.map(whitened, grads, moments)


def _square(tree: PyTree) -> jax.Array:
    """Returns the squared norm of a tree whose leaves are not split."""
    return jnp.square(optax.global_norm(tree))


def _where(measured: jax.Array, value: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    """Returns the metric (value, weight) if it is measured, else (0, 0)."""
    return jnp.where(measured, value, 0.0), jnp.where(measured, weight, 0.0)

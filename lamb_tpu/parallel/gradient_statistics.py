r"""Statistics of gradients inside a training step, from the gradients of the parts of its batch.

The batch of an update is made of parts with equal numbers of examples. A part is a microbatch under
jit, where a program sees the sum over devices, and one device's rows of a microbatch inside
shard_map. A part's share of the gradient is the sum over its examples of what each adds to the
gradient of the whole batch, so the shares add up to it, and p shares times p are the mean gradients
of p parts. Where the loss is divided by a weight that examples have unequal amounts of, such as
masked words, that is the weight of the whole batch: an example then counts by its own amount, and
the sizes of parts stay numbers of examples.
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
from lamb_tpu.optim.readings import second_moments
from lamb_tpu.parallel import backends
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Sums

# Metrics of an update, from which the host takes averages over updates and then the ratio.
GRAD_SQ, TRACE = "noise_scale/grad_sq", "noise_scale/trace"
PRECONDITIONED = "noise_scale/preconditioned_grad_sq", "noise_scale/preconditioned_trace"


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of gradients that a run measures; none by default.

    Attributes:
      noise_scale: the pair of `noise_scale.estimate`, from the parts' squared norms.
      preconditioned: the same in the geometry of an optimizer with second moments, see
        `PartStatistics`.
      halves: the cosine of the gradients of the batch's two halves, see `PartStatistics`.
      to_optimizer: whether the optimizer's update is given the gradients of the halves, as `agvm`
        needs them; it needs `halves`.
      modules: pairs (name, regular expression over paths) of modules with a cosine of their own.
      per_example: number of examples whose gradients are taken one by one, see `per_example`; 0
        for none.
      interval: updates from one such measurement to the next.
    """

    noise_scale: bool = False
    preconditioned: bool = False
    halves: bool = False
    to_optimizer: bool = False
    modules: tuple[tuple[str, str], ...] = ()
    per_example: int = 0
    interval: int = 100

    def __bool__(self) -> bool:
        """True if any is measured."""
        return bool(self.noise_scale or self.preconditioned or self.halves or self.per_example)

    def is_due(self, step: int) -> bool:
        """Returns whether the update after `step` completed ones takes gradients one by one."""
        return self.per_example > 0 and (step + 1) % self.interval == 0


NO_STATISTICS = Statistics()


class PartStatistics:
    r"""Statistics from the parts of a batch: what each microbatch adds, and the metrics of it.

    - `noise_scale/grad_sq` and `noise_scale/trace`: squared norm of the true gradient and trace of
      the covariance of one example's, both unbiased, by `noise_scale.estimate` from the mean
      squared norm of the parts and the squared norm of the whole. Measured in updates of two parts
      or more.
    - `noise_scale/preconditioned_grad_sq` and `.../preconditioned_trace`: the same of gradients
      whose elements are divided by the fourth root of :math:`v / \bar v`, where :math:`v` are the
      optimizer's second moments before the update and :math:`\bar v` is their mean. Adam's step is
      the gradient over :math:`\sqrt v`, so the squared norm is the inner product of gradient and
      step. Elements with :math:`v = 0` are left out; the first update, where all are, has none.
    - `similarity` and `similarity/<module>`: the cosine of two half gradients. Inside shard_map the
      halves are the devices of even and of odd index; under jit, and on one device, the even and
      the odd microbatches, in updates with an even number of them. Gradients that are sent in
      bfloat16 are compared as they are sent.

    A metric is a pair (value, 1), and (0, 0) in an update that does not measure it.

    Args:
      statistics: which of them.
      backend: sums, scatters and gathers.
      layout: where parameters and moments live.
      part: examples in a part.
      size: number of elements of all parameters.
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

    def shares(self, grads: Any, state: TrainState, index: jax.Array) -> dict[str, Any]:
        """Returns what a microbatch adds to the sums over microbatches, on this device.

        Args:
          grads: this device's share of the gradient.
          state: before the update.
          index: number of microbatches before it.
        """
        asked, found = self._statistics, {"parts": jnp.ones((), jnp.float32)}
        if asked.noise_scale:
            found["squares"] = _square(grads)
        if asked.preconditioned:
            moments = second_moments(state.opt_state)
            if self._is_named:  # this device's share is whole, and its second moments may be a part
                moments = self._backend.whole_params(self._backend.from_parts(moments))
            found["whitened"] = _square(_whitened(grads, moments))
        if asked.halves and self._devices == 1:
            found["even"] = jax.tree.map(lambda g: jnp.where(index % 2 == 0, g, 0), grads)
        return found

    def places(self, whole: Any) -> dict[str, Any]:
        """Returns the shardings of `shares` under jit; `whole` is that of a scalar."""
        asked, found = self._statistics, {"parts": whole}
        found |= {"squares": whole} if asked.noise_scale else {}
        found |= {"whitened": whole} if asked.preconditioned else {}
        return found | ({"even": self._layout.moments} if asked.halves else {})

    def measured(
        self, shares: Mapping[str, Any], local: Any, grads: Any, state: TrainState
    ) -> tuple[Sums, dict[str, Any]]:
        """Returns the metrics of an update, and what the optimizer's update is given.

        That is `halves`, the mean gradients of both halves, if the statistics say so.

        Args:
          shares: sums of `shares` over the microbatches.
          local: this device's share of the gradient, of all microbatches.
          grads: the gradient, placed as the optimizer's state.
          state: before the update.
        """
        asked = self._statistics
        total = self._backend.add({name: x for name, x in shares.items() if name != "even"})
        parts = total["parts"]
        found: dict[str, Any] = {}
        given: dict[str, Any] = {}
        if asked.noise_scale:
            found |= self._pair((GRAD_SQ, TRACE), total["squares"], self._norm_sq(grads), parts)
        if asked.preconditioned:
            moments = second_moments(state.opt_state)
            mean = self._norm_sq(jax.tree.map(jnp.sqrt, moments)) / self._size
            # The scale of the second moments, which early in training are far too small.
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

    def _norm_sq(self, tree: Any) -> jax.Array:
        return jnp.square(self._backend.norm(tree))

    def _pair(
        self, names: tuple[str, str], squares: jax.Array, whole: jax.Array, parts: jax.Array
    ) -> dict[str, Any]:
        """The unbiased pair, from the sum of the shares' squared norms and that of the whole."""
        several = jnp.maximum(parts, 2.0)
        # A part's mean gradient is its share times the number of parts.
        pair = noise_scale.estimate(squares * parts, whole, self._part, self._part * several)
        one = jnp.ones((), jnp.float32)
        return {
            name: _where(parts > 1, value, one) for name, value in zip(names, pair, strict=True)
        }

    def _halves(self, shares: Mapping[str, Any], local: Any, grads: Any) -> tuple[Any, Any]:
        """Both halves' shares of the gradient, placed as the optimizer's state."""
        even = shares.get("even")
        if even is None:
            index = lax.axis_index(mesh_lib.batch_axes(self._layout.mesh))
            even = jax.tree.map(lambda g: jnp.where(index % 2 == 0, g, 0), local)
        even, _ = self._backend.reduce(even, ())
        return even, jax.tree.map(jnp.subtract, grads, even)


def check_second_moments(state: TrainState) -> None:
    """Raises ValueError unless the optimizer keeps a second moment of each parameter.

    Args:
      state: shapes of the whole arrays of the state.
    """
    checks.check_moments("the optimizer keeps", second_moments(state.opt_state), state.params)


def _whitened(grads: Any, moments: Any) -> Any:
    """Gradients over the fourth root of the second moments; 0 where those are."""

    def whitened(g: jax.Array, v: jax.Array) -> jax.Array:
        v = v.astype(jnp.float32)
        return jnp.where(v > 0, g * lax.rsqrt(jnp.sqrt(jnp.where(v > 0, v, 1.0))), 0.0)

    return jax.tree.map(whitened, grads, moments)


def _square(tree: Any) -> jax.Array:
    """The squared norm of a tree whose leaves are whole."""
    return jnp.square(optax.global_norm(tree))


def _where(measured: jax.Array, value: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    """The metric (value, weight) if it is measured, else (0, 0)."""
    return jnp.where(measured, value, 0.0), jnp.where(measured, weight, 0.0)

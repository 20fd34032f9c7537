"""Deep Gradient Compression: sparse gradients, with a momentum on each device.

For each matrix a device has u, the momentum of its gradient g, and v, the accumulated values that
it has not sent. At each update u <- m u + g and v <- v + u, or with Nesterov's momentum
u <- m (u + g) and v <- v + u + g. The device then sends the largest values of v, about a fraction
`ratio` of all values, and sets u and v to 0 at the positions of sent values. Later results depend
only on the sums of u and v over devices.

The result contains the momentum, so **the momentum of the optimizer must be 0**, and weight decay
that the optimizer adds has no momentum. Vectors, such as biases, are all-reduced in full, and get
the same momentum.

Source: Lin et al., arXiv:1712.01887, as in the authors' synxlin/deep-gradient-compression.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import cutting, norms, selection, sparse
from lamb_tpu.parallel.exchange.base import (
    Exchange,
    Residual,
    check_momentum,
    check_range,
    check_ratio,
)
from lamb_tpu.types import Params, PyTree


class Sampling(NamedTuple):
    """The samples from which the threshold of one matrix is estimated."""

    size: int  # number of values of the matrix
    budget: int  # the largest number of values that is sent
    stride: int  # distance between samples; 1: all values are samples
    rank: int  # the threshold is the `rank`-th largest sample, counted from 1


@dataclasses.dataclass(frozen=True)
class DGC(Exchange):
    """Deep Gradient Compression, see the module's docstring.

    Attributes:
      ratio: the fraction of a matrix's values that is sent, in (0, 1]; 1: the matrix is all-reduced.
      momentum: coefficient of the momentum.
      nesterov: whether to use Nesterov's momentum.
      factor_masking: whether the momentum is set to 0 at the positions of sent values.
      clip_norm: each leaf of a device's mean gradient is clipped to this norm before accumulation;
        None: no clipping.
      sample_ratio: the fraction of values from which the threshold is estimated, in (0, 1].
      resample: whether a threshold that selects too many values is replaced by the exact threshold,
        which is computed from all values.
      warmup_steps: number of updates of the warm-up, in which the ratio may differ from `ratio`.
      warmup_stages: number of stages of equal length in the warm-up, each with its ratio.
      warmup_coeff: a number c: stage k, counted from 1, has the ratio max(c**k, ratio). A tuple: the
        ratio of each stage. None: c = ratio**(1 / (warmup_stages + 1)), so that the ratio falls
        exponentially to `ratio`. The authors' wm5 is (0.25, 0.063, 0.015, 0.004, 0.001).
      seed: seed of the positions of the samples.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    nesterov: bool = False
    factor_masking: bool = True
    clip_norm: float | None = None
    sample_ratio: float = 0.01
    resample: bool = True
    warmup_steps: int = 0
    warmup_stages: int = 5
    warmup_coeff: float | tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_ratio("sample_ratio", self.sample_ratio)
        check_momentum(self.momentum)
        clip_norm, steps, stages = self.clip_norm, self.warmup_steps, self.warmup_stages
        check_range("clip_norm", clip_norm, clip_norm is None or clip_norm > 0, "a value above 0")
        check_range("warmup_steps", steps, steps >= 0, "at least 0")
        check_range("warmup_stages", stages, stages >= 1, "at least 1")
        if isinstance(self.warmup_coeff, (tuple, list)):
            # An exchange must be hashable.
            object.__setattr__(self, "warmup_coeff", tuple(self.warmup_coeff))
            for coeff in self.warmup_coeff:
                check_ratio("warmup_coeff", coeff)
            if len(self.warmup_coeff) < self.warmup_stages:
                problem = f"has fewer ratios than warmup_stages={self.warmup_stages}"
                remedy = "give a ratio for each stage"
                raise ArgumentError("warmup_coeff", self.warmup_coeff, problem, remedy)
        elif self.warmup_coeff is not None:
            check_ratio("warmup_coeff", self.warmup_coeff)

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    def at(self, update: int) -> "DGC":
        ratio = self.ratio
        if update < self.warmup_steps:
            stage = update * self.warmup_stages // self.warmup_steps
            coeff = self.warmup_coeff
            if coeff is None:
                coeff = ratio ** (1 / (self.warmup_stages + 1))
            # Compute the power of a rounded root, like the authors' class, so that the ratio has the
            # same bits: in a small matrix the last bit may decide how many values are sent.
            ratio = coeff[stage] if isinstance(coeff, tuple) else max(coeff ** (stage + 1), ratio)
        return dataclasses.replace(self, ratio=ratio, warmup_steps=0)

    def init(self, params: Params) -> Residual:
        matrices, vectors = _by_rank(jax.tree.leaves(params))
        sparse.check_length(sum(leaf.size for leaf in matrices))
        zeros = tuple(jnp.zeros(leaf.size, compute_dtype(leaf)) for leaf in matrices)
        momentum = tuple(jnp.zeros(leaf.shape, compute_dtype(leaf)) for leaf in vectors)
        return Residual(
            device={"momentum": zeros, "accumulated": zeros},
            whole={"momentum": momentum, "count": jnp.zeros((), jnp.int32)},
        )

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        leaves, treedef = jax.tree.flatten(grads)
        matrices, vectors = _by_rank([leaf.astype(compute_dtype(leaf)) for leaf in leaves])
        # Sum all vectors in one operation.
        dense, momentum = self._dense(lax.psum(vectors, self.axes), residual.whole["momentum"], 1.0)
        flat = [leaf.ravel() for leaf in matrices]
        count = residual.whole["count"]
        if self.ratio < 1:
            sums, device = self._sparse(flat, residual.device, count)
        else:
            # While matrices are all-reduced, all devices have equal shares of the momentum.
            sums, shares = self._dense(
                lax.psum(flat, self.axes), residual.device["momentum"], 1.0 / self.num_devices
            )
            device = dict(residual.device, momentum=shares)
        whole = {"momentum": momentum, "count": count + 1}
        found = {True: iter(sums), False: iter(dense)}
        sharded = [
            next(found[_is_matrix(leaf)]).reshape(leaf.shape).astype(leaf.dtype) for leaf in leaves
        ]
        return treedef.unflatten(sharded), Residual(device=device, whole=whole)

    def _dense(
        self, sums: list[jax.Array], momentum: tuple[jax.Array, ...], share: float
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """Applies momentum to summed gradients; devices store `share` times the full momentum."""
        pairs = [
            self._momentum(self._clipped(g, 1), before / share)
            for g, before in zip(sums, momentum, strict=True)
        ]
        return [step for step, _ in pairs], tuple(m * share for _, m in pairs)

    def _sparse(
        self, gradients: list[jax.Array], device: Any, count: jax.Array
    ) -> tuple[list[jax.Array], Any]:
        """Returns the sums of sent values, and this device's new momentum and accumulated values."""
        pairs = [
            self._momentum(self._clipped(g, self.num_devices), u)
            for g, u in zip(gradients, device["momentum"], strict=True)
        ]
        accumulated = [v + step for v, (step, _) in zip(device["accumulated"], pairs, strict=True)]
        # Treat NaN as the largest value, so that every device receives it.
        magnitudes = [jnp.where(jnp.isnan(v), jnp.inf, jnp.abs(v)) for v in accumulated]
        masks = self.masks(magnitudes, count)
        selected = [sparse.Selected(v, mask) for v, mask in zip(accumulated, masks, strict=True)]
        budgets = [self.sampling(v.size).budget for v in accumulated]
        sums = sparse.total(selected, budgets, self.axes)
        momentum = tuple(
            jnp.where(mask, 0, u) if self.factor_masking else u
            for (_, u), mask in zip(pairs, masks, strict=True)
        )
        unsent = tuple(jnp.where(mask, 0, v) for v, mask in selected)
        return sums, {"momentum": momentum, "accumulated": unsent}

    def _momentum(self, g: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the value to accumulate for a gradient g, and the new momentum, from momentum u."""
        if self.nesterov:
            u = self.momentum * (u + g)
            return u + g, u
        u = self.momentum * u + g
        return u, u

    def _clipped(self, g: jax.Array, scale: int) -> jax.Array:
        """Returns a gradient clipped so that its norm times `scale` is at most `clip_norm`."""
        if self.clip_norm is None:
            return g
        norm = scale * norms.l2([g])
        return g * jnp.minimum(1.0, self.clip_norm / (norm + 1e-6))

    def sampling(self, size: int) -> Sampling:
        """Returns the sampling for a matrix of `size` values, as in the authors' code."""
        budget = math.ceil(size * self.ratio)
        samples, stride = size, 1
        # Choose enough samples that at least two are above the threshold.
        fewest = math.ceil(2 / self.ratio)
        if self.sample_ratio < 1 and size > fewest:
            wanted = max(math.ceil(size * self.sample_ratio), fewest)
            # The number of columns is a multiple of 32 in most networks. Use a stride that is not a
            # multiple of 32, so that samples come from several columns.
            stride = math.ceil(size / wanted / 32) * 32 + 1
            while size // stride < wanted:
                stride -= 8
            samples = size // stride
        return Sampling(size, budget, stride, math.ceil(samples * self.ratio))

    def sample_start(self, leaf: int, sampling: Sampling, count: jax.Array) -> jax.Array:
        """Returns the index of a matrix's first sample, which changes from update to update."""
        if sampling.stride == 1:
            return jnp.zeros((), jnp.int32)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), count), leaf)
        return jax.random.randint(key, (), 0, sampling.stride, jnp.int32)

    def masks(self, magnitudes: list[jax.Array], count: jax.Array) -> list[jax.Array]:
        """Returns for each matrix a mask of the values to send, after `count` completed updates."""
        of_size: dict[int, list[int]] = {}
        for leaf, values in enumerate(magnitudes):
            of_size.setdefault(values.size, []).append(leaf)
        found: dict[int, jax.Array] = {}
        # Matrices of the same size share one copy of the code, because its loops take long to
        # compile. The shared code returns scalars: masks would be written to memory and read again.
        for size, leaves in of_size.items():
            sampling, shape = self.sampling(size), collectives.lane_shape(size)
            rows = (
                jnp.stack([magnitudes[leaf].reshape(shape) for leaf in leaves]),
                jnp.stack([self.sample_start(leaf, sampling, count) for leaf in leaves]),
            )
            cuts = lax.map(lambda row, how=sampling: self.cut(row[0].ravel(), how, row[1]), rows)
            for place, leaf in enumerate(leaves):
                found[leaf] = cutting.Cut(*(each[place] for each in cuts)).mask(magnitudes[leaf])
        return [found[leaf] for leaf in range(len(magnitudes))]

    def cut(self, magnitudes: jax.Array, sampling: Sampling, start: jax.Array) -> cutting.Cut:
        """Returns the selection of a matrix's values, at most `sampling.budget` of them.

        These are the values that are not below a threshold. If there are more than the budget, the
        first of them are selected, as in the authors' code. With `resample`, if a threshold estimated
        from samples selects far too many values, the largest values are selected.
        """
        budget = sampling.budget
        if sampling.stride == 1:
            threshold = selection.kth_largest(magnitudes, sampling.rank)
            return cutting.first(magnitudes, threshold, budget)
        places = start + sampling.stride * jnp.arange(-(-sampling.size // sampling.stride))
        # Positions past the end give 0, the smallest magnitude. At least `rank` samples are real
        # values, so this padding does not change the `rank`-th largest.
        samples = magnitudes.at[places].get(mode="fill", fill_value=0)
        threshold = selection.kth_largest(samples, sampling.rank)
        if not self.resample:
            threshold = cutting.adapted(magnitudes, threshold, budget)
            return cutting.first(magnitudes, threshold, budget)
        threshold, exact = cutting.lowered(magnitudes, threshold, budget)
        # If the threshold selects too many values, send the largest values.
        threshold = lax.cond(
            exact, lambda: selection.kth_largest(magnitudes, budget), lambda: threshold
        )
        above = exact & (magnitudes > threshold)
        left = budget - jnp.sum(above, dtype=jnp.int32)
        last = selection.last_of_first((magnitudes >= threshold) & ~above, left)
        return cutting.Cut(threshold, last, exact)


def _by_rank(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the matrices, which are sent as sparse values, and the vectors and scalars."""
    return [x for x in leaves if _is_matrix(x)], [x for x in leaves if not _is_matrix(x)]


def _is_matrix(leaf: Any) -> bool:
    # An empty leaf has no largest value.
    return leaf.ndim > 1 and leaf.size > 0

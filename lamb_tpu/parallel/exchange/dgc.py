"""Deep Gradient Compression: sparse gradients whose momentum is kept by each device.

For each matrix a device keeps u, the momentum of its own gradient, and v, what it has accumulated
and not sent. At each update u <- m u + g and v <- v + u, or with Nesterov's momentum
u <- m (u + g) and v <- v + u + g. It sends the largest values of v, about a fraction `ratio` of
them, and sets u and v to 0 there. What counts are the sums over devices of u and of v.

The result contains the momentum: **the optimizer's own must be 0**, and weight decay that the
optimizer adds gets none. Vectors, such as biases, are all-reduced, with the same momentum.

Source: Lin et al., arXiv:1712.01887, as in the authors' synxlin/deep-gradient-compression.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.optim.trust_ratio import compute_dtype
from lamb_tpu.parallel import collectives
from lamb_tpu.parallel.exchange import cutting, norms, selection, sparse
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.compressors import check_ratio


class Sampling(NamedTuple):
    """Samples from which the threshold of one matrix is found.

    Attributes:
      size: number of values.
      budget: the largest number of values that is sent.
      stride: between samples; 1: the threshold is of all values.
      rank: the threshold is the sample of this rank, from the largest.
    """

    size: int
    budget: int
    stride: int
    rank: int


@dataclasses.dataclass(frozen=True)
class DGC(Exchange):
    """Deep Gradient Compression, see above.

    Attributes:
      axes: the mesh axes to sum over.
      num_devices: number of devices along these axes.
      ratio: the fraction of a matrix' values that is sent, in (0, 1]; 1: an all-reduce.
      momentum: of the exchange.
      nesterov: whether this is Nesterov's momentum.
      factor_masking: whether the momentum is set to 0 where a value was sent.
      clip_norm: the largest norm of each leaf of a device's mean gradient, before it is added;
        None: any.
      sample_ratio: the fraction of values from which the threshold is estimated, in (0, 1].
      resample: whether a threshold that selects too much is replaced by the exact one.
      warmup_steps: number of updates in which the ratio falls from near 1.
      warmup_stages: number of ratios in these updates.
      warmup_coeff: a number c: stage k, counted from 1, has the ratio c**k, but at least `ratio`; a
        tuple: the ratio of each stage. None: c = ratio**(1 / (stages + 1)), which falls
        exponentially to `ratio`. The authors' wm5 is (0.25, 0.063, 0.015, 0.004, 0.001).
      seed: of the places of the samples.
    """

    axes: tuple[str, ...]
    num_devices: int
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
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive, not {self.clip_norm}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, not {self.warmup_steps}")
        if self.warmup_stages < 1:
            raise ValueError(f"warmup_stages must be at least 1, not {self.warmup_stages}")
        if isinstance(self.warmup_coeff, (tuple, list)):
            # A tuple, because an exchange is hashed.
            object.__setattr__(self, "warmup_coeff", tuple(self.warmup_coeff))
            for coeff in self.warmup_coeff:
                check_ratio("each ratio of warmup_coeff", coeff)
            if len(self.warmup_coeff) < self.warmup_stages:
                raise ValueError(
                    f"warmup_coeff has {len(self.warmup_coeff)} ratios, and warmup_stages is "
                    f"{self.warmup_stages}; give a ratio for each stage"
                )
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
            # A power of a rounded root, as in the authors' class: at a small matrix the last bit of
            # the ratio may decide how many values are sent.
            ratio = coeff[stage] if isinstance(coeff, tuple) else max(coeff ** (stage + 1), ratio)
        return dataclasses.replace(self, ratio=ratio, warmup_steps=0)

    def init(self, params: Any) -> Residual:
        sparse_leaves, dense_leaves = _by_rank(jax.tree.leaves(params))
        sparse.check_length(sum(leaf.size for leaf in sparse_leaves))
        zeros = tuple(jnp.zeros((leaf.size,), _dtype(leaf)) for leaf in sparse_leaves)
        return Residual(
            device={"momentum": zeros, "accumulated": zeros},
            whole={
                "momentum": tuple(jnp.zeros(leaf.shape, _dtype(leaf)) for leaf in dense_leaves),
                "count": jnp.zeros((), jnp.int32),
            },
        )

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        leaves, treedef = jax.tree.flatten(grads)
        matrices, vectors = _by_rank([leaf.astype(_dtype(leaf)) for leaf in leaves])
        # One operation for all vectors.
        dense, momentum = self._dense(lax.psum(vectors, self.axes), residual.whole["momentum"], 1.0)
        flat = [leaf.ravel() for leaf in matrices]
        count = residual.whole["count"]
        if self.ratio < 1:
            sums, device = self._sparse(flat, residual.device, count)
        else:
            # Before the first sparse update all devices hold the same momentum, in equal shares.
            sums, shares = self._dense(
                lax.psum(flat, self.axes), residual.device["momentum"], 1.0 / self.num_devices
            )
            device = dict(residual.device, momentum=shares)
        whole = {"momentum": momentum, "count": count + 1}
        found = {True: iter(sums), False: iter(dense)}
        placed = [
            next(found[_is_matrix(leaf)]).reshape(leaf.shape).astype(leaf.dtype) for leaf in leaves
        ]
        return treedef.unflatten(placed), Residual(device=device, whole=whole)

    def _dense(
        self, sums: list[jax.Array], momentum: tuple[jax.Array, ...], share: float
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        """Plain momentum of summed gradients, of which each device keeps the given share."""
        found, kept = [], []
        for g, before in zip(sums, momentum, strict=True):
            step, m = self._momentum(self._clipped(g, 1), before / share)
            found.append(step)
            kept.append(m * share)
        return found, tuple(kept)

    def _sparse(
        self, gradients: list[jax.Array], device: Any, count: jax.Array
    ) -> tuple[list[jax.Array], Any]:
        """The sums of what is sent, and the new momentum and accumulated values."""
        momenta, accumulated = [], []
        for g, u, v in zip(gradients, device["momentum"], device["accumulated"], strict=True):
            step, u = self._momentum(self._clipped(g, self.num_devices), u)
            momenta.append(u)
            accumulated.append(v + step)
        # NaN is sent, so that every device sees it.
        masks = self.masks(
            [jnp.where(jnp.isnan(v), jnp.inf, jnp.abs(v)) for v in accumulated], count
        )
        selected = [sparse.Selected(v, mask) for v, mask in zip(accumulated, masks, strict=True)]
        budgets = [self.sampling(v.size).budget for v in accumulated]
        sums = sparse.total(selected, budgets, self.axes, self.num_devices)
        return sums, {
            "momentum": tuple(
                jnp.where(mask, 0, u) if self.factor_masking else u
                for u, mask in zip(momenta, masks, strict=True)
            ),
            "accumulated": tuple(jnp.where(mask, 0, v) for v, mask in selected),
        }

    def _momentum(self, g: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the step of a gradient, and its momentum."""
        if self.nesterov:
            u = self.momentum * (u + g)
            return u + g, u
        u = self.momentum * u + g
        return u, u

    def _clipped(self, g: jax.Array, scale: int) -> jax.Array:
        """Returns a gradient, shortened where the norm of `scale` times it is above `clip_norm`."""
        if self.clip_norm is None:
            return g
        norm = scale * norms.l2([g])
        return g * jnp.minimum(1.0, self.clip_norm / (norm + 1e-6))

    def sampling(self, size: int) -> Sampling:
        """Returns how the threshold of a matrix of `size` values is found, as the authors do."""
        budget = math.ceil(size * self.ratio)
        samples, stride = size, 1
        # At least two samples are to be above the threshold.
        fewest = math.ceil(2 / self.ratio)
        if self.sample_ratio < 1 and size > fewest:
            wanted = max(math.ceil(size * self.sample_ratio), fewest)
            # Not a multiple of the number of columns, which is one of 32 in most networks.
            stride = math.ceil(size / wanted / 32) * 32 + 1
            while size // stride < wanted:
                stride -= 8
            samples = size // stride
        return Sampling(size, budget, stride, math.ceil(samples * self.ratio))

    def sample_start(self, leaf: int, sampling: Sampling, count: jax.Array) -> jax.Array:
        """Returns the index of the first sample; it changes from update to update.

        Args:
          leaf: the matrix, by its place among them.
          sampling: the size and stride.
          count: number of updates before.
        """
        if sampling.stride == 1:
            return jnp.zeros((), jnp.int32)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), count), leaf)
        return jax.random.randint(key, (), 0, sampling.stride, jnp.int32)

    def masks(self, magnitudes: list[jax.Array], count: jax.Array) -> list[jax.Array]:
        """Returns the masks of the values that are sent of each matrix.

        Args:
          magnitudes: of what is accumulated.
          count: number of updates before.
        """
        of_size: dict[int, list[int]] = {}
        for leaf, values in enumerate(magnitudes):
            of_size.setdefault(values.size, []).append(leaf)
        found: dict[int, jax.Array] = {}
        # Matrices of one size share the program, whose several loops take long to compile. Only
        # numbers leave it, as masks would be written and read once more.
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
        """Returns the selection of a matrix' values, of at most `sampling.budget`.

        These are the values that are not below a threshold, and of more than the budget allows the
        first, as the authors do.
        """
        budget = sampling.budget
        if sampling.stride == 1:
            threshold = selection.kth_largest(magnitudes, sampling.rank)
            return cutting.first(magnitudes, threshold, budget)
        places = start + sampling.stride * jnp.arange(-(-sampling.size // sampling.stride))
        # Beyond the end there is none; there are `rank` samples without it, and 0 is the smallest.
        samples = magnitudes.at[places].get(mode="fill", fill_value=0)
        threshold = selection.kth_largest(samples, sampling.rank)
        if not self.resample:
            threshold = cutting.adapted(magnitudes, threshold, budget)
            return cutting.first(magnitudes, threshold, budget)
        threshold, exact = cutting.lowered(magnitudes, threshold, budget)
        # Too many: the largest ones.
        threshold = lax.cond(
            exact, lambda: selection.kth_largest(magnitudes, budget), lambda: threshold
        )
        above = exact & (magnitudes > threshold)
        left = budget - jnp.sum(above, dtype=jnp.int32)
        last = selection.last_of_first((magnitudes >= threshold) & ~above, left)
        return cutting.Cut(threshold, last, exact)


def _by_rank(leaves: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the matrices, which are sent sparse, and the vectors and scalars."""
    return [x for x in leaves if _is_matrix(x)], [x for x in leaves if not _is_matrix(x)]


def _is_matrix(leaf: Any) -> bool:
    # A leaf without elements has no largest value.
    return leaf.ndim > 1 and leaf.size > 0


def _dtype(leaf: Any) -> Any:
    """The dtype of arithmetic: float32 at least."""
    return compute_dtype(leaf)

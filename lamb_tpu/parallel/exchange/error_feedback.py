"""Error feedback over any contractive compressor C: EF14, EF21 with its variants, and EControl.

Below, g_i is a device's share of the gradient, so that the gradient is the sum of g_i. References
work with the mean of the devices' gradients: theirs are `num_devices` times these, and every rule
scales with them.

- EF14: p = e_i + g_i, sent is C(p), e_i <- p - C(p). The result is the sum of C(p).
- EF21: sent is d = C(g_i - h_i), h_i <- h_i + d. The result is the sum of h_i, which every device
  keeps as h <- h + sum of d.
- EControl: sent is d = C(eta e_i + g_i - h_i), e_i <- e_i + g_i - h_i - d, h_i <- h_i + d. The
  result is the sum of h_i.

The sums over devices of e_i and of h_i are what counts: a run that is resumed on another number of
devices goes on with the same sums in equal shares, and h remains the sum of h_i.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.parallel.exchange import norms, sparse
from lamb_tpu.parallel.exchange.base import Exchange, Residual
from lamb_tpu.parallel.exchange.compressors import Compressor, Identity, make_compressor
from lamb_tpu.parallel.exchange.joined import split

Vectors = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Compressed(Exchange):
    """Base class of the exchanges with a compressor.

    Attributes:
      axes: the mesh axes to sum over.
      num_devices: number of devices along these axes.
      compressor: 'topk', 'sign', 'identity', or a compressor.
      ratio: the fraction of values that 'topk' sends, in (0, 1].
      layerwise: whether each leaf is compressed by itself; otherwise all of them as one vector.
      whole_start: whether the first gradient is sent in full precision.
    """

    axes: tuple[str, ...]
    num_devices: int
    compressor: str | Compressor = "topk"
    ratio: float = 0.01
    layerwise: bool = False
    whole_start: bool = False

    def __post_init__(self) -> None:
        make_compressor(self.compressor, self.ratio)

    def at(self, update: int) -> "Compressed":
        if self.whole_start and update == 0:
            # Without a residual, every rule passes the gradient on under the identity.
            return dataclasses.replace(self, compressor=Identity())
        return self

    def _vectors(self, tree: Any) -> Vectors:
        """The leaves as vectors of float32 at least: one each, or one in all."""
        leaves = jax.tree.leaves(tree)
        with jax.numpy_dtype_promotion("standard"):  # this promotion is meant
            dtype = jnp.result_type(jnp.float32, *leaves)
        vectors = [leaf.ravel().astype(dtype) for leaf in leaves]
        return tuple(vectors) if self.layerwise or not vectors else (jnp.concatenate(vectors),)

    def _tree(self, vectors: Sequence[jax.Array], like: Any) -> Any:
        """The leaves of such vectors, in the shapes and dtypes of `like`."""
        leaves, treedef = jax.tree.flatten(like)
        if leaves and not self.layerwise:
            vectors = split(vectors[0], [leaf.size for leaf in leaves])
        return treedef.unflatten(
            vector.reshape(leaf.shape).astype(leaf.dtype)
            for vector, leaf in zip(vectors, leaves, strict=True)
        )

    def _zeros(self, params: Any) -> Vectors:
        """A vector of zeros for each that is compressed."""
        leaves = jax.tree.leaves(params)
        sparse.check_length(sum(leaf.size for leaf in leaves))
        return jax.tree.map(
            lambda vector: jnp.zeros(vector.shape, vector.dtype),
            jax.eval_shape(self._vectors, params),
        )

    def _sent(self, vectors: Vectors) -> tuple[Vectors, Vectors]:
        """Returns C of each vector, and its sum over devices."""
        if not vectors:
            return (), ()
        compressor = make_compressor(self.compressor, self.ratio)
        messages = [compressor.compress(vector) for vector in vectors]
        own = tuple(compressor.decompress(message) for message in messages)
        return own, tuple(compressor.total(messages, self.axes, self.num_devices))


@dataclasses.dataclass(frozen=True)
class EF14(Compressed):
    """Adds the error of a compression to the next gradient.

    The error is in units of the gradient. Where the learning rate changes, this differs from the
    form that keeps the error of learning rate times gradient.

    Sources: Seide et al., 1-bit SGD, Interspeech 2014; Stich et al., Sparsified SGD with Memory,
    arXiv:1809.07599.
    """

    def init(self, params: Any) -> Residual:
        return Residual(device={"error": self._zeros(params)})

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        wanted = _map(jnp.add, residual.device["error"], self._vectors(grads))
        own, sums = self._sent(wanted)
        return self._tree(sums, grads), Residual(device={"error": _map(jnp.subtract, wanted, own)})


@dataclasses.dataclass(frozen=True)
class EF21(Compressed):
    """Sends the compressed difference between the gradient and an estimate of it.

    Attributes:
      momentum: the estimate follows a moving average of the own gradient, which keeps this much of
        itself at each update (EF21-SGDM); 0: the gradient.
      plus: whether each device sends C(g_i) in place of the difference, and takes it as the
        estimate, where that is nearer to the gradient (EF21+). Every device then keeps the
        estimates of all of them, `num_devices` times the size of the gradient, and the run cannot
        go on with another number of devices.

    Sources: Richtarik et al., EF21, arXiv:2106.05203; Fatkhullin et al., Momentum Provably Improves
    Error Feedback!, arXiv:2305.15155.
    """

    momentum: float = 0.0
    plus: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), not {self.momentum}")
        if self.plus and self.momentum:
            raise ValueError(f"momentum must be 0 with plus=True, not {self.momentum}")

    def init(self, params: Any) -> Residual:
        zeros = self._zeros(params)
        if self.plus:
            table = _map(lambda x: jnp.zeros((self.num_devices, *x.shape), x.dtype), zeros)
            return Residual(whole={"estimates": table})
        device: dict[str, Any] = {"estimate": zeros}
        whole: dict[str, Any] = {"estimate": zeros}
        if self.momentum:
            device["average"] = zeros
            whole["count"] = jnp.zeros((), jnp.int32)
        return Residual(device=device, whole=whole)

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        vectors, device, whole = self._vectors(grads), {}, {}
        if self.plus:
            return self._nearer(grads, vectors, residual)
        if self.momentum:
            # The average begins with the first gradient.
            started = residual.whole["count"] > 0
            vectors = device["average"] = _map(
                lambda average, g: jnp.where(
                    started, self.momentum * average + (1 - self.momentum) * g, g
                ),
                residual.device["average"],
                vectors,
            )
            whole["count"] = residual.whole["count"] + 1
        estimate = residual.device["estimate"]
        own, sums = self._sent(_map(jnp.subtract, vectors, estimate))
        device["estimate"] = _map(jnp.add, estimate, own)
        whole["estimate"] = _map(jnp.add, residual.whole["estimate"], sums)
        return self._tree(whole["estimate"], grads), Residual(device=device, whole=whole)

    def _nearer(self, grads: Any, vectors: Vectors, residual: Residual) -> tuple[Any, Residual]:
        """EF21+: the nearer of the compressed gradient and the estimate plus the difference."""
        if not vectors:
            return grads, residual
        compressor = make_compressor(self.compressor, self.ratio)
        table = residual.whole["estimates"]
        place = lax.axis_index(self.axes)
        estimate = _map(lambda rows: rows[place], table)
        anew = [compressor.compress(g) for g in vectors]
        moved = [compressor.compress(g - h) for g, h in zip(vectors, estimate, strict=True)]
        distance_anew = _distance([compressor.decompress(m) for m in anew], vectors)
        steps = [compressor.decompress(m) for m in moved]
        distance_moved = _distance(_map(jnp.add, estimate, steps), vectors)
        keeps = distance_moved <= distance_anew
        messages = [
            jax.tree.map(lambda a, b: jnp.where(keeps, a, b), one, other)
            for one, other in zip(moved, anew, strict=True)
        ]
        every = compressor.each(messages, self.axes)
        kept = lax.all_gather(keeps, self.axes).reshape(-1, 1)
        table = _map(lambda rows, sent: jnp.where(kept, rows, 0) + sent, table, every)
        sums = _map(lambda rows: rows.sum(axis=0), table)
        return self._tree(sums, grads), Residual(whole={"estimates": table})


@dataclasses.dataclass(frozen=True)
class EControl(Compressed):
    """Controls the feedback of the error, and sends one message for it and for the estimate.

    Attributes:
      eta: the part of the error that is added to the message; 0 is EF21.

    Source: Gao, Islamov, Stich, EControl, ICLR 2024, arXiv:2311.05645.
    """

    eta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta < 0:
            raise ValueError(f"eta must not be negative, not {self.eta}")

    def init(self, params: Any) -> Residual:
        zeros = self._zeros(params)
        return Residual(device={"error": zeros, "estimate": zeros}, whole={"estimate": zeros})

    def reduce(self, grads: Any, residual: Residual) -> tuple[Any, Residual]:
        error, estimate = residual.device["error"], residual.device["estimate"]
        vectors = self._vectors(grads)
        own, sums = self._sent(_map(lambda e, g, h: self.eta * e + g - h, error, vectors, estimate))
        device = {
            "error": _map(lambda e, g, h, d: e + (g - h - d), error, vectors, estimate, own),
            "estimate": _map(jnp.add, estimate, own),
        }
        whole = _map(jnp.add, residual.whole["estimate"], sums)
        return self._tree(whole, grads), Residual(device=device, whole={"estimate": whole})


def _map(function: Any, *vectors: Sequence[jax.Array]) -> Vectors:
    return tuple(function(*row) for row in zip(*vectors, strict=True))


def _distance(found: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> jax.Array:
    """The l2 norm of the difference of two lists of vectors."""
    return norms.l2(_map(jnp.subtract, found, vectors))

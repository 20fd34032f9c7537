"""Error feedback with any contractive compressor C: EF14, top-k, EF21 and its variants, EControl.

Below, g_i is the share of device i in the gradient, so the gradient is the sum of all g_i. The
references use the mean of the devices' gradients instead. So a device's gradient in the references
is `num_devices` times g_i; errors and estimates scale in the same way.

Each device has an error e_i or an estimate h_i of its gradient, or both:

- EF14: p = e_i + g_i; the device sends C(p); e_i <- p - C(p). The result is the sum of all C(p).
- EF21: the device sends d = C(g_i - h_i); h_i <- h_i + d. The result is the sum h of all h_i, which
  every device stores and updates by the sum of all d.
- EControl: the device sends d = C(eta e_i + g_i - h_i); e_i <- e_i + g_i - h_i - d; h_i <- h_i + d.
  The result is h, as in EF21.

A run that resumes on a different number of devices continues with the same sums of e_i and of h_i, in
equal shares, and h remains the sum of all h_i.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lamb_tpu.errors import ArgumentError
from lamb_tpu.parallel.collectives import split
from lamb_tpu.parallel.exchange import norms, sparse
from lamb_tpu.parallel.exchange.base import Exchange, Residual, check_momentum, check_range
from lamb_tpu.parallel.exchange.compressors import Compressor, Identity, make_compressor
from lamb_tpu.types import Params, PyTree

Vectors = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Compressed(Exchange):
    """Base class of the exchanges with a compressor.

    Attributes:
      compressor: 'topk', 'sign', 'identity', or a `Compressor`.
      ratio: the fraction of values that 'topk' sends, in (0, 1].
      layerwise: True: each leaf is compressed separately; False: all leaves form one vector.
      whole_start: whether the first gradient is sent uncompressed.
    """

    compressor: str | Compressor = "topk"
    ratio: float = 0.01
    layerwise: bool = False
    whole_start: bool = False

    def __post_init__(self) -> None:
        make_compressor(self.compressor, self.ratio)

    def at(self, update: int) -> "Compressed":
        if self.whole_start and update == 0:
            # With a zero residual and C(x) = x, every rule returns the gradient.
            return dataclasses.replace(self, compressor=Identity())
        return self

    def _vectors(self, tree: PyTree) -> Vectors:
        """Returns the leaves as vectors of float32 or wider: one vector per leaf, or one in total."""
        leaves = jax.tree.leaves(tree)
        with jax.numpy_dtype_promotion("standard"):  # this promotion is intended
            dtype = jnp.result_type(jnp.float32, *leaves)
        vectors = [leaf.ravel().astype(dtype) for leaf in leaves]
        return tuple(vectors) if self.layerwise or not vectors else (jnp.concatenate(vectors),)

    def _tree(self, vectors: Sequence[jax.Array], like: Any) -> Any:
        """Inverts `_vectors`: returns leaves in the shapes and dtypes of `like`."""
        leaves, treedef = jax.tree.flatten(like)
        if leaves and not self.layerwise:
            vectors = split(vectors[0], [leaf.size for leaf in leaves])
        return treedef.unflatten(
            _map(lambda x, leaf: x.reshape(leaf.shape).astype(leaf.dtype), vectors, leaves)
        )

    def _zeros(self, params: Params) -> Vectors:
        """Returns zeros in the shapes of `_vectors`."""
        leaves = jax.tree.leaves(params)
        sparse.check_length(sum(leaf.size for leaf in leaves))
        return jax.tree.map(
            lambda vector: jnp.zeros(vector.shape, vector.dtype),
            jax.eval_shape(self._vectors, params),
        )

    def _sent(self, vectors: Vectors) -> tuple[Vectors, Vectors]:
        """Returns C(x) of each vector x, and the sum of C(x) over devices."""
        if not vectors:
            return (), ()
        compressor = make_compressor(self.compressor, self.ratio)
        messages = [compressor.compress(vector) for vector in vectors]
        own = tuple(compressor.decompress(message) for message in messages)
        return own, tuple(compressor.total(messages, self.axes))


@dataclasses.dataclass(frozen=True)
class EF14(Compressed):
    """Adds the error of a compression to the next gradient.

    The error is in units of the gradient. If the learning rate changes, this differs from algorithms
    that compress the learning rate times the gradient and store the error of that product.

    Sources: Seide et al., 1-bit SGD, Interspeech 2014; Stich et al., Sparsified SGD with Memory,
    arXiv:1809.07599.
    """

    def init(self, params: Params) -> Residual:
        return Residual(device={"error": self._zeros(params)})

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        wanted = _map(jnp.add, residual.device["error"], self._vectors(grads))
        own, sums = self._sent(wanted)
        return self._tree(sums, grads), Residual(device={"error": _map(jnp.subtract, wanted, own)})


@dataclasses.dataclass(frozen=True)
class TopK(EF14):
    """Sends the values of the largest magnitude and their indices, and accumulates the other values.

    Each device selects from its gradient plus the values that it has not sent yet (EF14). To every
    other device, it sends 8 bytes for each selected value. The options are `ratio` and `layerwise`,
    see `Compressed`.

    Source: Stich et al., Sparsified SGD with Memory, arXiv:1809.07599.
    """

    compressor: str = dataclasses.field(default="topk", init=False)
    whole_start: bool = dataclasses.field(default=False, init=False)


@dataclasses.dataclass(frozen=True)
class EF21(Compressed):
    """Sends the compressed difference between a device's gradient and an estimate of this gradient.

    Attributes:
      momentum: coefficient of a moving average of the device's gradient; the estimate then follows
        this average (EF21-SGDM). 0: the estimate follows the gradient.
      plus: True (EF21+): if C(g_i) is nearer to the gradient than EF21's new estimate, the device
        sends C(g_i) in place of the difference, and C(g_i) becomes the estimate. Every device stores
        the estimates of all devices, `num_devices` times the size of the gradient, and a run cannot
        resume on a different number of devices.

    Sources: Richtarik et al., EF21, arXiv:2106.05203; Fatkhullin et al., Momentum Provably Improves
    Error Feedback!, arXiv:2305.15155.
    """

    momentum: float = 0.0
    plus: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum(self.momentum)
        if self.plus and self.momentum:
            raise ArgumentError("momentum", self.momentum, "is invalid with plus=True", "use 0")

    def init(self, params: Params) -> Residual:
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

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
        vectors, device, whole = self._vectors(grads), {}, {}
        if self.plus:
            return self._nearer(grads, vectors, residual)
        if self.momentum:
            # The first average is the first gradient.
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

    def _nearer(self, grads: PyTree, vectors: Vectors, residual: Residual) -> tuple[Any, Residual]:
        """Applies EF21+, see `plus`; a device's new estimate is the candidate nearer to its gradient."""
        if not vectors:
            return grads, residual
        compressor = make_compressor(self.compressor, self.ratio)
        table = residual.whole["estimates"]
        index = lax.axis_index(self.axes)
        estimate = _map(lambda rows: rows[index], table)
        direct = [compressor.compress(g) for g in vectors]
        moved = [compressor.compress(g - h) for g, h in zip(vectors, estimate, strict=True)]
        distance_direct = _distance([compressor.decompress(m) for m in direct], vectors)
        steps = [compressor.decompress(m) for m in moved]
        distance_moved = _distance(_map(jnp.add, estimate, steps), vectors)
        is_moved = distance_moved <= distance_direct
        messages = [
            jax.tree.map(lambda a, b: jnp.where(is_moved, a, b), one, other)
            for one, other in zip(moved, direct, strict=True)
        ]
        every = compressor.each(messages, self.axes)
        moved_by_device = lax.all_gather(is_moved, self.axes).reshape(-1, 1)
        table = _map(lambda rows, sent: jnp.where(moved_by_device, rows, 0) + sent, table, every)
        sums = _map(lambda rows: rows.sum(axis=0), table)
        return self._tree(sums, grads), Residual(whole={"estimates": table})


@dataclasses.dataclass(frozen=True)
class EControl(Compressed):
    """EF21 that adds a fraction of the error to the difference before compression.

    Attributes:
      eta: the fraction of the error that is added before compression; 0: the results are EF21's.

    Source: Gao, Islamov, Stich, EControl, ICLR 2024, arXiv:2311.05645.
    """

    eta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("eta", self.eta, not self.eta < 0, "at least 0")

    def init(self, params: Params) -> Residual:
        zeros = self._zeros(params)
        return Residual(device={"error": zeros, "estimate": zeros}, whole={"estimate": zeros})

    def reduce(self, grads: PyTree, residual: Residual) -> tuple[Any, Residual]:
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
    """Returns the l2 norm of the difference of two lists of vectors."""
    return norms.l2(_map(jnp.subtract, found, vectors))

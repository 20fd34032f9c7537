"""An exchange over 8 simulated devices, outside of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.parallel.exchange import Exchange, Residual
from tests.parallel.wire import wire_bytes
from tests.quick import jit

AXES = ("data",)
DEVICES = 8
Arrays = Mapping[str, np.ndarray]


def gradients(
    shapes: Mapping[str, tuple[int, ...]], updates: int, devices: int = DEVICES, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Each device's share of the gradient, (devices, *shape), of each update."""
    rng = np.random.default_rng(seed)
    return [
        {n: rng.normal(size=(devices, *s)).astype(np.float32) for n, s in shapes.items()}
        for _ in range(updates)
    ]


def start(exchange: Exchange, params: Any) -> Residual:
    """The residuals of all devices, with a leading axis."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (exchange.num_devices, *leaf.shape)),
        exchange.init(params),
    )


def run(
    exchange: Exchange, every: Sequence[Arrays], residual: Residual | None = None
) -> tuple[list[dict[str, np.ndarray]], list[Residual]]:
    """Returns the sums and the devices' residuals of each update; asserts that sums agree."""
    if residual is None:
        residual = start(exchange, {n: jnp.zeros(g.shape[1:]) for n, g in every[0].items()})
    programs: dict[Exchange, Any] = {}
    sums, residuals = [], []
    for update, grads in enumerate(every):
        now = exchange.at(update)
        if now not in programs:
            programs[now] = jit(jax.vmap(now.reduce, axis_name=AXES[0]))
        found, residual = programs[now](grads, residual)
        for leaf in jax.tree.leaves((found, residual.whole)):
            assert np.array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape), equal_nan=True)
        sums.append({name: np.asarray(leaf[0]) for name, leaf in found.items()})
        residuals.append(residual)
    return sums, residuals


def sent(exchange: Exchange, params: Any) -> dict[str, int]:
    """Bytes that one of 8 devices sends for an update in a compiled program, by dtype."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), AXES)
    each, whole = PartitionSpec(AXES), PartitionSpec()
    residual = jax.eval_shape(exchange.init, params)
    grads = jax.eval_shape(lambda: jax.tree.map(jnp.zeros_like, params))
    specs = Residual(
        *(
            jax.tree.map(lambda _, spec=spec: spec, tree)
            for tree, spec in zip(residual, (each, each, whole), strict=True)
        )
    )

    def lead(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((DEVICES, *x.shape), x.dtype), tree)

    def reduce(grads: Any, residual: Residual) -> Any:
        own = Residual(*jax.tree.map(lambda x: x[0], tuple(residual[:2])), residual.whole)
        found, own = exchange.reduce(jax.tree.map(lambda x: x[0], grads), own)
        return found, Residual(*jax.tree.map(lambda x: x[None], tuple(own[:2])), own.whole)

    mapped = jax.shard_map(
        reduce, mesh=mesh, in_specs=(each, specs), out_specs=(whole, specs), check_vma=False
    )
    shapes = Residual(lead(residual.device), lead(residual.split), residual.whole)
    return wire_bytes(jit(mapped).lower(lead(grads), shapes).compile())


def reshared(residual: Residual, devices: int) -> Residual:
    """The residuals on another number of devices: equal shares of the sum, as a resumed run's."""

    def shares(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf.sum(0) / devices, (devices, *leaf.shape[1:]))

    return Residual(
        device=jax.tree.map(shares, residual.device),
        whole=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[0], (devices, *leaf.shape[1:])), residual.whole
        ),
    )

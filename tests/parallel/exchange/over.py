"""Runs an exchange over 8 simulated devices, outside of a step."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from lamb_tpu.parallel.exchange import Exchange, Residual
from tests.parallel.wire import wire_bytes

AXES = ("data",)
DEVICES = 8
Arrays = Mapping[str, np.ndarray]


def gradients(
    shapes: Mapping[str, tuple[int, ...]], updates: int, devices: int = DEVICES, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Returns each device's share of the gradient, (devices, *shape), for each update."""
    rng = np.random.default_rng(seed)
    return [
        {n: rng.normal(size=(devices, *s)).astype(np.float32) for n, s in shapes.items()}
        for _ in range(updates)
    ]


def start(exchange: Exchange, params: Any) -> Residual:
    """Returns the residuals of all devices, with a leading axis of devices."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (exchange.num_devices, *leaf.shape)),
        exchange.init(params),
    )


def run(
    exchange: Exchange, every: Sequence[Arrays], residual: Residual | None = None
) -> tuple[list[dict[str, np.ndarray]], list[Residual]]:
    """Returns the sums and all devices' residuals after each update; asserts that devices agree."""
    if residual is None:
        residual = start(exchange, {n: jnp.zeros(g.shape[1:]) for n, g in every[0].items()})
    programs: dict[Exchange, Any] = {}
    sums, residuals = [], []
    for update, grads in enumerate(every):
        now = exchange.at(update)
        if now not in programs:
            programs[now] = jax.jit(jax.vmap(now.reduce, axis_name=AXES[0]))
        actual, residual = programs[now](grads, residual)
        for leaf in jax.tree.leaves((actual, residual.whole)):
            assert np.array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape), equal_nan=True)
        sums.append({name: np.asarray(leaf[0]) for name, leaf in actual.items()})
        residuals.append(residual)
    return sums, residuals


def program(exchange: Exchange, mesh: Mesh, params: Any) -> str:
    """Returns the text of a compiled program that sums gradients over the devices of a mesh.

    All devices get the same residual, which does not change how many bytes are sent.
    """
    residual, every = jax.eval_shape(exchange.init, params), PartitionSpec()
    mapped = jax.shard_map(
        exchange.reduce, mesh=mesh, in_specs=every, out_specs=every, check_vma=False
    )
    return jax.jit(mapped).lower(params, residual).compile().as_text()


def sent(exchange: Exchange, params: Any) -> dict[str, int]:
    """Returns the bytes that one of 8 devices sends per update in a compiled program, by dtype."""
    return wire_bytes(program(exchange, Mesh(np.array(jax.devices()[:DEVICES]), AXES), params))


def reshared(residual: Residual, devices: int) -> Residual:
    """Redistributes residuals to `devices` devices, in equal shares, as a resumed run does."""

    def shares(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf.sum(0) / devices, (devices, *leaf.shape[1:]))

    return Residual(
        device=jax.tree.map(shares, residual.device),
        whole=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[0], (devices, *leaf.shape[1:])), residual.whole
        ),
    )

"""One program for the updates of several training runs, each with a separate state and batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lamb_tpu.parallel.state import TrainState
from lamb_tpu.tasks import Sums
from lamb_tpu.types import Batch, PyTree


def is_batched(mesh: Mesh) -> bool:
    """Returns whether runs on the devices of a mesh are batched by `jax.vmap`.

    On an accelerator they are batched: a single run would leave the device mostly idle, and with
    `jax.vmap` one operation serves all runs. On a CPU the program computes one run after the other:
    under `jax.vmap`, convolutions with separate weights for each run would become grouped
    convolutions, which XLA computes slowly on a CPU (`experiments.bench.train_loop` has the times).
    """
    return mesh.devices.flat[0].platform != "cpu"


def side_by_side(
    update: Callable[..., tuple[TrainState, Sums]], batched: bool
) -> Callable[..., tuple[tuple[TrainState, ...], tuple[Sums, ...]]]:
    """Returns `(states, batches, *held) -> (states, sums)`; each tuple but `held` has an item per run.

    `update` is the function `(state, batch, *held) -> (state, sums)` for one run. All runs share
    `held`, the arrays of a data set on the devices. `batched` is the result of `is_batched`.
    """

    def updates(
        states: tuple[TrainState, ...], batches: tuple[Batch, ...], *held: Batch
    ) -> tuple[tuple[TrainState, ...], tuple[Sums, ...]]:
        if not batched:
            results = [update(state, batch, *held) for state, batch in zip(states, batches)]
            return tuple(state for state, _ in results), tuple(sums for _, sums in results)
        axes = (0, 0, *(None for _ in held))
        several = jax.vmap(update, in_axes=axes)(_stack(states), _stack(batches), *held)
        new, sums = (_unstack(tree, len(states)) for tree in several)
        return new, sums

    return updates


def _stack(trees: tuple[Any, ...]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _unstack(tree: PyTree, count: int) -> tuple[Any, ...]:
    return tuple(jax.tree.map(lambda leaf: leaf[run], tree) for run in range(count))

"""Shared code of the update benchmarks: BERT's parameters, the compiled update, and targets."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

STACKED = [("^layers/", {"layer_axes": (0,)}), ("", {})]


class Target(NamedTuple):
    """A target for one row of a table."""

    row: str
    quantity: str
    limit: float
    reached: float
    digits: int  # decimals of `limit` and `reached`
    obstacle: str  # known reason, printed if the row misses the target


def bert_shapes(num_layers: int, width: int, stacked: bool) -> dict:
    """Returns the shapes of BERT's parameters; if `stacked`, the layers' shapes have a leading layer axis.

    BERT-Large has 24 layers of width 1,024: 336 M parameters in 398 leaves, or in 30 if stacked.
    """
    hidden, vocabulary = 4 * width, 30_522

    def dense(rows, columns):
        return {"kernel": (rows, columns), "bias": (columns,)}

    norm = {"scale": (width,), "bias": (width,)}
    layer = {
        **{name: dense(width, width) for name in ("query", "key", "value", "output")},
        "up": dense(width, hidden),
        "down": dense(hidden, width),
        "attention_norm": norm,
        "norm": norm,
    }
    layers = {str(i): layer for i in range(num_layers)}
    if stacked:
        layers = jax.tree.map(lambda shape: (num_layers, *shape), layer, is_leaf=_is_shape)
    return {
        "word": (vocabulary, width),
        "position": (512, width),
        "type": (2, width),
        "embedding_norm": norm,
        "layers": layers,
        "pooler": dense(width, width),
        "masked_lm": {"dense": dense(width, width), "norm": norm, "bias": (vocabulary,)},
        "next_sentence": dense(width, 2),
    }


def leaf_shapes(num_layers: int, width: int, stacked: bool = False) -> list[tuple[int, ...]]:
    """Returns the shapes of all leaves."""
    return jax.tree.leaves(bert_shapes(num_layers, width, stacked), is_leaf=_is_shape)


def num_values(num_layers: int, width: int) -> int:
    """Returns the number of parameters."""
    return sum(math.prod(shape) for shape in leaf_shapes(num_layers, width))


def compile_update(
    tx: optax.GradientTransformation,
    num_layers: int,
    width: int,
    stacked: bool,
    device: jax.Device | None = None,
) -> Any:
    """Compiles `(params, state, grads) -> (params, state)` in float32; donates `params` and `state`.

    Like a training step, the program calls `tx.update`, then `optax.apply_updates`.
    """

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
        bert_shapes(num_layers, width, stacked),
        is_leaf=_is_shape,
    )
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(tx.init, params),
    )
    return jax.jit(update, donate_argnums=(0, 1)).lower(params, state, params).compile()


def target_table(targets: Sequence[Target]) -> str:
    """Returns the targets as Markdown, with the obstacle of each missed target."""
    lines = ["| target | at most | reached | result |", "|---|---|---|---|"]
    for target in targets:
        limit, reached = (f"{value:.{target.digits}f}" for value in (target.limit, target.reached))
        # Compare the printed, rounded numbers: 13.454 meets a limit of 13.45.
        verdict = "met" if float(reached) <= float(limit) else f"missed: {target.obstacle}"
        lines.append(f"| {target.row}: {target.quantity} | {limit} | {reached} | {verdict} |")
    return "\n".join(lines) + "\n"


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)

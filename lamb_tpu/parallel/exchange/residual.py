"""Component of the train state that holds the residual of an exchange."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.components import RESIDUAL, StateComponent, Update
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.sharded import ShardedExchange
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.types import Params, PyTree


@dataclasses.dataclass(frozen=True)
class ResidualComponent(StateComponent):
    """Component of the train state that holds the residual of an exchange.

    The component's value is a dict with two entries. `kept` has the residuals of all devices, see
    `ShardedExchange.init`. `devices`, int32 (2,), has the number of devices over which the exchange
    sums, and the size of the inner axis.

    If a run resumes on a different number of devices, the residual is redistributed: each device gets
    an equal share of the sum of the `device` leaves, and the vectors of `split` are cut again.
    Microbatches do not affect the residual, because they are added up before the exchange. For a
    skipped update see `Exchange.skipped`.
    """

    exchange: ShardedExchange
    params: Params  # shapes and dtypes of the parameters
    name: str = RESIDUAL

    def init(self, params: Params, model_state: PyTree) -> dict[str, Any]:
        devices = jnp.asarray(self.exchange.sizes, jnp.int32)
        return {"devices": devices, "kept": self.exchange.init(params)}

    def shardings(self, value: dict[str, Any], layout: Layout) -> dict[str, Any]:
        kept = jax.tree.map(
            lambda spec: NamedSharding(layout.mesh, spec), self.exchange.specs(value["kept"])
        )
        return {"devices": mesh_lib.replicated(layout.mesh), "kept": kept}

    def updated(self, value: dict[str, Any], update: Update) -> dict[str, Any]:
        return {**value, "kept": update.residual}

    def skipped(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        kept = self.exchange.exchange.skipped(before["kept"], after["kept"])
        return {**before, "kept": kept}

    def copied(self, value: dict[str, Any]) -> Any:
        # Only the leaves of `whole` are equal on all devices.
        return value["kept"].whole

    def saved(self, value: dict[str, Any], shapes: Any) -> dict[str, Any]:
        mesh = self.exchange.layout.mesh

        def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = _at(shapes, path).shape
            if shape == leaf.shape:
                return leaf
            # The leaf was saved on a different number of devices. Split it if the sizes allow it,
            # otherwise replicate it.
            sharding = leaf.sharding
            if shape[1:] != leaf.shape[1:] or shape[0] % mesh_lib.num_batch_shards(mesh):
                sharding = mesh_lib.replicated(mesh)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(place, value)

    def moved(self, value: dict[str, Any]) -> str:
        before, now = self._devices(value), self.exchange.sizes
        if before == now:
            return ""
        name = type(self.exchange.exchange).__name__
        return (
            f"the checkpoint has a residual of {name} for {before[0]} devices, and this run exchanges "
            f"gradients between {now[0]}: each device gets an equal share of the residual's sum"
        )

    def resumed(self, value: dict[str, Any]) -> dict[str, Any]:
        before, now = self._devices(value), self.exchange.sizes
        if before == now:
            return value
        if before[1] != now[1]:
            raise UserError(
                "config.mesh.fsdp",
                now[1],
                f"differs from the {before[1]} devices over which the checkpoint's residual is split",
                f"use {before[1]}, and change only config.mesh.data",
            )
        wanted = jax.eval_shape(self.exchange.init, self.params).whole
        shapes = [[*map(jnp.shape, jax.tree.leaves(x))] for x in (value["kept"].whole, wanted)]
        if shapes[0] != shapes[1]:
            raise UserError(
                "the number of devices",
                now[0],
                f"differs from {before[0]} in the checkpoint, and the checkpoint's residual of "
                f"{type(self.exchange.exchange).__name__} cannot be redistributed",
                f"resume with {before[0]} devices",
            )
        places = self.shardings(value, self.exchange.layout)
        return jax.jit(lambda value: self._cut(value, *before, now[0]), out_shardings=places)(value)

    def _devices(self, value: dict[str, Any]) -> tuple[int, int]:
        outer, inner = np.asarray(value["devices"])
        return int(outer), int(inner)

    def _cut(self, value: dict[str, Any], before: int, inner: int, now: int) -> dict[str, Any]:
        """Redistributes the residual from `before` to `now` devices."""
        # Shapes for the new devices, which may pad vectors differently.
        wanted = jax.eval_shape(self.exchange.init, self.params)

        def fitted(rows: jax.Array, length: int) -> jax.Array:
            """Cuts or pads rows to a length; a cut removes only padding."""
            return jnp.pad(rows[:, :length], ((0, 0), (0, max(0, length - rows.shape[1]))))

        def shared(leaf: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
            parts = leaf.reshape(before, inner, -1, *leaf.shape[1:])
            total = jnp.sum(parts, axis=0, dtype=leaf.dtype)
            if leaf.ndim == 1:
                total = fitted(total, new.shape[0] // (now * inner))
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                each = jnp.broadcast_to(total / now, (now, *total.shape))
            else:  # integers cannot be divided, so the first device gets the sum
                each = jnp.zeros((now, *total.shape), leaf.dtype).at[0].set(total)
            return each.reshape(new.shape).astype(leaf.dtype)

        def again(leaf: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
            length = new.shape[0] // (now * inner)  # length of a chunk
            long = leaf.reshape(before, inner, -1).swapaxes(0, 1).reshape(inner, -1)
            cut = fitted(long, now * length).reshape(inner, now, length)
            return cut.swapaxes(0, 1).ravel()

        kept: Residual = value["kept"]
        device = jax.tree.map(shared, kept.device, wanted.device)
        split = jax.tree.map(again, kept.split, wanted.split)
        devices = jnp.asarray((now, inner), jnp.int32)
        return {"devices": devices, "kept": Residual(device, split, kept.whole)}


def _at(shapes: Any, path: tuple[Any, ...]) -> Any:
    """Returns the leaf at a path in dicts and lists that stand for a tree of arbitrary containers."""
    for key in path:
        name = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
        if isinstance(shapes, dict) and name not in shapes:
            name = str(name)
        shapes = shapes[name]
    return shapes

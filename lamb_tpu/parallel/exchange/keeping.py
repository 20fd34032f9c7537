"""The residual of an exchange as a part of the state: saved, and resumed on other devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lamb_tpu.errors import UserError
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.exchange.base import Residual
from lamb_tpu.parallel.exchange.placing import Placed
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.parts import RESIDUAL, StatePart, Update


@dataclasses.dataclass(frozen=True)
class Kept(StatePart):
    """Part of the train state: the residual of an exchange.

    Its value has `kept`, the residuals of all devices, see `Placed.init`, and `devices`, int32
    (2,), the number of devices over which the exchange sums, and of the inner axis. A run that is
    resumed on another number of devices keeps the sum of the `device` leaves: each new device gets
    an equal share. The vectors of `split` are cut anew. Microbatches are added up before the
    exchange, so they do not cut it. A skipped update puts it back, see `Exchange.skipped`.

    Attributes:
      exchange: the exchange, between the devices of this run.
      params: shapes and dtypes of the parameters.
    """

    exchange: Placed
    params: Any
    name: str = RESIDUAL

    def init(self, params: Any, model_state: Any) -> dict[str, Any]:
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
        # The others differ between devices.
        return value["kept"].whole

    def saved(self, value: dict[str, Any], shapes: Any) -> dict[str, Any]:
        mesh = self.exchange.layout.mesh

        def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            shape = _at(shapes, path).shape
            if shape == leaf.shape:
                return leaf
            # Of other devices: in parts if these devices divide it, otherwise whole.
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
            f"the checkpoint is of {before[0]} devices between which gradients are exchanged, and "
            f"there are {now[0]} now: each gets an equal share of the sum that {name} has kept"
        )

    def resumed(self, value: dict[str, Any]) -> dict[str, Any]:
        before, now = self._devices(value), self.exchange.sizes
        if before == now:
            return value
        if before[1] != now[1]:
            raise UserError(
                f"the checkpoint's residual of the exchange is of parts over {before[1]} devices "
                f"of an inner axis, and config.mesh has {now[1]}; resume with the "
                "config.mesh.fsdp of that run, and let config.mesh.data change alone"
            )
        wanted = jax.eval_shape(self.exchange.init, self.params).whole
        shapes = [
            [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (value["kept"].whole, wanted)
        ]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"the checkpoint's residual of {type(self.exchange.exchange).__name__} has values "
                f"of each of {before[0]} devices on every device, which are no sum to be shared; "
                "resume with that number of devices"
            )
        places = self.shardings(value, self.exchange.layout)
        return jax.jit(lambda value: self._cut(value, *before, now[0]), out_shardings=places)(value)

    def _devices(self, value: dict[str, Any]) -> tuple[int, int]:
        outer, inner = np.asarray(value["devices"])
        return int(outer), int(inner)

    def _cut(self, value: dict[str, Any], before: int, inner: int, now: int) -> dict[str, Any]:
        """Returns the part for `now` devices instead of `before`."""
        # Of the devices that there are now, which may pad vectors otherwise.
        wanted = jax.eval_shape(self.exchange.init, self.params)

        def fitted(rows: jax.Array, length: int) -> jax.Array:
            """The rows with so many values; what is cut off, or added, is padding."""
            return jnp.pad(rows[:, :length], ((0, 0), (0, max(0, length - rows.shape[1]))))

        def shared(leaf: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
            parts = leaf.reshape(before, inner, -1, *leaf.shape[1:])
            total = jnp.sum(parts, axis=0, dtype=leaf.dtype)
            if leaf.ndim == 1:
                total = fitted(total, new.shape[0] // (now * inner))
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                each = jnp.broadcast_to(total / now, (now, *total.shape))
            else:  # which is not divided: the first device has it all
                each = jnp.zeros((now, *total.shape), leaf.dtype).at[0].set(total)
            return each.reshape(new.shape).astype(leaf.dtype)

        def again(leaf: jax.Array, new: jax.ShapeDtypeStruct) -> jax.Array:
            length = new.shape[0] // (now * inner)  # of a chunk
            long = leaf.reshape(before, inner, -1).swapaxes(0, 1).reshape(inner, -1)
            cut = fitted(long, now * length).reshape(inner, now, length)
            return cut.swapaxes(0, 1).ravel()

        kept: Residual = value["kept"]
        return {
            "devices": jnp.asarray((now, inner), jnp.int32),
            "kept": Residual(
                jax.tree.map(shared, kept.device, wanted.device),
                jax.tree.map(again, kept.split, wanted.split),
                kept.whole,
            ),
        }


def _at(shapes: Any, path: tuple[Any, ...]) -> Any:
    """Returns the leaf at a path in dicts and lists that stand for a tree of any containers."""
    for key in path:
        name = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
        shapes = (
            shapes[name]
            if isinstance(shapes, dict) and name in shapes
            else (shapes[str(name)] if isinstance(shapes, dict) else shapes[name])
        )
    return shapes

"""The train state, its initial value, and the sharding of each of its arrays."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from lamb_tpu.optim import checks, parameters, sharding
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.components import Averages, Skipped, StateComponent
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.tasks import Task
from lamb_tpu.types import Batch, Params, PyTree

# The default components of a state.
PARTS: tuple[StateComponent, ...] = (Averages(), Skipped())
_FIELDS = ("step", "params", "model_state", "opt_state", "key")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that an update takes and returns, and that a checkpoint holds.

    In the pytree, and so in a checkpoint, components are siblings of the other attributes.
    """

    step: jax.Array  # number of completed updates, int32 scalar
    params: Params
    model_state: PyTree  # the model's other collections, such as BatchNorm's running averages
    opt_state: optax.OptState
    key: jax.Array  # typed random key, constant; update t draws from `fold_in(key, t)`
    parts: Mapping[str, Any]  # further components by their names, see `parallel.components`

    @property
    def ema(self) -> tuple[Any, Any] | None:
        """Moving averages of parameters and model state; None in a run without averages."""
        return self.parts["ema"]

    @property
    def skipped(self) -> jax.Array:
        """Number of updates skipped because their gradient was not finite, int32 scalar."""
        return self.parts["skipped"]

    def replace(self, **changes: Any) -> "TrainState":
        """Returns a copy of the state with new values for the given attributes or components."""
        # Names other than those of the fields must be components.
        fields = {name: changes.pop(name) for name in _FIELDS if name in changes}
        if unknown := changes.keys() - self.parts.keys():
            raise TypeError(f"a train state has no {', '.join(sorted(unknown))}")
        return dataclasses.replace(self, parts={**self.parts, **changes}, **fields)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(self.parts)
        # Paths and names in checkpoints are 'params/...' and 'ema/...', not 'parts/ema/...'.
        pairs = [(GetAttrKey(name), getattr(self, name)) for name in _FIELDS]
        return pairs + [(GetAttrKey(name), self.parts[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Sequence[Any]) -> "TrainState":
        step, params, model_state, opt_state, key, *parts = values
        parts_by_name = dict(zip(names, parts, strict=True))
        return cls(step, params, model_state, opt_state, key, parts_by_name)


def make_init(
    task: Task,
    tx: optax.GradientTransformation,
    batch: Batch,
    parts: Sequence[StateComponent] = PARTS,
    prng: str = "threefry2x32",
) -> Callable[..., TrainState]:
    """Returns `init(key, given=None)`, which makes the initial state.

    `given` maps '/'-joined paths, which begin with a field of the state, such as
    'params/dense/kernel', to arrays that replace the initial values. Given parameters and model
    state also determine the initial optimizer state and averages; arrays of the optimizer state may
    be given too.

    Args:
      task, tx: the learning problem, and the optimizer.
      batch: arrays with the shapes and dtypes of a batch.
      parts: further components of the state.
      prng: random generator of the state's key. Initial weights are drawn with the key passed to
        `init`, and with the generator of that key.
    """

    def init(key: jax.Array, given: Mapping[str, jax.Array] | None = None) -> TrainState:
        def filled(field: str, tree: PyTree) -> Any:
            leaves, treedef = jax.tree.flatten(tree)
            paths = [f"{field}/{path}" for path in parameters.leaf_paths(tree)]
            return treedef.unflatten(
                [(given or {}).get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
            )

        init_key, train_key = jax.random.split(key)
        if prng != str(jax.random.key_impl(key)):
            # Keys of two generators are incompatible, so random bits from the given key seed the
            # new key.
            train_key = jax.random.key(jax.random.bits(train_key), impl=prng)
        # Initial weights depend only on the shapes of a batch.
        zeros = {name: jnp.zeros_like(value) for name, value in batch.items()}
        model_state = dict(task.init(init_key, zeros))
        # Fill in given parameters and model state first, because optimizers and averages start from
        # them.
        params = filled("params", model_state.pop("params"))
        model_state = filled("model_state", model_state)
        opt_state = filled("opt_state", tx.init(params))
        zero = jnp.zeros((), jnp.int32)
        components = {part.name: part.init(params, model_state) for part in parts}
        return TrainState(zero, params, model_state, opt_state, train_key, components)

    return init


def state_shardings(
    abstract: TrainState,
    tx: optax.GradientTransformation,
    layout: Layout,
    parts: Sequence[StateComponent] = PARTS,
) -> TrainState:
    """Returns a sharding for every array of a state with the shapes and dtypes of `abstract`."""
    whole = mesh_lib.replicated(layout.mesh)

    def replicated(tree: PyTree) -> Any:
        return jax.tree.map(lambda _: whole, tree)

    leaf: Any = whole  # in this tree, shardings replace arrays
    return TrainState(
        step=leaf,
        params=layout.params,
        model_state=replicated(abstract.model_state),
        opt_state=sharding.state_sharding(tx, abstract.params, layout.moments),
        key=leaf,
        parts={part.name: part.shardings(abstract.parts[part.name], layout) for part in parts},
    )


def check_update(
    tx: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    layout: Layout | None,
) -> None:
    """Traces the optimizer's update, and checks what it returns.

    `layout` is None under jit. Inside shard_map it has the shardings of parameters and moments; the
    optimizer has `axis_name=layout.update_spec`, and raises an error while it is traced if it cannot
    update split tensors.

    Raises:
      ValueError: see `optim.checks.check_result`.
    """

    def update(params: Params, state: Any) -> Any:
        # A trace needs only shapes and dtypes, so the parameters stand in for gradients.
        result = tx.update(params, state, params)
        checks.check_result(result, params, state)
        return result

    if layout is None:
        jax.eval_shape(update, params, opt_state)
        return
    parts = jax.tree.map(lambda sharding: sharding.spec, layout.moments)
    specs = sharding.state_sharding(tx, params, parts)
    mapped = jax.shard_map(
        update, mesh=layout.mesh, in_specs=(parts, specs), out_specs=(parts, specs), check_vma=False
    )
    jax.eval_shape(mapped, params, opt_state)


def saved(
    abstract: TrainState, shapes: Mapping[str, Any], parts: Sequence[StateComponent] = PARTS
) -> TrainState:
    """Returns shapes, dtypes and shardings with which to read a checkpoint on these devices.

    `abstract` has the shapes, dtypes and shardings of this run. `shapes` has the shapes of the
    checkpoint's fields, as dicts and lists of `jax.ShapeDtypeStruct`s.
    """
    changes = {
        part.name: part.saved(abstract.parts[part.name], shapes.get(part.name)) for part in parts
    }
    return abstract.replace(**changes)


def resumed(state: TrainState, parts: Sequence[StateComponent] = PARTS) -> TrainState:
    """Returns a checkpoint's state with each component as this run's devices need it."""
    return state.replace(**{part.name: part.resumed(state.parts[part.name]) for part in parts})


def with_shardings(abstract: PyTree, shardings: PyTree) -> Any:
    """Returns the `jax.ShapeDtypeStruct`s of `abstract` with the given shardings."""

    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        shardings,
    )

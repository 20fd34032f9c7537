"""The train state, its initial value, and the sharding of each of its arrays."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.tree_util import GetAttrKey

from lamb_tpu.optim import checks, parameters, sharding
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.parallel.parts import Averages, Skipped, StatePart
from lamb_tpu.tasks import Task

# The default parts of a state.
PARTS: tuple[StatePart, ...] = (Averages(), Skipped())
_FIELDS = ("step", "params", "model_state", "opt_state", "key")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update changes; a checkpoint holds all of it.

    Each part is an attribute too: `state.ema` is `state.parts['ema']`. In the pytree, and so in a
    checkpoint, parts are siblings of the other attributes.

    Attributes:
      step: number of completed updates, int32 scalar.
      params: the model's parameters.
      model_state: its other collections, such as BatchNorm's running averages.
      opt_state: the optimizer's state.
      key: typed random key, constant; update t draws from `fold_in(key, t)`.
      parts: further parts by their names, see `parallel.parts`.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    key: jax.Array
    parts: Mapping[str, Any]

    @property
    def ema(self) -> tuple[Any, Any] | None:
        """Moving averages of parameters and model state; None in a run without averages."""
        return self.parts["ema"]

    @property
    def skipped(self) -> jax.Array:
        """Number of updates skipped because their gradient was not finite, int32 scalar."""
        return self.parts["skipped"]

    def replace(self, **changes: Any) -> "TrainState":
        """Returns the state with other attributes or parts."""
        # What is no field must be a part.
        own = {name: changes.pop(name) for name in _FIELDS if name in changes}
        if strangers := changes.keys() - self.parts.keys():
            raise TypeError(f"a train state has no {', '.join(sorted(strangers))}")
        return dataclasses.replace(self, parts={**self.parts, **changes}, **own)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(self.parts)
        # Keys as of attributes: paths, and names in checkpoints, are 'params/...' and 'ema/...',
        # not 'parts/ema/...'.
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
    batch: Mapping[str, Any],
    parts: Sequence[StatePart] = PARTS,
    prng: str = "threefry2x32",
) -> Callable[..., TrainState]:
    """Returns `init(key, given=None)`, which makes the initial state.

    `given` replaces random values: arrays by the '/'-joined path from a field of the state, such as
    'params/dense/kernel'. Given parameters and model state also determine the initial optimizer
    state and averages; arrays of the optimizer state may be given too.

    Args:
      task: the learning problem.
      tx: the optimizer.
      batch: arrays with the shapes and dtypes of a batch.
      parts: further parts of the state.
      prng: generator of the key in the state. Initial weights are drawn from `init`'s own key.
    """

    def init(key: jax.Array, given: Mapping[str, jax.Array] | None = None) -> TrainState:
        def filled(field: str, tree: Any) -> Any:
            leaves, treedef = jax.tree.flatten(tree)
            paths = [f"{field}/{path}" for path in parameters.leaf_paths(tree)]
            return treedef.unflatten(
                [(given or {}).get(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
            )

        init_key, train_key = jax.random.split(key)
        if prng != str(jax.random.key_impl(key)):
            # A key of one generator is no key of another; its bits are a seed of one.
            train_key = jax.random.key(jax.random.bits(train_key), impl=prng)
        # Initial weights depend on the shapes of a batch and not on its values.
        zeros = {name: jnp.zeros_like(value) for name, value in batch.items()}
        model_state = dict(task.init(init_key, zeros))
        # Filled in first: optimizers and averages start from the parameters, also from given ones.
        params = filled("params", model_state.pop("params"))
        model_state = filled("model_state", model_state)
        opt_state = filled("opt_state", tx.init(params))
        zero = jnp.zeros((), jnp.int32)
        begun = {part.name: part.init(params, model_state) for part in parts}
        return TrainState(zero, params, model_state, opt_state, train_key, begun)

    return init


def state_shardings(
    abstract: TrainState,
    tx: optax.GradientTransformation,
    layout: Layout,
    parts: Sequence[StatePart] = PARTS,
) -> TrainState:
    """Returns a sharding for every array of the state.

    Args:
      abstract: the state, or its shapes and dtypes.
      tx: the optimizer.
      layout: the shardings of parameters and moments.
      parts: further parts of the state.
    """
    whole = mesh_lib.replicated(layout.mesh)

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda _: whole, tree)

    leaf: Any = whole  # shardings stand where the state has its arrays
    return TrainState(
        step=leaf,
        params=layout.params,
        model_state=everywhere(abstract.model_state),
        opt_state=sharding.state_sharding(tx, abstract.params, layout.moments),
        key=leaf,
        parts={part.name: part.shardings(abstract.parts[part.name], layout) for part in parts},
    )


def check_update(
    tx: optax.GradientTransformation, params: Any, opt_state: optax.OptState, layout: Layout | None
) -> None:
    """Traces the optimizer, and checks what its update returns.

    Inside shard_map it also raises if it cannot update split tensors.

    Args:
      tx: the optimizer, with `axis_name=layout.update_spec`.
      params: the parameters' shapes and dtypes.
      opt_state: the optimizer state's shapes and dtypes.
      layout: the shardings of parameters and moments inside shard_map; None: under jit.

    Raises:
      ValueError: see `optim.checks.check_result`.
    """

    def update(params: Any, state: Any) -> Any:
        # Gradients have the shapes of parameters; nothing else of them matters to a trace.
        found = tx.update(params, state, params)
        checks.check_result(found, params, state)
        return found

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
    abstract: TrainState, shapes: Mapping[str, Any], parts: Sequence[StatePart] = PARTS
) -> TrainState:
    """Returns shapes, dtypes and shardings in which to read a checkpoint for these devices.

    Args:
      abstract: those of this run.
      shapes: of the checkpoint's fields, as dicts and lists of `jax.ShapeDtypeStruct`s.
      parts: further parts of the state.
    """
    return abstract.replace(
        **{
            part.name: part.saved(abstract.parts[part.name], shapes.get(part.name))
            for part in parts
        }
    )


def resumed(state: TrainState, parts: Sequence[StatePart] = PARTS) -> TrainState:
    """Returns the state of a checkpoint with each part as this run's devices need it."""
    return state.replace(**{part.name: part.resumed(state.parts[part.name]) for part in parts})


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Returns `jax.ShapeDtypeStruct`s with the shardings filled in."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract, shardings)

"""The train state, its initial value, and the sharding of each of its arrays."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.optim import parameters, sharding
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.tasks import Task


@flax.struct.dataclass
class TrainState:
    """Everything that an update changes; a checkpoint holds all of it.

    Attributes:
      step: number of completed updates, int32 scalar.
      params: the model's parameters.
      model_state: its other collections, such as BatchNorm's running averages.
      opt_state: the optimizer's state.
      key: typed random key, constant; update t draws from `fold_in(key, t)`.
      ema: moving averages of parameters and model state, as a pair, in float32 at least; None in a
        run without averages.
      skipped: number of updates skipped because their gradient was not finite, int32 scalar.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: optax.OptState
    key: jax.Array
    ema: tuple[Any, Any] | None
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings of the parameters and of the state that belongs to each parameter.

    Attributes:
      mesh: the mesh over all devices.
      params: a `NamedSharding` for every parameter.
      moments: a `NamedSharding` for every parameter's moments and moving average; under ZeRO-1
        they are split further than the parameter itself.
    """

    mesh: Mesh
    params: Any
    moments: Any
    _specs: dict[str, PartitionSpec | None] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def axis_name(self, path: str) -> str | None:
        """The mesh axis over which the update of the parameter at a '/'-joined path is split."""
        return None if self._specs[path] is None else mesh_lib.state_axis(self.mesh)

    def update_spec(self, path: str) -> PartitionSpec | None:
        """The same as a spec, which also says along which axis of the parameter; None if whole."""
        return self._specs[path]

    def __post_init__(self) -> None:
        state = mesh_lib.state_axis(self.mesh)
        specs = {
            path: PartitionSpec(*(entry if entry == state else None for entry in sharding.spec))
            if state in sharding.spec else None
            for path, sharding in zip(
                parameters.leaf_paths(self.moments), jax.tree.leaves(self.moments), strict=True
            )
        }
        object.__setattr__(self, "_specs", specs)


def make_layout(
    params: Any,
    mesh: Mesh,
    facts: Any,
    rules: Sequence[rules_lib.Rule] = (),
    optimizer_state: str = "replicated",
    activation_axes: Sequence[str] = (),
) -> Layout:
    """Returns the layout by the partition rules and the choice for the optimizer's state.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh over all devices.
      facts: the parameters' `ParameterFacts`.
      rules: see `rules.partition_params`.
      optimizer_state: 'replicated' (moments are placed as their parameters) or 'zero1'.
      activation_axes: see `rules.partition_params`.

    Raises:
      UserError: a rule does not fit the parameters or the mesh.
    """
    shardings = rules_lib.partition_params(params, rules, mesh, facts, activation_axes)
    moments = shardings
    if optimizer_state == "zero1":
        moments = rules_lib.zero1(params, shardings, mesh, facts)
    return Layout(mesh, shardings, moments)


def make_init(
    task: Task,
    tx: optax.GradientTransformation,
    batch: Mapping[str, Any],
    average: bool = False,
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
      average: whether to keep a moving average of the weights.
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
            train_key = jax.random.key(jax.random.bits(train_key), impl=prng)
        zeros = {name: jnp.zeros_like(value) for name, value in batch.items()}
        model_state = dict(task.init(init_key, zeros))
        params = filled("params", model_state.pop("params"))
        model_state = filled("model_state", model_state)
        ema = jax.tree.map(_widened, (params, model_state)) if average else None
        opt_state = filled("opt_state", tx.init(params))
        zero = jnp.zeros((), jnp.int32)
        return TrainState(zero, params, model_state, opt_state, train_key, ema, zero)

    return init


def _widened(leaf: jax.Array) -> jax.Array:
    # An average of bfloat16 weights that is kept in bfloat16 never moves at 0.9999.
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def state_shardings(
    abstract: TrainState, tx: optax.GradientTransformation, layout: Layout
) -> TrainState:
    """Returns a sharding for every array of the state.

    Args:
      abstract: the state, or its shapes and dtypes.
      tx: the optimizer.
      layout: the shardings of parameters and moments.
    """
    whole = mesh_lib.replicated(layout.mesh)

    def everywhere(tree: Any) -> Any:
        return jax.tree.map(lambda _: whole, tree)

    ema = None
    if abstract.ema is not None:
        ema = (layout.moments, everywhere(abstract.model_state))
    leaf: Any = whole  # shardings stand where the state has its arrays
    return TrainState(
        step=leaf,
        params=layout.params,
        model_state=everywhere(abstract.model_state),
        opt_state=sharding.state_sharding(tx, abstract.params, layout.moments),
        key=leaf,
        ema=ema,
        skipped=leaf,
    )


def check_update(
    tx: optax.GradientTransformation, params: Any, opt_state: optax.OptState, layout: Layout
) -> None:
    """Traces the optimizer inside shard_map, so that it raises if it cannot update split tensors.

    Args:
      tx: the optimizer, with `axis_name=layout.update_spec`.
      params: the parameters' shapes and dtypes.
      opt_state: the optimizer state's shapes and dtypes.
      layout: the shardings of parameters and moments.
    """
    parts = jax.tree.map(lambda sharding: sharding.spec, layout.moments)
    specs = sharding.state_sharding(tx, params, parts)
    update = jax.shard_map(
        lambda params, state: tx.update(params, state, params),
        mesh=layout.mesh, in_specs=(parts, specs), out_specs=(parts, specs), check_vma=False,
    )
    jax.eval_shape(update, params, opt_state)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Returns `jax.ShapeDtypeStruct`s with the shardings filled in."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract, shardings)

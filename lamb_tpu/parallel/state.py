"""The state that updates turn into each other, and where each of its arrays lives."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from lamb_tpu.optim import parameters, placement
from lamb_tpu.parallel import mesh as mesh_lib
from lamb_tpu.parallel import rules as rules_lib
from lamb_tpu.tasks import Task


@flax.struct.dataclass
class TrainState:
    """What one update turns into the next; all of it is in a checkpoint.

    Attributes:
      step: completed updates, int32 scalar; the one clock of a run.
      params: the model's parameters.
      model_state: its other collections, such as BatchNorm's running averages.
      opt_state: the optimizer's state.
      key: typed random key, constant; update t draws from `fold_in(key, t)`.
      ema: moving averages of parameters and model state, as a pair, in float32 at least; None
        without.
      skipped: updates that were left out because their gradient was not finite, int32 scalar.
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
    """Where parameters and the state that goes with them live.

    Attributes:
      mesh: over all devices.
      params: a `NamedSharding` for every parameter.
      moments: the same for what an optimizer, or the moving average, keeps of it; under ZeRO-1
        split further than the parameter itself.
    """

    mesh: Mesh
    params: Any
    moments: Any
    _split: dict[str, str | None] = dataclasses.field(init=False, repr=False, compare=False)

    def axis_name(self, path: str) -> str | None:
        """The mesh axis over which the update of the parameter at a '/'-joined path is split."""
        return self._split[path]

    def __post_init__(self) -> None:
        state = mesh_lib.state_axis(self.mesh)
        split = {
            path: state if state in sharding.spec else None
            for path, sharding in zip(
                parameters.leaf_paths(self.moments), jax.tree.leaves(self.moments), strict=True
            )
        }
        object.__setattr__(self, "_split", split)


def make_layout(
    params: Any,
    mesh: Mesh,
    facts: Any,
    rules: Sequence[rules_lib.Rule] = (),
    optimizer_state: str = "replicated",
    activation_axes: Sequence[str] = (),
) -> Layout:
    """The layout that the partition rules and the choice for the optimizer's state give.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      mesh: over all devices.
      facts: the parameters' `ParameterFacts`.
      rules: see `rules.partition_params`.
      optimizer_state: 'replicated' (as the parameters are) or 'zero1'.
      activation_axes: see `rules.partition_params`.

    Raises:
      UserError: a rule that does not fit.
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
    """A function of a random key, and of values in place of drawn ones, to the first state.

    The values are arrays by the '/'-joined path from a field of the state: parameters and model
    state, of which the optimizer's state and the averages are made, and the optimizer's state.

    Args:
      task: the learning problem.
      tx: the optimizer.
      batch: arrays in whose shapes and dtypes batches come.
      average: keep a moving average of the weights.
      prng: generator of the state's key; what is drawn here comes from the key that is given.
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
    """A sharding for every array of the state.

    Args:
      abstract: the state, or its shapes and dtypes.
      tx: the optimizer.
      layout: of the parameters.
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
        opt_state=placement.partition(tx, abstract.params, layout.moments),
        key=leaf,
        ema=ema,
        skipped=leaf,
    )


def check_update(
    tx: optax.GradientTransformation, params: Any, opt_state: optax.OptState, layout: Layout
) -> None:
    """Raises what the optimizer raises inside shard_map where it cannot work on parts of a tensor.

    Args:
      tx: the optimizer, with `axis_name=layout.axis_name`.
      params: the parameters' shapes and dtypes.
      opt_state: the same of the optimizer's state.
      layout: of the parameters.
    """
    parts = jax.tree.map(lambda sharding: sharding.spec, layout.moments)
    specs = placement.partition(tx, params, parts)
    update = jax.shard_map(
        lambda params, state: tx.update(params, state, params),
        mesh=layout.mesh, in_specs=(parts, specs), out_specs=(parts, specs), check_vma=False,
    )
    jax.eval_shape(update, params, opt_state)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """The shapes and dtypes of a tree together with its shardings."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, abstract, shardings)

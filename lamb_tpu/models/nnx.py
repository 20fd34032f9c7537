"""Networks written in Flax NNX as `init` and `apply`, for `lamb_tpu.models.Model`."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from flax import nnx

from lamb_tpu.models.dropout import positions_of

Apply = Callable[..., tuple[Any, Mapping[str, Any]]]


def functions(
    make: Callable[..., nnx.Module],
) -> tuple[Callable[[jax.Array, Any], Mapping[str, Any]], Apply]:
    """Functions `init` and `apply` of a module that is called with the inputs alone.

    Its parameters are the leaves of `nnx.Param`. Other variables, such as averages of
    `nnx.BatchNorm`, are in the collection 'state'; those that only a call makes (`sow`) are left
    out. Whether it trains is told by `module.train()` and `module.eval()`. Random streams start
    anew at every call, from the key of the update and the place of the first row in the batch, so
    that devices and microbatches draw different masks.

    Args:
      make: makes the module; takes `rngs`.

    Raises:
      TypeError: `make` makes something else.
    """
    # Traced for its structure and shapes only; no parameter is allocated.
    module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise TypeError(f"what takes rngs must make an nnx.Module, not {module!r}")
    # Parameters, random streams and all other variables, in this order.
    graph, *shapes = nnx.split(module, nnx.Param, nnx.RngState, ...)
    # A call may add variables. The state keeps the structure that it has at the start, which
    # checkpoints and compiled steps rely on.
    kept = _flat(shapes[2])

    def variables_of(module: nnx.Module) -> dict[str, Any]:
        parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
        _, params, _, state = parts
        found = _flat(state)
        collections = {"state": _nested({path: found[path] for path in kept})} if kept else {}
        return {"params": _nested(_flat(params)), **collections}

    def init(key: jax.Array, inputs: Any) -> Mapping[str, Any]:
        del inputs  # an NNX module knows its shapes
        return variables_of(make(rngs=nnx.Rngs(key)))

    def apply(
        variables: Mapping[str, Any], inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        # Evaluation draws nothing, but the module cannot be merged without keys in its streams.
        if key is None:
            key = jax.random.key(0)
        else:
            rows = len(jax.tree.leaves(inputs)[0])
            # NNX's dropout draws one mask for the rows that it sees. Without the position every
            # device and microbatch would draw the same.
            key = jax.random.fold_in(key, positions_of(rows)[0])
        module = nnx.merge(
            graph,
            _filled(shapes[0], variables["params"]),
            _seeded(shapes[1], key),
            _filled(shapes[2], variables.get("state", {})),
        )
        module.train() if train else module.eval()
        outputs = module(inputs)
        state = variables_of(module) if train else dict(variables)
        return outputs, {name: state[name] for name in state if name == "state"}

    return init, apply


def _paths(state: Any) -> list[str]:
    paths = []
    for keys, _ in jax.tree_util.tree_flatten_with_path(state)[0]:
        if isinstance(keys[-1], jax.tree_util.GetAttrKey):  # the value of a variable
            keys = keys[:-1]
        paths.append(jax.tree_util.keystr(keys, simple=True, separator="/"))
    return paths


def _flat(state: Any) -> dict[str, Any]:
    """Arrays of an NNX state by their '/'-joined paths."""
    return dict(zip(_paths(state), jax.tree.leaves(state), strict=True))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    return flax.traverse_util.unflatten_dict(dict(flat), sep="/")


def _filled(shapes: Any, values: Mapping[str, Any]) -> Any:
    """An NNX state with the arrays of nested dicts."""
    flat = flax.traverse_util.flatten_dict(dict(values), sep="/")
    return jax.tree.structure(shapes).unflatten([flat[path] for path in _paths(shapes)])


def _seeded(shapes: Any, key: jax.Array) -> Any:
    """Random streams at their start, each with a key of its own."""

    def start(number: int, leaf: Any) -> jax.Array:
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)  # a count
        # `number` tells the streams apart.
        own = jax.random.fold_in(key, number)
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    leaves, structure = jax.tree.flatten(shapes)
    return structure.unflatten([start(number, leaf) for number, leaf in enumerate(leaves)])

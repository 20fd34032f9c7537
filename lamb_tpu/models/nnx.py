"""Adapts Flax NNX modules to the functions `init` and `apply` of `lamb_tpu.models.Model`."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from flax import nnx

from lamb_tpu.models.dropout import positions_of

Apply = Callable[..., tuple[Any, Mapping[str, Any]]]


def functions(make: Callable[..., nnx.Module]) -> tuple[Callable[..., Mapping[str, Any]], Apply]:
    """Returns `init` and `apply` for the module that `make(rngs=...)` builds.

    The module is called with only the inputs. The parameters are the leaves of `nnx.Param`. Other
    variables, such as the averages of `nnx.BatchNorm`, are in the collection 'state', except for
    variables that only a call creates (`sow`). `module.train()` and `module.eval()` switch between
    training and evaluation. Random streams restart at every call, from the key of the update and the
    position of the first row in the batch, so that devices and microbatches draw different masks.

    Raises:
      TypeError: `make` does not return an `nnx.Module`.
    """
    # Only trace for the structure and shapes, without allocating parameters.
    module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"a function with the argument rngs must return an nnx.Module, not {module!r}"
        )
    # Parameters, random streams and all other variables, in this order.
    graph, *shapes = nnx.split(module, nnx.Param, nnx.RngState, ...)
    # A call may add variables, but checkpoints and compiled steps need a fixed structure.
    initial_state = _flat(shapes[2])

    def variables_of(module: nnx.Module) -> dict[str, Any]:
        split: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
        _, params, _, state = split
        variables = {"params": _nested(_flat(params))}
        if initial_state:
            flat = _flat(state)
            variables["state"] = _nested({path: flat[path] for path in initial_state})
        return variables

    def init(key: jax.Array, inputs: Any) -> Mapping[str, Any]:
        del inputs  # an NNX module knows its shapes
        return variables_of(make(rngs=nnx.Rngs(key)))

    def apply(
        variables: Mapping[str, Any], inputs: Any, *, train: bool, key: jax.Array | None = None
    ) -> tuple[Any, Mapping[str, Any]]:
        # Evaluation draws nothing, but merging the module requires keys in its streams.
        if key is None:
            key = jax.random.key(0)
        else:
            rows = len(jax.tree.leaves(inputs)[0])
            # NNX's dropout draws one mask for all rows of a call. Without the position every device
            # and microbatch would draw the same mask.
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
    """Returns the arrays of an NNX state by their '/'-joined paths."""
    return dict(zip(_paths(state), jax.tree.leaves(state), strict=True))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    return flax.traverse_util.unflatten_dict(dict(flat), sep="/")


def _filled(shapes: Any, values: Mapping[str, Any]) -> Any:
    """Returns an NNX state with the structure of `shapes` and the arrays of nested dicts."""
    flat = flax.traverse_util.flatten_dict(dict(values), sep="/")
    return jax.tree.structure(shapes).unflatten([flat[path] for path in _paths(shapes)])


def _seeded(shapes: Any, key: jax.Array) -> Any:
    """Returns restarted random streams with a separate key for each."""

    def start(number: int, leaf: Any) -> jax.Array:
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)  # a count
        stream_key = jax.random.fold_in(key, number)
        return jax.random.split(stream_key, leaf.shape) if leaf.shape else stream_key

    leaves, structure = jax.tree.flatten(shapes)
    return structure.unflatten([start(number, leaf) for number, leaf in enumerate(leaves)])

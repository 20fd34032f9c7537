"""Short runs of a transform for tests to compare: trees that are odd, whole, stacked and split."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

Tree = dict[str, np.ndarray]


def case(steps: int = 5, seed: int = 0) -> tuple[Tree, list[Tree]]:
    """Parameters and gradients in float64.

    'zero' starts at 0, 'still' has no gradient, and 'late' none at the first two updates.
    """
    rng = np.random.default_rng(seed)
    shapes = {
        "kernel": (4, 3),
        "scale": (5,),
        "bias": (3,),
        "zero": (2, 2),
        "still": (3,),
        "late": (6,),
    }
    params = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    params["zero"][:] = 0.0
    grads = [
        {name: 0.5 * rng.standard_normal(shape) for name, shape in shapes.items()}
        for _ in range(steps)
    ]
    for step, grad in enumerate(grads):
        grad["still"][:] = 0.0
        if step < 2:
            grad["late"][:] = 0.0
    return params, grads


def after(tx: optax.GradientTransformation, params: Any, grads: Sequence[Any]) -> tuple[Any, Any]:
    """The parameters after all updates, and the state."""
    params = jax.tree.map(jnp.asarray, params)
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in grads:
        updates, state = update(jax.tree.map(jnp.asarray, grad), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def stacked_and_split(
    build: Callable[..., optax.GradientTransformation], takes_norms: bool = True
) -> None:
    """Asserts that stacked layers equal layers on their own, and a split tensor a whole one.

    The second must fail without the axis' name where norms are taken. `build` takes `rules` and
    `axis_name`. Gradients are in the ratio of 1, 10, 100 and 1000 from layer to layer.
    """
    rng = np.random.default_rng(1)
    lengths = np.array([1.0, 10.0, 100.0, 1000.0])[:, None, None]
    params = {"w": rng.standard_normal((4, 8, 6)), "v": rng.standard_normal((4, 8, 2))}
    grads = [
        {name: lengths * rng.standard_normal(w.shape) for name, w in params.items()}
        for _ in range(3)
    ]
    with jax.enable_x64(True):
        together, _ = after(build(rules=[("", {"layer_axes": (0,)})]), params, grads)
        apart, _ = after(
            build(rules="all"), *(jax.tree.map(list, trees) for trees in (params, grads))
        )
        for name in params:
            np.testing.assert_allclose(
                together[name], np.stack(apart[name]), rtol=1e-11, atol=1e-11
            )

        whole, _ = after(build(rules="all"), params, grads)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec(None, "data")

        def split(axis_name):
            tx = build(rules="all", axis_name=axis_name)
            run = jax.shard_map(
                lambda params, grads: after(tx, params, grads)[0],
                mesh=mesh,
                in_specs=(spec, spec),
                out_specs=spec,
            )
            return jax.jit(run)(params, grads)

        for name, expected in split("data").items():
            np.testing.assert_allclose(expected, whole[name], rtol=1e-11, atol=1e-11)
        assert np.allclose(split(None)["w"], whole["w"], rtol=1e-3) != takes_norms

"""Short runs of a transform on unusual, stacked and split trees, for tests that compare results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

Tree = dict[str, np.ndarray]


def case(steps: int = 5, seed: int = 0) -> tuple[Tree, list[Tree]]:
    """Returns parameters and gradients in float64.

    'zero' starts at 0; gradients of 'still' are 0, and those of 'late' are 0 in the first two updates.
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
    """Returns the parameters after all updates, and the state."""
    params = jax.tree.map(jnp.asarray, params)
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in grads:
        updates, state = update(jax.tree.map(jnp.asarray, grad), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def rate(t: Any) -> Any:
    """Returns the learning rate of an update, for comparisons with a loop in NumPy."""
    return 0.1 / (t + 1)


def equals_a_loop(
    build: Callable[..., optax.GradientTransformation],
    reference: Callable[..., np.ndarray],
    arguments: dict[str, Any],
    changed: str | None = "kernel",
    exempt: Sequence[str] = ("decay", "adapt"),
    rtol: float = 1e-11,
) -> None:
    """Asserts that an optimizer equals a loop in float64, and that `arguments` have an effect.

    `build` takes the rate, rules and the arguments. `reference` takes the weights and gradients of
    one layer, the arguments, `decays` and `adapts`, and returns the weights after all updates.
    If `exempt` has 'decay', the leaf 'bias' does not decay; if it has 'adapt', 'scale' does not adapt.
    """
    params, grads = case()
    leaves = {
        leaf: name for leaf, name in (("bias", "decay"), ("scale", "adapt")) if name in exempt
    }
    rules = [*((leaf, {name: False}) for leaf, name in leaves.items()), ("", {})]
    with jax.enable_x64(True), jax.debug_nans(True):
        actual, _ = after(build(rate, rules=rules, **arguments), params, grads)
    for leaf, weights in params.items():
        flags = {f"{leaves[leaf]}s": False} if leaf in leaves else {}
        expected, plain = (
            reference(weights, [grad[leaf] for grad in grads], **flags, **keywords)
            for keywords in (arguments, {})
        )
        np.testing.assert_allclose(actual[leaf], expected, rtol=rtol, atol=1e-13, err_msg=leaf)
        if leaf == changed:
            assert not np.allclose(expected, plain, rtol=1e-6), "the choice changes nothing"


def stacked_and_split(
    build: Callable[..., optax.GradientTransformation], takes_norms: bool = True
) -> None:
    """Asserts that stacked layers equal separate layers, and a split tensor equals a full one.

    If the transform uses norms, the second comparison must fail without `axis_name`. `build` takes
    `rules` and `axis_name`. The gradients of the four layers have scales of 1, 10, 100 and 1000.
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
        separate, _ = after(
            build(rules="all"), *(jax.tree.map(list, trees) for trees in (params, grads))
        )
        for name in params:
            np.testing.assert_allclose(
                together[name], np.stack(separate[name]), rtol=1e-11, atol=1e-11
            )

        full, _ = after(build(rules="all"), params, grads)
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
            np.testing.assert_allclose(expected, full[name], rtol=1e-11, atol=1e-11)
        assert np.allclose(split(None)["w"], full["w"], rtol=1e-3) != takes_norms


def step_of(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_shardings(tree, shardings):
    def same(x, sharding):
        assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)

    jax.tree.map(same, tree, shardings)


def assert_close(actual, expected, rtol=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=rtol, atol=rtol * float(jnp.max(jnp.abs(b), initial=0.0))
        ),
        actual,
        expected,
    )

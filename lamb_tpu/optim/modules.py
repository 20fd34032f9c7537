"""Modules of a network: groups of its leaves, by ordered regular expressions over their paths.

As in `parameters`, a pattern is searched (`re.search`) in a leaf's path, its keys joined by '/',
and the first pattern that matches decides. Every leaf belongs to one module.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.trust_ratio import AxisName

ONE = ("",)  # the whole network as one module


class Products(NamedTuple):
    """Inner products of two gradients by module; they add up over parts of tensors."""

    ab: jax.Array  # float32, (num_modules,)
    aa: jax.Array
    bb: jax.Array
    apart: jax.Array  # of a - b with itself


def check(name: str, modules: Sequence[str]) -> None:
    """Raises ValueError unless modules are distinct regular expressions, at least one."""
    if isinstance(modules, str) or not isinstance(modules, Sequence) or not modules:
        raise ValueError(
            f"{name} must be a list of regular expressions over paths, not {modules!r}"
        )
    for pattern in modules:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{name} must be valid regular expressions; {pattern!r} is none: {error}"
            ) from error
        if list(modules).count(pattern) > 1:
            raise ValueError(f"{name} has {pattern!r} twice; only the first would decide")


def check_pairs(name: str, pairs: Any) -> None:
    """Raises ValueError unless pairs are (name, regular expression) of different names."""
    if (
        not isinstance(pairs, (tuple, list))
        or not all(
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and all(isinstance(text, str) for text in pair)
            and pair[0]
            for pair in pairs
        )
        or len({pair[0] for pair in pairs}) < len(pairs)
    ):
        raise ValueError(
            f"{name} is {pairs!r}; it must be pairs (name, regular expression over paths) of "
            "different names, as (('body', '^hidden'), ('rest', ''))"
        )


def assign(params: Any, modules: Sequence[str]) -> list[int]:
    """Returns the module of each leaf, in the order of `jax.tree.leaves`.

    >>> assign({'backbone': {'w': 1.0}, 'head': {'b': 1.0, 'w': 1.0}}, ['^backbone/', ''])
    [0, 1, 1]

    Args:
      params: any pytree.
      modules: regular expressions, of which the first that matches a leaf's path decides.

    Raises:
      ValueError: modules that are none; a leaf that no module matches; a module that has no leaf.
    """
    check("modules", modules)
    found = []
    for path in parameters.leaf_paths(params):
        index = next(
            (i for i, pattern in enumerate(modules) if parameters.matches(pattern, path)), None
        )
        if index is None:
            raise ValueError(
                f"no module matches the parameter {path!r}: add a pattern for it to modules"
            )
        found.append(index)
    for index, pattern in enumerate(modules):
        if found and index not in found:
            raise ValueError(
                f"the module {pattern!r} has no parameter that those before it leave; the paths "
                f"are {', '.join(parameters.leaf_paths(params)[:8])}"
            )
    return found


def products(a: Any, b: Any, modules: Sequence[str] = ONE, axis_name: AxisName = None) -> Products:
    """Returns the inner products of two trees of one structure, module by module.

    Args:
      a: a gradient.
      b: another.
      modules: see `assign`.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.

    Raises:
      ValueError: trees of two structures; modules that do not fit.
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise ValueError(
            "two gradients must have one structure, not "
            f"{checks.short(jax.tree.structure(a))} and {checks.short(jax.tree.structure(b))}"
        )
    sums: list[Any] = [Products(*[jnp.float32(0.0)] * 4) for _ in modules]
    leaves = zip(
        assign(a, modules),
        parameters.leaf_paths(a),
        jax.tree.leaves(a),
        jax.tree.leaves(b),
        strict=True,
    )
    for index, path, x, y in leaves:
        x, y = (jnp.asarray(v).astype(trust_ratio.compute_dtype(v)) for v in (x, y))
        axes = trust_ratio.axes_of(axis_name, path)
        terms = [
            trust_ratio.over(jax.lax.psum, jnp.sum(trust_ratio.real_product(u, v)), axes)
            for u, v in ((x, y), (x, x), (y, y), (x - y, x - y))
        ]
        sums[index] = Products(*map(jnp.add, sums[index], terms))
    return Products(*(jnp.stack(column) for column in zip(*sums, strict=True)))


def cosine(sums: Products) -> jax.Array:
    """Returns the cosine of each module's two gradients; 0 where one of them is all 0."""
    return 1.0 - one_minus_cosine(sums)


def one_minus_cosine(sums: Products) -> jax.Array:
    """Returns 1 - cosine for each module, with its digits also where the gradients are near."""
    # Two roots: the product of two squares would underflow where a gradient is small.
    a, b = jnp.sqrt(sums.aa), jnp.sqrt(sums.bb)
    norms = jnp.where(a * b > 0, a * b, 1.0)
    value = 1.0 - sums.ab / norms
    # |a - b|^2 = (|a| - |b|)^2 + 2 |a| |b| (1 - cosine), which loses digits for unlike norms only.
    near = (sums.apart - jnp.square(a - b)) / (2.0 * norms)
    alike = (a < 2.0 * b) & (b < 2.0 * a)
    return jnp.where(a * b > 0, jnp.where(alike, near, value), 1.0)

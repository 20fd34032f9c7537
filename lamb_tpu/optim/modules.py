"""Modules of a network: groups of leaves, defined by ordered regular expressions over paths.

As in `parameters`, a leaf's path consists of its keys, joined by '/', and a pattern may match any
part of the path (`re.search`). The first pattern that matches decides. Every leaf must belong to
one module.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import checks, parameters, trust_ratio
from lamb_tpu.optim.trust_ratio import AxisName

ONE = ("",)  # a single module, which has all leaves


class Products(NamedTuple):
    """Inner products of two gradients a and b for each module, float32 (num_modules,).

    The product of a sharded leaf is the sum of the products of its shards.
    """

    ab: jax.Array  # <a, b>
    aa: jax.Array  # <a, a>
    bb: jax.Array  # <b, b>
    difference: jax.Array  # <a - b, a - b>


def check(name: str, modules: Sequence[str]) -> None:
    """Raises ValueError unless `modules` is a non-empty list of distinct regular expressions."""
    if isinstance(modules, str) or not isinstance(modules, Sequence) or not modules:
        raise ValueError(f"{name}={modules!r} must be a non-empty list of regular expressions")
    for pattern in modules:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{name} has {pattern!r}, which is not a valid regular expression: {error}"
            ) from error
        if list(modules).count(pattern) > 1:
            raise ValueError(f"{name} has {pattern!r} twice; leave one out")


def check_pairs(name: str, pairs: Any) -> None:
    """Raises ValueError unless `pairs` is a list of (name, regular expression) with distinct names."""
    if (
        not isinstance(pairs, (tuple, list))
        or not all(
            checks.is_pair(pair) and all(isinstance(text, str) for text in pair) and pair[0]
            for pair in pairs
        )
        or len({pair[0] for pair in pairs}) < len(pairs)
    ):
        raise ValueError(
            f"{name}={pairs!r} must be pairs (name, regular expression over paths) with distinct "
            "names, such as (('body', '^hidden'), ('rest', ''))"
        )


def assign(params: optax.Params, modules: Sequence[str]) -> list[int]:
    """Returns the index of each leaf's module, in the order of `jax.tree.leaves`.

    >>> assign({'backbone': {'w': 1.0}, 'head': {'b': 1.0, 'w': 1.0}}, ['^backbone/', ''])
    [0, 1, 1]

    Raises:
      ValueError: `modules` is invalid, no module matches a leaf, or a module has no leaf.
    """
    check("modules", modules)
    indices = []
    for path in parameters.leaf_paths(params):
        index = next(
            (i for i, pattern in enumerate(modules) if parameters.matches(pattern, path)), None
        )
        if index is None:
            raise ValueError(
                f"no module matches the parameter {path!r}; add a pattern for it to modules"
            )
        indices.append(index)
    for index, pattern in enumerate(modules):
        if indices and index not in indices:
            raise ValueError(
                f"the module {pattern!r} has no parameters, because it matches none, or because earlier "
                f"modules match them first; the paths are {', '.join(parameters.leaf_paths(params)[:8])}"
            )
    return indices


def products(a: Any, b: Any, modules: Sequence[str] = ONE, axis_name: AxisName = None) -> Products:
    """Returns the inner products of two gradients for each module.

    Raises ValueError if the trees differ in structure, or the modules are invalid, see `assign`.
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise ValueError(
            "two gradients must have the same structure, not "
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
    """Returns the cosine of the two gradients for each module; 0 if one gradient is all 0."""
    return 1.0 - one_minus_cosine(sums)


def one_minus_cosine(sums: Products) -> jax.Array:
    """Returns 1 - cosine for each module, accurate even for similar gradients."""
    # Multiply the two norms: the product of their squares would underflow for small gradients.
    a, b = jnp.sqrt(sums.aa), jnp.sqrt(sums.bb)
    norms = jnp.where(a * b > 0, a * b, 1.0)
    value = 1.0 - sums.ab / norms
    # |a - b|^2 = (|a| - |b|)^2 + 2 |a| |b| (1 - cosine). Solved for 1 - cosine, this formula only
    # loses digits if the norms differ much; in that case use the plain formula.
    accurate = (sums.difference - jnp.square(a - b)) / (2.0 * norms)
    similar = (a < 2.0 * b) & (b < 2.0 * a)
    return jnp.where(a * b > 0, jnp.where(similar, accurate, value), 1.0)

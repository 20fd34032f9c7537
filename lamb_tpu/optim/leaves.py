"""Report of an optimizer's update and state for each parameter.

>>> import jax, jax.numpy as jnp, optax
>>> params = {'conv': {'kernel': jnp.ones((3, 3, 4, 8)), 'bias': jnp.ones(8)}}
>>> from lamb_tpu.optim.muon import muon
>>> found = report('muon', jax.eval_shape(muon(0.02).init, params), params, 'all')
>>> print(found.line())
Muon: 288 of 296 values; Adam: the rest; state: mu,nu float32; 1,216 bytes
>>> [found.update_of(leaf) for leaf in found.leaves]
['Adam', 'Muon']

The state is read from its shapes: of any transform, in chains, partitions, `optax.MultiSteps` and
the like, the arrays that belong to a parameter are those whose path ends in its path.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from lamb_tpu.optim import checks, parameters, sharding
from lamb_tpu.optim.parameters import ParameterFacts, Rules


class Buffer(NamedTuple):
    """An array of the state that belongs to one parameter."""

    name: str  # its field in the state, such as 'mu'
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its size, over all devices together if it is split."""
        return math.prod(self.shape) * self.dtype.itemsize


class Leaf(NamedTuple):
    """A parameter with its facts, and its arrays in the optimizer's state."""

    shape: tuple[int, ...]
    facts: ParameterFacts
    buffers: tuple[Buffer, ...]

    def buffer(self, name: str) -> Buffer | None:
        """Returns the buffer of that name; None if there is none."""
        return next((buffer for buffer in self.buffers if buffer.name == name), None)

    def is_whole(self, name: str) -> bool:
        """Returns whether the buffer of that name has a number for each of the parameter's."""
        buffer = self.buffer(name)
        return buffer is not None and buffer.shape == self.shape


class Algorithm(NamedTuple):
    """An optimizer that updates some leaves in another way than the others.

    Attributes:
      update: the name of its way of updating.
      other: the name of the way in which it updates the other leaves.
      takes: whether a leaf is updated in the first way.
      verb: between the first name and the number of values.
    """

    update: str
    other: str
    takes: Callable[[Leaf], bool]
    verb: str = ":"


def _adapts(leaf: Leaf) -> bool:
    return leaf.facts.adapt


# Any other optimizer updates all leaves alike.
ALGORITHMS: dict[str, Algorithm] = {
    "lamb": Algorithm("LAMB", "Adam", _adapts, " adapts"),
    "onebit_lamb": Algorithm("1-bit LAMB", "1-bit Adam", _adapts, " adapts"),
    "lars": Algorithm("LARS", "momentum", _adapts, " adapts"),
    "novograd": Algorithm("NovoGrad", "momentum", _adapts, " adapts"),
    # The state is what the optimizer made of the rules.
    "muon": Algorithm("Muon", "Adam", lambda leaf: leaf.buffer("nu") is None),
    "apollo": Algorithm("APOLLO", "AdamW", lambda leaf: not leaf.is_whole("mu")),
    "adafactor": Algorithm("factored moments", "full moments", lambda leaf: not leaf.is_whole("v")),
}
# These go by the names of leaves, see `matrices`.
BY_NAME = ("muon",)
# Columns of the table that are not compared on resume: they follow from the config.
_DESCRIBING = ("update", "state", "bytes")


class Report(NamedTuple):
    """An optimizer's leaves, in the order of `jax.tree.leaves(params)`; see `report`."""

    optimizer: str
    params: Any
    rules: Rules
    leaves: tuple[Leaf, ...]
    arguments: Mapping[str, Any]

    def update_of(self, leaf: Leaf) -> str:
        """Returns the name of the way in which the optimizer updates a leaf."""
        algorithm = ALGORITHMS.get(self.optimizer)
        if algorithm is None:
            return self.optimizer
        return algorithm.update if algorithm.takes(leaf) else algorithm.other

    def line(self) -> str:
        """Returns what the leaves get, in one line."""
        total, algorithm = _values(self.leaves), ALGORITHMS.get(self.optimizer)
        if algorithm is None:
            parts = [f"{self.optimizer}: all {total:,} values"]
        else:
            count = _values(leaf for leaf in self.leaves if algorithm.takes(leaf))
            parts = [
                f"{algorithm.update}{algorithm.verb} {count:,} of {total:,} values",
                *([f"{algorithm.other}: the rest"] if count < total else []),
            ]
        decay = self.arguments.get("weight_decay")
        if isinstance(decay, (int, float)) and decay == 0.0:
            parts.append("no decay")
        elif decay is not None:
            parts.append(f"decay: {_values(leaf for leaf in self.leaves if leaf.facts.decay):,}")
        for name in ("rate_factor", "decay_factor"):
            factors = [getattr(leaf.facts, name) for leaf in self.leaves]
            if any(factor != 1.0 for factor in factors):
                title = name.replace("_", " ")
                parts.append(f"{title}s: {min(factors):.6g} to {max(factors):.6g}")
        parts += [  # of the 1-bit optimizers
            f"{key}={value}"
            for key, value in self.arguments.items()
            if key.startswith("mask") and value not in ((), None)
        ]
        buffers = [buffer for leaf in self.leaves for buffer in leaf.buffers]
        if not buffers:
            return "; ".join([*parts, "state: none"])
        names: dict[str, dict[str, None]] = {}  # by dtype, in the order of the state
        for buffer in buffers:
            names.setdefault(str(buffer.dtype), {})[buffer.name] = None
        kept = ", ".join(f"{','.join(group)} {dtype}" for dtype, group in names.items())
        size = sum(buffer.nbytes for buffer in buffers)
        return "; ".join([*parts, f"state: {kept}", f"{size:,} bytes"])

    def table(self, full: bool = True) -> str:
        """Returns `parameters.table`; if `full`, also each leaf's update, state and its bytes."""
        columns = {
            "update": [self.update_of(leaf) for leaf in self.leaves],
            "state": [_state_text(leaf) for leaf in self.leaves],
            "bytes": [str(sum(b.nbytes for b in leaf.buffers)) for leaf in self.leaves],
        }
        return parameters.table(
            self.params,
            self.rules,
            by_name=self.optimizer in BY_NAME,
            columns=columns if full else None,
        )


def report(
    optimizer: str,
    opt_state: Any,
    params: Any,
    rules: Rules,
    arguments: Mapping[str, Any] | None = None,
) -> Report:
    """Returns what an optimizer does with each leaf.

    Args:
      optimizer: its name in `factory.OPTIMIZERS`, or any other.
      opt_state: its state, or the shapes and dtypes of it.
      params: the parameters, or the shapes and dtypes of them.
      rules: its rules, see `parameters.resolve`.
      arguments: the arguments that it has, as `factory.arguments_of` gives them, for the line.

    Raises:
      ValueError: an argument is of another type, or the rules do not fit, see `parameters.resolve`.
    """
    if not isinstance(optimizer, str):
        raise ValueError(f"optimizer must be the name of an optimizer, not {optimizer!r}")
    checks.check_opt_state(opt_state)
    checks.check_mapping("arguments", arguments)
    kept: dict[Any, list[Buffer]] = {
        path: [] for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    for path, array in jax.tree_util.tree_leaves_with_path(opt_state):
        owner = sharding.owner_of(path, kept)
        # A bare parameter has an empty path, which ends every path, that of a count too.
        if owner is not None and (owner or np.shape(array)):
            name = _name(path[: len(path) - len(owner)])
            kept[owner].append(Buffer(name, np.shape(array), np.dtype(array.dtype)))
    facts = jax.tree.leaves(parameters.resolve(params, rules))
    return Report(
        optimizer,
        params,
        rules,
        tuple(
            Leaf(np.shape(param), fact, tuple(buffers))
            for param, fact, buffers in zip(
                jax.tree.leaves(params), facts, kept.values(), strict=True
            )
        ),
        arguments or {},
    )


def difference(before: str, now: str) -> str | None:
    """Returns the first fact in which two tables of parameters differ, or None.

    A table of an older version may lack columns: that of a fact that only newer rules know has its
    default, and what describes the update and the state is not compared.
    """
    if before == now:
        return None
    old, new = _cells(before), _cells(now)
    if old is None or new is None:
        return "it is no table of parameters"
    for path in dict.fromkeys([*old, *new]):
        if path not in old or path not in new:
            return f"{path!r} is only in {'this run' if path in new else 'the file'}"
        for title in dict.fromkeys([*old[path], *new[path]]):
            default = "1" if title.endswith("factor") else "-"
            there, here = old[path].get(title, default), new[path].get(title, default)
            if there != here and title not in _DESCRIBING:
                return f"{path!r} has {title} {there} there and {here} here"
    if before.splitlines()[-1] != now.splitlines()[-1]:
        return "the last lines differ"
    return None


def _cells(table: str) -> dict[str, dict[str, str]] | None:
    """Returns the cells of a table by path and title; None if it is no table."""
    titles, *rows = [re.split(r" {2,}", line) for line in table.splitlines()] or [[""]]
    if titles[:2] != ["path", "shape"] or not rows:
        return None
    cells = {}
    for row in rows[:-1]:  # the last line has the totals
        start = len(row) - len(titles)  # a path may have spaces
        if start < 0:
            return None
        cells["  ".join(row[: start + 1])] = dict(zip(titles[1:], row[start + 1 :], strict=True))
    return cells


def _values(leaves: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _name(path: tuple[Any, ...]) -> str:
    """The innermost name on a path into a state: of '[0].mu', 'mu'."""
    for key in reversed(path):
        name = getattr(key, "name", getattr(key, "key", None))
        if isinstance(name, str):
            return name
    return "array"


def _state_text(leaf: Leaf) -> str:
    """The buffers of a leaf, with the shapes of those that have another than the parameter."""
    texts = []
    for (dtype, shape), group in itertools.groupby(
        leaf.buffers, key=lambda buffer: (buffer.dtype, buffer.shape)
    ):
        names = ",".join(buffer.name for buffer in group)
        size = "" if shape == leaf.shape else f" ({','.join(map(str, shape))})"
        texts.append(f"{names} {dtype}{size}")
    return ", ".join(texts) or "-"

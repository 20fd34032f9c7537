"""Reports how an optimizer updates each parameter and what state it stores.

>>> import jax, jax.numpy as jnp, optax
>>> params = {'conv': {'kernel': jnp.ones((3, 3, 4, 8)), 'bias': jnp.ones(8)}}
>>> from lamb_tpu.optim.muon import muon
>>> summary = report('muon', jax.eval_shape(muon(0.02).init, params), params, 'all')
>>> print(summary.line())
Muon: 288 of 296 values; Adam: the rest; state: mu,nu float32; 1,216 bytes
>>> [summary.update_of(leaf) for leaf in summary.leaves]
['Adam', 'Muon']

An array of the state belongs to a parameter if the array's path ends in the parameter's path.
This rule works for any transform, even inside chains, partitions and `optax.MultiSteps`.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from lamb_tpu.optim import checks, parameters, sharding
from lamb_tpu.optim.parameters import ParameterMetadata, Rules


class Buffer(NamedTuple):
    """An array of the state that belongs to one parameter."""

    name: str  # its field in the state, such as 'mu'
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """The size of the full array in bytes, even if it is split over devices."""
        return math.prod(self.shape) * self.dtype.itemsize


class Leaf(NamedTuple):
    """A parameter with its metadata and its arrays in the optimizer's state."""

    shape: tuple[int, ...]
    metadata: ParameterMetadata
    buffers: tuple[Buffer, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each buffer by name; the first buffer's shape if several share a name."""
        return {buffer.name: buffer.shape for buffer in reversed(self.buffers)}


class Algorithm(NamedTuple):
    """The two algorithms of an optimizer that does not update all leaves in the same way."""

    update: str  # the name of the main algorithm
    other: str  # the name of the algorithm for the other leaves
    takes: Callable[[Leaf], bool]  # whether the main algorithm updates a leaf
    # In the line of `Report`, the text between `update` and the number of values, such as ' adapts'
    # in 'LAMB adapts 1,000 of 1,200 values'.
    verb: str = ":"


def _adapts(leaf: Leaf) -> bool:
    return leaf.metadata.adapt


# Any optimizer that is not listed updates all leaves in the same way.
ALGORITHMS: dict[str, Algorithm] = {
    "lamb": Algorithm("LAMB", "Adam", _adapts, " adapts"),
    "onebit_lamb": Algorithm("1-bit LAMB", "1-bit Adam", _adapts, " adapts"),
    "lars": Algorithm("LARS", "momentum", _adapts, " adapts"),
    "novograd": Algorithm("NovoGrad", "momentum", _adapts, " adapts"),
    # The buffers show which algorithm the optimizer has chosen.
    "muon": Algorithm("Muon", "Adam", lambda leaf: "nu" not in leaf.shapes),
    "apollo": Algorithm("APOLLO", "AdamW", lambda leaf: leaf.shapes.get("mu") != leaf.shape),
    "adafactor": Algorithm(
        "factored moments", "full moments", lambda leaf: leaf.shapes.get("v") != leaf.shape
    ),
}
BY_NAME = ("muon",)  # optimizers that recognise matrices by their names, see `matrices`
# Columns that are not compared when a run resumes, because the config determines their values.
_DESCRIBING = ("update", "state", "bytes")


class Report(NamedTuple):
    """A report of how an optimizer updates each leaf, in the order of `jax.tree.leaves(params)`."""

    optimizer: str
    params: optax.Params
    rules: Rules
    leaves: tuple[Leaf, ...]
    arguments: Mapping[str, Any]

    def update_of(self, leaf: Leaf) -> str:
        """Returns the name of the algorithm that updates a leaf."""
        algorithm = ALGORITHMS.get(self.optimizer)
        if algorithm is None:
            return self.optimizer
        return algorithm.update if algorithm.takes(leaf) else algorithm.other

    def line(self) -> str:
        """Returns one line: the number of values per algorithm, and the state's arrays, dtypes and bytes."""
        total, algorithm = _values(self.leaves), ALGORITHMS.get(self.optimizer)
        if algorithm is None:
            phrases = [f"{self.optimizer}: all {total:,} values"]
        else:
            count = _values(leaf for leaf in self.leaves if algorithm.takes(leaf))
            phrases = [
                f"{algorithm.update}{algorithm.verb} {count:,} of {total:,} values",
                *([f"{algorithm.other}: the rest"] if count < total else []),
            ]
        decay = self.arguments.get("weight_decay")
        if isinstance(decay, (int, float)) and decay == 0.0:
            phrases.append("no decay")
        elif decay is not None:
            count = _values(leaf for leaf in self.leaves if leaf.metadata.decay)
            phrases.append(f"decay: {count:,}")
        for name in ("rate_factor", "decay_factor"):
            factors = [getattr(leaf.metadata, name) for leaf in self.leaves]
            if any(factor != 1.0 for factor in factors):
                title = name.replace("_", " ")
                phrases.append(f"{title}s: {min(factors):.6g} to {max(factors):.6g}")
        phrases += [  # masks of the 1-bit optimizers
            f"{key}={value}"
            for key, value in self.arguments.items()
            if key.startswith("mask") and value not in ((), None)
        ]
        buffers = [buffer for leaf in self.leaves for buffer in leaf.buffers]
        if not buffers:
            return "; ".join([*phrases, "state: none"])
        names: dict[str, dict[str, None]] = {}  # by dtype, in the order of the state
        for buffer in buffers:
            names.setdefault(str(buffer.dtype), {})[buffer.name] = None
        state = ", ".join(f"{','.join(group)} {dtype}" for dtype, group in names.items())
        size = sum(buffer.nbytes for buffer in buffers)
        return "; ".join([*phrases, f"state: {state}", f"{size:,} bytes"])

    def table(self, full: bool = True) -> str:
        """Returns the table that `parameters.table` formats.

        If `full`, the table also has columns for each leaf's algorithm, state and bytes of state.
        """
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
    opt_state: optax.OptState,
    params: optax.Params,
    rules: Rules,
    arguments: Mapping[str, Any] | None = None,
) -> Report:
    """Describes how an optimizer updates each leaf and what state it stores.

    Args:
      optimizer: the optimizer's name in `factory.OPTIMIZERS`, or any other name.
      opt_state: the optimizer's state, or `jax.ShapeDtypeStruct`s in place of its arrays.
      params: the parameters, or `jax.ShapeDtypeStruct`s.
      rules: the optimizer's rules, see `parameters.resolve`.
      arguments: the optimizer's arguments, see `factory.arguments_of`; the line shows decay and masks.

    Raises:
      ValueError: an argument has the wrong type, or the rules do not fit the parameters.
    """
    if not isinstance(optimizer, str):
        raise ValueError(f"optimizer={optimizer!r} must be the name of an optimizer")
    checks.check_opt_state(opt_state)
    checks.check_mapping("arguments", arguments)
    buffers_by_path: dict[Any, list[Buffer]] = {
        path: [] for path, _ in jax.tree_util.tree_leaves_with_path(params)
    }
    for path, array in jax.tree_util.tree_leaves_with_path(opt_state):
        owner = sharding.owner_of(path, buffers_by_path)
        # A parameter that is not in a container has the empty path. Every path ends in the empty
        # path, even the path of a count, which is not a buffer.
        if owner is not None and (owner or np.shape(array)):
            name = _name(path[: len(path) - len(owner)])
            buffers_by_path[owner].append(Buffer(name, np.shape(array), np.dtype(array.dtype)))
    rows = zip(parameters.rows(params, rules), buffers_by_path.values(), strict=True)
    leaves = tuple(Leaf(np.shape(x), meta, tuple(buffers)) for (_, x, meta), buffers in rows)
    return Report(optimizer, params, rules, leaves, arguments or {})


def difference(before: str, now: str) -> str | None:
    """Returns the first difference between two tables of parameters, or None.

    A table that an older version wrote may lack columns; missing cells count as defaults. Columns
    that describe the update and the state are not compared.
    """
    if before == now:
        return None
    old, new = _cells(before), _cells(now)
    if old is None or new is None:
        return "the file is not a table of parameters"
    for path in dict.fromkeys([*old, *new]):
        if path not in old or path not in new:
            return f"{path!r} is only in {'this run' if path in new else 'the file'}"
        for title in dict.fromkeys([*old[path], *new[path]]):
            default = "1" if title.endswith("factor") else "-"
            stored, actual = old[path].get(title, default), new[path].get(title, default)
            if stored != actual and title not in _DESCRIBING:
                return f"{path!r} has {title} {stored} in the file and {actual} in this run"
    if before.splitlines()[-1] != now.splitlines()[-1]:
        return "the last lines differ"
    return None


def _cells(table: str) -> dict[str, dict[str, str]] | None:
    """Returns {path: {title: cell}}; None if the text is not a table of parameters."""
    titles, *rows = [re.split(r" {2,}", line) for line in table.splitlines()] or [[""]]
    if titles[:2] != ["path", "shape"] or not rows:
        return None
    cells = {}
    for row in rows[:-1]:  # the last line has the totals
        start = len(row) - len(titles)  # above 0 if the path contains two or more spaces in a row
        if start < 0:
            return None
        cells["  ".join(row[: start + 1])] = dict(zip(titles[1:], row[start + 1 :], strict=True))
    return cells


def _values(leaves: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _name(path: tuple[Any, ...]) -> str:
    """Returns the last name in a path into a state, such as 'mu' for '[0].mu'."""
    names = (getattr(key, "name", getattr(key, "key", None)) for key in reversed(path))
    return next((name for name in names if isinstance(name, str)), "array")


def _state_text(leaf: Leaf) -> str:
    """Lists the buffers of a leaf, with their shapes if they differ from the parameter's."""
    texts = []
    for (dtype, shape), group in itertools.groupby(
        leaf.buffers, key=lambda buffer: (buffer.dtype, buffer.shape)
    ):
        names = ",".join(buffer.name for buffer in group)
        size = "" if shape == leaf.shape else f" ({','.join(map(str, shape))})"
        texts.append(f"{names} {dtype}{size}")
    return ", ".join(texts) or "-"

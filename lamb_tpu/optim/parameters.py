"""Parameter metadata in one table: which leaves decay, which adapt, and which axes stack layers.

A rule is a pair `(regex, metadata)`. The path of a leaf consists of its keys, joined by '/', such
as 'encoder/layer_0/bias', and the regex may match any part of the path (`re.search`). The first
rule that matches decides. A rule may include or omit the '/value' at the end of NNX's paths, see
`matches`. The argument `rules` is a name in `RULES`, or a sequence of such pairs. The metadata are
a `ParameterMetadata` or a mapping of its fields:

>>> import jax, jax.numpy as jnp
>>> params = {'layers': {'kernel': jnp.ones((4, 8, 8)), 'bias': jnp.ones((4, 8))}}
>>> print(table(params, [('bias$', {'decay': False, 'adapt': False, 'layer_axes': (0,)}),
...                      ('^layers/', {'layer_axes': (0,)})]))
path           shape    dtype    count  decay  adapt  layer axes
layers/bias    (4,8)    float32     32  no     no     (0)
layers/kernel  (4,8,8)  float32    256  yes    yes    (0)
total: 2 leaves, 288 values; decay: 1 leaf, 256 values; adapt: 1 leaf, 256 values

Metadata can also scale each layer's learning rate. The table shows these factors if one is not 1:

>>> params = {f'layer_{i}': jnp.ones(4) for i in range(3)}
>>> print(table(params, [(f'layer_{i}', {'rate_factor': 0.5**(2 - i)}) for i in range(3)]))
path     shape  dtype    count  decay  adapt  layer axes  rate factor
layer_0  (4)    float32      4  yes    yes    -           0.25
layer_1  (4)    float32      4  yes    yes    -           0.5
layer_2  (4)    float32      4  yes    yes    -           1
total: 3 leaves, 12 values; decay: 3 leaves, 12 values; adapt: 3 leaves, 12 values
"""

import copy
import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from lamb_tpu.optim import checks, matrices
from lamb_tpu.optim.matrices import MatrixAxes


@dataclasses.dataclass(frozen=True)
class ParameterMetadata:
    """Metadata that an optimizer needs for one leaf; rules assign it.

    Attributes:
      decay: whether weight decay applies to the leaf.
      adapt: whether a trust ratio scales the leaf's update; if not, the ratio is 1.
      layer_axes: the axes that stack layers, such as the leading axis of a scanned Transformer.
        Norms reduce over the other axes, so each stacked layer has a separate trust ratio.
      rate_factor: multiplies the leaf's learning rate, as if the leaf had a separate optimizer with
        this rate. The factor therefore scales everything that the rate multiplies, including
        decoupled decay. It changes neither norms over all leaves, as in clipping, nor trust ratios,
        unless these depend on the rate (LARC's clip, LAMB's 'decoupled' decay).
      decay_factor: multiplies the leaf's weight decay.
      matrix_axes: for `apollo` and `muon`, (axes of the rows, axes of the columns) of a matrix;
        rows are inputs and columns outputs, and the axes of each side are flattened. An example
        is ((0, 1, 2), (3,)) for the kernel of a Flax convolution. Together with `layer_axes` these
        must be all axes of the leaf. () if the leaf is not a matrix, such as an embedding table. If
        None, `muon` decides by the leaf's name, see `matrices`, and for `apollo` a leaf is a matrix
        if it has two axes besides its layer axes.
      axes_by_name: the matrix axes that the leaf's name implies. Do not set this field: `resolve` does,
        if no rule gives `matrix_axes`.
    """

    decay: bool = True
    adapt: bool = True
    layer_axes: tuple[int, ...] = ()
    rate_factor: float = 1.0
    decay_factor: float = 1.0
    matrix_axes: MatrixAxes | tuple[()] | None = None
    axes_by_name: MatrixAxes | tuple[()] | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("decay", "adapt"):
            checks.check_flag(name, getattr(self, name))
        axes = self.layer_axes
        if not _are_axes(axes):
            raise ValueError(f"layer_axes={axes!r} must be a list of distinct axes, counted from 0")
        # A frozen dataclass forbids plain assignment. Sort, because `resolve` takes the last axis
        # as the largest.
        object.__setattr__(self, "layer_axes", tuple(sorted(axes)))
        if self.matrix_axes is not None:
            object.__setattr__(self, "matrix_axes", _matrix_axes(self.matrix_axes, axes))
        for name in ("rate_factor", "decay_factor"):
            value = getattr(self, name)
            # A bool is an int in Python, but a factor of True is certainly a user error.
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0.0 <= value < math.inf:
                raise ValueError(f"{name}={value!r} must be a finite number of at least 0")
            object.__setattr__(self, name, float(value))
        if not self.decay and self.decay_factor != 1.0:
            raise ValueError(
                f"decay_factor={self.decay_factor!r} has no effect with decay=False; leave out "
                "one of the two"
            )

    def matrix(self, num_axes: int, by_name: bool = True) -> MatrixAxes | None:
        """Returns the axes of the rows and of the columns; None if the leaf is not a matrix."""
        if self.matrix_axes is not None:
            return self.matrix_axes or None
        if by_name and self.axes_by_name is not None:
            return self.axes_by_name or None
        # Without a rule, a leaf is a matrix if it has exactly two axes besides its layer axes.
        # Their order is Flax's: (inputs, outputs).
        sides = [axis for axis in range(num_axes) if axis not in self.layer_axes]
        return ((sides[0],), (sides[1],)) if len(sides) == 2 else None


def _are_axes(value: Any) -> bool:
    if not isinstance(value, (tuple, list)):
        return False
    return all(type(axis) is int and axis >= 0 for axis in value) and len({*value}) == len(value)


def _matrix_axes(given: Any, layer_axes: Sequence[int]) -> MatrixAxes | tuple[()]:
    sides = given if isinstance(given, (tuple, list)) else None
    if sides is not None and not sides:
        return ()
    if sides is None or len(sides) != 2 or not all(_are_axes(side) and side for side in sides):
        raise ValueError(
            f"matrix_axes={given!r} must be (axes of the rows, axes of the columns), such as "
            "((0, 1), (2,)), or () for a leaf that is not a matrix"
        )
    rows, columns = map(tuple, sides)
    if not _are_axes([*rows, *columns, *layer_axes]):
        raise ValueError(
            f"matrix_axes={(rows, columns)} and layer_axes={tuple(layer_axes)} must not name an "
            "axis twice"
        )
    return rows, columns


PyTree = Any
Rules = str | Sequence[tuple[str, ParameterMetadata | Mapping[str, Any]]]


def _without(pattern: str, *, adapt: bool = False) -> tuple[tuple[str, ParameterMetadata], ...]:
    """Returns rules that exempt matching leaves from decay, and by default from adaptation."""
    return (pattern, ParameterMetadata(decay=False, adapt=adapt)), ("", ParameterMetadata())


# A bias is called 'bias' in Flax and Equinox ('bias_n' in Equinox's GRU), and 'b' in Haiku and
# GPT-2.
_BIASES = r"(^|/)(bias|bias_n|b)(/value)?$"  # paths in NNX may end in '/value'
# Modules that are norms, such as BatchNorm_0, layer_norm, norm_proj, bn1, init_bn, ln_f, rms.
_NORM = r"((?i:norm)[^/]*|(^|[/_])(bn|gn|ln|rms)\d*(_[^/]*)?)/"
# Leaves that only norms have: 'scale' in Flax, 'offset' in Haiku, 'gamma' and 'beta' elsewhere.
_OF_NORMS = r"(^|/)(scale|gamma|beta|offset)(/value)?$"
# In a norm, Equinox calls the scale 'weight', like a matrix, and GPT-2 calls it 'g'. A norm in a
# list, such as Equinox's 'layers/1/weight', cannot be recognised by its name and needs a rule.
_LEAVES = rf"{_BIASES}|{_OF_NORMS}|{_NORM}(weight|g)(/value)?$"
_EXEMPT = re.compile(_LEAVES)
_NORMS = rf"{_NORM}|{_OF_NORMS}"

# Named rules serve any model, so a rule may match no leaf. They set no matrix axes: `matrices`
# recognises kernels, embedding tables and output layers by their names.
RULES: dict[str, tuple[tuple[str, ParameterMetadata], ...]] = {
    # LAMB's Algorithm 2 and LARS as printed: every tensor decays and adapts.
    "all": (("", ParameterMetadata()),),
    # As in working recipes for BERT and ResNet, biases and norms neither decay nor adapt.
    "no_bias_no_norm": _without(_LEAVES),
    # NVIDIA's BERT in TensorFlow: biases and norms do not decay, but every tensor adapts.
    "no_bias_no_norm_decay": _without(_LEAVES, adapt=True),
    # TensorFlow Addons' LAMB with BERT's exclusions LayerNorm, layer_norm and bias. There, leaves
    # that do not decay do not adapt either, unless the user gives a separate list for adaptation.
    "bert": _without(_LEAVES),
    # The LAMB authors' ResNet-50 (fastalgo/imagenet_resnet50_lamb, optimization.py) excludes norms
    # but not biases, and so does the L2 term for RMSProp in tensorflow/tpu's EfficientNet.
    "resnet": _without(_NORMS),
    # LARS in tensorflow/tpu's EfficientNet skips batch_normalization, bias, beta and gamma.
    "efficientnet": _without(_LEAVES),
    # We know of no published list for the papers' LSTMs. Their biases start at 0, or at 1 for
    # forget gates, so the norm of a bias does not indicate a suitable step length.
    "lstm": _without(_BIASES),
}
DEFAULT_RULES = "all"
_TITLES = ("path", "shape", "dtype", "count", "decay", "adapt", "layer axes")  # in every table


def resolve(params: optax.Params, rules: Rules) -> PyTree:
    """Returns the metadata of every leaf.

    Args:
      params: any pytree whose leaves have a shape: arrays or `jax.ShapeDtypeStruct`s.
      rules: a name in `RULES`, or a sequence of `(regex, metadata)`; the first match decides.

    Raises:
      ValueError: a rule is invalid; no rule matches a leaf; a leaf lacks one of its layer axes; the
        matrix and layer axes of a leaf are not all of its axes; or a rule decides for no leaf,
        because it matches none, or because earlier rules match all of its leaves. The last error is
        not raised for named rules, for a tree without leaves, or for a last rule that matches every
        leaf.

    Warns:
      UserWarning: if `optax.partition` or `optax.masked` hides some leaves, in place of the error
        about a rule that decides for no leaf. One list may serve all partitions, and the rule may
        be for leaves of a hidden subtree, which are unknown. To be sure, resolve the rules once for
        the full tree.
    """
    compiled = check_rules(rules)
    checks.check_arrays("params", params)
    leaves, treedef = jax.tree.flatten(params)
    paths, metadata = leaf_paths(params), []
    for path, leaf in zip(paths, leaves, strict=True):
        taker = next((i for i, (regex, _) in enumerate(compiled) if matches(regex, path)), None)
        if taker is None:
            raise ValueError(f"no rule matches the parameter {path!r}; add a rule for it to rules")
        match = compiled[taker][1]
        num_axes = np.ndim(leaf)
        if match.layer_axes and match.layer_axes[-1] >= num_axes:
            raise ValueError(
                f"layer_axes={match.layer_axes} must be axes of the parameter {path!r}; its "
                f"number of axes is {num_axes}"
            )
        if match.matrix_axes:
            named = {*match.layer_axes, *match.matrix_axes[0], *match.matrix_axes[1]}
            if named != set(range(num_axes)):
                raise ValueError(
                    f"matrix_axes={match.matrix_axes} and layer_axes={match.layer_axes} must "
                    f"together be all axes of the parameter {path!r}; its number of axes is {num_axes}"
                )
        metadata.append(_named(match, path, num_axes))
    if paths and not isinstance(rules, str):
        hidden = _hidden_paths(params)
        # If leaves are hidden, the rule may be for leaves of another partition. The leaves of a
        # hidden subtree are unknown, so warn instead of raising an error.
        for problem in _idle_rules([regex for regex, _ in compiled], paths + hidden):
            if not hidden:
                raise ValueError(problem)
            warnings.warn(
                f"{problem}; optax.partition or optax.masked hides: "
                f"{', '.join(hidden[:8])}{', ...' if len(hidden) > 8 else ''}",
                stacklevel=2,
            )
    return jax.tree.unflatten(treedef, metadata)


@functools.lru_cache(maxsize=4096)  # called for every leaf whenever an update is traced
def _named(metadata: ParameterMetadata, path: str, num_axes: int) -> ParameterMetadata:
    """Returns the metadata with `axes_by_name` set."""
    if metadata.matrix_axes is not None:
        return metadata
    metadata = copy.copy(metadata)
    axes: MatrixAxes | tuple[()] = ()
    if not _EXEMPT.search(path):
        axes = matrices.axes_of(path, num_axes, metadata.layer_axes)
    object.__setattr__(metadata, "axes_by_name", axes)
    return metadata


def _hidden_paths(params: optax.Params) -> list[str]:
    """Returns the paths of hidden leaves and of hidden subtrees, whose leaves are unknown."""

    def is_hidden(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    # A `MaskedNode` is an empty container. Treat it as a leaf, or it would have no path.
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_hidden)
    return [checks.joined(path) for path, node in leaves if is_hidden(node)]


def _idle_rules(regexes: list[re.Pattern], paths: list[str]) -> Iterator[str]:
    """Yields a message for each rule that decides for no path."""
    takers = [
        next((i for i, regex in enumerate(regexes) if matches(regex, path)), None) for path in paths
    ]
    for index, regex in enumerate(regexes):
        matched = [i for i, path in enumerate(paths) if matches(regex, path)]
        if not matched:
            yield (
                f"the rule {regex.pattern!r} matches no parameter; the paths are "
                f"{', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"
            )
        # A last catch-all rule may have no leaves left.
        elif index not in takers and not (index == len(regexes) - 1 and len(matched) == len(paths)):
            first = matched[0]
            taker = takers[first]
            assert taker is not None  # this rule matches the path, so the path has a first match
            yield (
                f"the rule {regex.pattern!r} has no effect: earlier rules match all of its "
                f"leaves; for example, {regexes[taker].pattern!r} matches {paths[first]!r}"
            )


def leaf_paths(params: optax.Params) -> list[str]:
    """Returns each leaf's keys joined by '/', in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return [checks.joined(path) for path, _ in leaves]


def rows(params: optax.Params, rules: Rules) -> list[tuple[str, Any, ParameterMetadata]]:
    """Returns the path, the leaf and the metadata of every leaf."""
    metadata = jax.tree.leaves(resolve(params, rules))
    return list(zip(leaf_paths(params), jax.tree.leaves(params), metadata, strict=True))


def matches(regex: str | re.Pattern, path: str) -> bool:
    """Returns whether a regex matches a leaf's path, with or without NNX's trailing '/value'.

    `nnx.Optimizer` calls `init` with paths of variables, such as 'dense/bias/value', and `update`
    with paths of the variables' arrays, such as 'dense/bias'. One rule must match both paths, and
    also the paths of a Linen model with the same names.

    >>> [matches('bias$', path) for path in ('dense/bias/value', 'dense/bias', 'bias/kernel')]
    [True, True, False]
    >>> [matches('bias/value$', path) for path in ('dense/bias/value', 'dense/bias')]
    [True, True]
    """
    regex = re.compile(regex)
    if regex.search(path) or regex.search(path.removesuffix("/value")):
        return True
    # Only add '/value' if the regex ends in '/value$' and has more before it: otherwise 'value$'
    # would match every leaf of every model.
    return (
        regex.pattern[:-7] != ""
        and regex.pattern.endswith("/value$")
        and bool(regex.search(f"{path}/value"))
    )


def table(
    params: optax.Params,
    rules: Rules,
    by_name: bool = False,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Formats the metadata of every leaf as a table, for logs, golden files and checks on resume.

    Rows are sorted by path. The table only depends on paths, shapes, dtypes and metadata.

    Args:
      params, rules: see `resolve`.
      by_name: whether the optimizer recognises matrices by their names. If so, the table also shows
        the matrix axes that a leaf's name implies, unless its number of axes implies the same.
      columns: further columns, {title: cells in the order of `jax.tree.leaves(params)`}.

    Raises:
      ValueError: see `resolve`; `by_name` is not a bool, or `columns` is not a mapping.
    """
    checks.check_flag("by_name", by_name)
    checks.check_mapping("columns", columns)
    columns = columns or {}
    leaves, metadata = jax.tree.leaves(params), jax.tree.leaves(resolve(params, rules))
    factors = [  # show a column only if a factor is not 1, as in tables of older versions
        name
        for name in ("rate_factor", "decay_factor")
        if any(getattr(meta, name) != 1.0 for meta in metadata)
    ]
    axes = [
        _shown_axes(meta, np.ndim(x), by_name) for x, meta in zip(leaves, metadata, strict=True)
    ]
    shows_axes = any(shown is not None for shown in axes)
    titles = [*_TITLES, *(name.replace("_", " ") for name in factors)]
    rows = [(*titles, *(["matrix axes"] if shows_axes else []), *columns)]
    # Sort by path, so that the table does not depend on the order of keys in a dict.
    for path, leaf, meta, shown, *more in sorted(
        zip(leaf_paths(params), leaves, metadata, axes, *columns.values(), strict=True),
        key=lambda row: row[0],
    ):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
        row = (
            path,
            _axes(np.shape(leaf)),
            np.dtype(dtype).name,
            str(math.prod(np.shape(leaf))),
            "yes" if meta.decay else "no",
            "yes" if meta.adapt else "no",
            _axes(meta.layer_axes) if meta.layer_axes else "-",
            *(f"{getattr(meta, name):.6g}" for name in factors),
        )
        rows.append((*row, *([_matrix_text(shown)] if shows_axes else []), *more))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if title in ("count", "bytes") else cell.ljust(width)
            for title, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, _totals(leaves, metadata)])


def _totals(leaves: Sequence[Any], metadata: Sequence[ParameterMetadata]) -> str:
    sizes = [math.prod(np.shape(leaf)) for leaf in leaves]
    counted = {
        "total": sizes,
        "decay": [size for size, meta in zip(sizes, metadata, strict=True) if meta.decay],
        "adapt": [size for size, meta in zip(sizes, metadata, strict=True) if meta.adapt],
    }
    return "; ".join(
        f"{name}: {len(counts)} {'leaf' if len(counts) == 1 else 'leaves'}, {sum(counts)} values"
        for name, counts in counted.items()
    )


def _axes(values: Sequence[int]) -> str:
    return f"({','.join(map(str, values))})"


def _shown_axes(
    metadata: ParameterMetadata, num_axes: int, by_name: bool
) -> MatrixAxes | tuple[()] | None:
    if (
        by_name
        and metadata.adapt
        and metadata.matrix(num_axes) != metadata.matrix(num_axes, by_name=False)
    ):
        return metadata.axes_by_name
    return metadata.matrix_axes


def _matrix_text(axes: MatrixAxes | tuple[()] | None) -> str:
    if not axes:
        return "-" if axes is None else "none"
    return " x ".join(map(_axes, axes))


def check_rules(rules: Rules) -> list[tuple[re.Pattern, ParameterMetadata]]:
    """Returns the compiled rules; raises ValueError if a rule is invalid or repeated."""
    if isinstance(rules, str):
        if rules not in RULES:
            raise ValueError(f"rules={rules!r} is unknown; use one of {', '.join(RULES)}")
        rules = RULES[rules]
    if isinstance(rules, Mapping) or not isinstance(rules, Sequence):
        raise ValueError(
            f"rules={rules!r} must be one of {', '.join(RULES)}, or a list of (regex, metadata)"
        )
    compiled = [_compile_rule(rule) for rule in rules]
    patterns = [regex.pattern for regex, _ in compiled]
    # No parameters are given here, so only identical patterns can be detected.
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"the rule {pattern!r} is given twice; leave one out")
    return compiled


def _compile_rule(rule: Any) -> tuple[re.Pattern, ParameterMetadata]:
    if not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], str):
        raise ValueError(f"rules has {rule!r}, which must be a pair (regex, metadata)")
    pattern, metadata = rule
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"the rule {pattern!r} is not a valid regular expression: {error}"
        ) from error
    if isinstance(metadata, ParameterMetadata):
        return regex, metadata
    # In config files, the metadata of a rule are a mapping.
    known = [field.name for field in dataclasses.fields(ParameterMetadata) if field.init]
    try:
        metadata = dict(metadata)
    except (TypeError, ValueError):
        raise ValueError(
            f"the rule {pattern!r} has the metadata {metadata!r}; use a mapping of {', '.join(known)}"
        ) from None
    for name in metadata:
        if name not in known:
            raise ValueError(
                f"the rule {pattern!r} has the unknown field {name!r}; use one of {', '.join(known)}"
            )
    return regex, ParameterMetadata(**metadata)

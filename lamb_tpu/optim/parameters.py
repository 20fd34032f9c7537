"""Parameter facts: which leaves decay, which adapt, which axes stack layers, in one table.

A rule is a pair `(regex, facts)`. The regex is searched (`re.search`) in a leaf's path, its keys
joined by '/', as in 'encoder/layer_0/bias'; the first rule that matches decides. The '/value' at
the end of NNX's paths may be in a rule or not, see `matches`. Rules are given as a name in `RULES`,
or as a sequence of pairs whose second element is a `ParameterFacts` or a mapping of its fields:

>>> import jax, jax.numpy as jnp
>>> params = {'layers': {'kernel': jnp.ones((4, 8, 8)), 'bias': jnp.ones((4, 8))}}
>>> print(table(params, [('bias$', {'decay': False, 'adapt': False, 'layer_axes': (0,)}),
...                      ('^layers/', {'layer_axes': (0,)})]))
path           shape    dtype    count  decay  adapt  layer axes
layers/bias    (4,8)    float32     32  no     no     (0)
layers/kernel  (4,8,8)  float32    256  yes    yes    (0)
total: 2 leaves, 288 values; decay: 1 leaf, 256 values; adapt: 1 leaf, 256 values

Rates that fall from layer to layer are facts too, in a table that shows them where not all are 1:

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
class ParameterFacts:
    """Facts that an optimizer needs of one leaf; a rule gives them.

    Attributes:
      decay: weight decay is applied to it.
      adapt: its update is scaled by a trust ratio; without, the ratio is 1.
      layer_axes: the axes that stack layers, as the leading axis of a scanned Transformer. Norms
        reduce over the other axes, so that each stacked layer has its own trust ratio.
      rate_factor: its learning rate is the optimizer's times this, as if another optimizer with
        that rate had the leaf: what is multiplied by the rate, decoupled decay too, changes with
        it. Trust ratios do not, but where they read the rate (LARC's clip, LAMB's 'decoupled'
        decay); nor does a norm over all leaves, as in clipping.
      decay_factor: its weight decay is the optimizer's times this.
      matrix_axes: for optimizers of matrices, as `apollo` and `muon`: the axes that are a matrix's
        rows (inputs) and those that are its columns (outputs), several of them read as one, as
        ((0, 1, 2), (3,)) for the kernel of a convolution in Flax. () where the leaf is no matrix,
        as a table of embeddings. With the layer axes they are all axes. None where no rule says
        it: `muon` then goes by the leaf's name, see `matrices`; for `apollo` a leaf with two axes
        beside its layer axes is a matrix, and any other is none.
      axes_by_name: the matrix axes that go with the leaf's name; `resolve` fills them in where no
        rule gives `matrix_axes`.
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
            raise ValueError(f"layer_axes must be distinct axes counted from 0, not {axes!r}")
        # A frozen dataclass refuses plain assignment. Sorted, the last layer axis is the largest,
        # which `resolve` leans on.
        object.__setattr__(self, "layer_axes", tuple(sorted(axes)))
        if self.matrix_axes is not None:
            object.__setattr__(self, "matrix_axes", _matrix_axes(self.matrix_axes, axes))
        for name in ("rate_factor", "decay_factor"):
            value = getattr(self, name)
            # A bool is an int in Python; True as a factor would be a mistake.
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
            object.__setattr__(self, name, float(value))
        if not self.decay and self.decay_factor != 1.0:
            raise ValueError(
                f"decay_factor {self.decay_factor!r} has no meaning for what does not decay: give "
                "decay=False or a decay_factor, not both"
            )

    def matrix(self, num_axes: int, by_name: bool = True) -> MatrixAxes | None:
        """The rows and the columns of a leaf with so many axes; None where it is no matrix.

        With `by_name` false the leaf's name does not count.
        """
        if self.matrix_axes is not None:
            return self.matrix_axes or None
        if by_name and self.axes_by_name is not None:
            return self.axes_by_name or None
        # No rule says it: the leaf is a matrix if just two axes are left, in Flax's order (inputs,
        # outputs).
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
            "matrix_axes must be the axes of a matrix's rows and those of its columns, as "
            f"((0, 1), (2,)), or () for no matrix, not {given!r}"
        )
    rows, columns = map(tuple, sides)
    if not _are_axes([*rows, *columns, *layer_axes]):
        raise ValueError(
            f"matrix_axes {(rows, columns)} and layer_axes {tuple(layer_axes)} must name no axis "
            "twice"
        )
    return rows, columns


Rules = str | Sequence[tuple[str, ParameterFacts | Mapping[str, Any]]]


def _without(pattern: str, *, adapt: bool = False) -> tuple[tuple[str, ParameterFacts], ...]:
    """Rules that exempt what the pattern finds from decay, and from adaptation by default."""
    return (pattern, ParameterFacts(decay=False, adapt=adapt)), ("", ParameterFacts())


# A bias is 'bias' in Flax and Equinox, whose GRU has a 'bias_n' too, and 'b' in Haiku and GPT-2.
_BIASES = r"(^|/)(bias|bias_n|b)(/value)?$"  # NNX may end a path in '/value'
# Modules such as BatchNorm_0, layer_norm, norm_proj, bn1, init_bn, ln_f, rms.
_NORM = r"((?i:norm)[^/]*|(^|[/_])(bn|gn|ln|rms)\d*(_[^/]*)?)/"
# Leaves that only norms have: Flax's scale, others' gamma and beta, Haiku's offset.
_OF_NORMS = r"(^|/)(scale|gamma|beta|offset)(/value)?$"
# Equinox calls a norm's scale 'weight', as it does a matrix, and GPT-2 calls it 'g'. A norm that a
# list holds, as Equinox's 'layers/1/weight', has no name to be known by and needs a rule.
_LEAVES = rf"{_BIASES}|{_OF_NORMS}|{_NORM}(weight|g)(/value)?$"
_EXEMPT = re.compile(_LEAVES)
_NORMS = rf"{_NORM}|{_OF_NORMS}"

# Named rules fit any model, so one of them may match nothing. They leave matrix axes to `matrices`,
# which knows kernels, tables and output layers by their names.
RULES: dict[str, tuple[tuple[str, ParameterFacts], ...]] = {
    # LAMB's Algorithm 2 and LARS as printed: every tensor decays and adapts.
    "all": (("", ParameterFacts()),),
    # The working recipes for BERT and ResNet.
    "no_bias_no_norm": _without(_LEAVES),
    # NVIDIA's BERT in TensorFlow: these tensors do not decay, but every tensor adapts.
    "no_bias_no_norm_decay": _without(_LEAVES, adapt=True),
    # TensorFlow Addons' LAMB with BERT's exclusions LayerNorm, layer_norm and bias: what does not
    # decay does not adapt either, unless a second list is given.
    "bert": _without(_LEAVES),
    # The LAMB authors' ResNet-50 (fastalgo/imagenet_resnet50_lamb, optimization.py) excludes norms
    # and not biases. So does the L2 term beside RMSProp in tensorflow/tpu's EfficientNet.
    "resnet": _without(_NORMS),
    # LARS in tensorflow/tpu's EfficientNet skips batch_normalization, bias, beta and gamma.
    "efficientnet": _without(_LEAVES),
    # No list for the papers' LSTMs is known to us. Biases begin at 0, or at 1 for forget gates, so
    # their norms say nothing of how far a step may go.
    "lstm": _without(_BIASES),
}
DEFAULT_RULES = "all"


def resolve(params: Any, rules: Rules) -> Any:
    """Returns the facts of every leaf.

    Args:
      params: any pytree whose leaves have a shape: arrays or `jax.ShapeDtypeStruct`s.
      rules: a name in `RULES`, or a sequence of `(regex, facts)`, of which the first match decides.

    Returns:
      A pytree of `ParameterFacts` with the structure of `params`.

    Raises:
      ValueError: a leaf that no rule matches; a rule that decides no leaf, because it matches
        none, or because rules before it take all that it matches (not checked for named rules, nor
        in a tree without leaves, nor for a last rule that matches every leaf); a layer axis that
        the leaf does not have; matrix axes that, with the layer axes, are not all of the leaf's;
        rules that are not rules.

    Warns:
      UserWarning: instead of that error for a rule that decides nothing, where `params` are a part
        of a tree, as inside `optax.partition` and `optax.masked`. One list may serve all parts, so
        rules for the leaves that are hidden are no mistake; but where a whole subtree is hidden,
        its leaves are not known. Resolve the rules once for the whole tree to be sure.
    """
    compiled = _compile(rules)
    checks.check_arrays("params", params)
    leaves, treedef = jax.tree.flatten(params)
    paths = leaf_paths(params)
    facts = []
    for path, leaf in zip(paths, leaves, strict=True):
        taker = next((i for i, (regex, _) in enumerate(compiled) if matches(regex, path)), None)
        if taker is None:
            raise ValueError(f"no rule matches the parameter {path!r}: add a rule for it to rules")
        match = compiled[taker][1]
        num_axes = np.ndim(leaf)
        if match.layer_axes and match.layer_axes[-1] >= num_axes:
            raise ValueError(
                f"layer_axes {match.layer_axes} do not exist in the parameter {path!r}, "
                f"which has {num_axes} axes"
            )
        if match.matrix_axes:
            named = {*match.layer_axes, *match.matrix_axes[0], *match.matrix_axes[1]}
            if named != set(range(num_axes)):
                raise ValueError(
                    f"matrix_axes {match.matrix_axes} and layer_axes {match.layer_axes} are not "
                    f"all axes of the parameter {path!r}, which has {num_axes}"
                )
        facts.append(_named(match, path, num_axes))
    if paths and not isinstance(rules, str):
        hidden = _hidden_paths(params)
        # A rule for a leaf that another part of a partition holds is no mistake. A hidden subtree
        # has no paths of leaves to compare with, so here a mistake is a warning.
        for mistake in _idle_rules([regex for regex, _ in compiled], paths + hidden):
            if not hidden:
                raise ValueError(mistake)
            warnings.warn(
                f"{mistake}; hidden here by optax.partition or optax.masked: "
                f"{', '.join(hidden[:8])}{', ...' if len(hidden) > 8 else ''}",
                stacklevel=2,
            )
    return jax.tree.unflatten(treedef, facts)


@functools.lru_cache(maxsize=4096)  # every trace of an update asks again
def _named(facts: ParameterFacts, path: str, num_axes: int) -> ParameterFacts:
    """Returns facts with `axes_by_name` filled in."""
    if facts.matrix_axes is not None:
        return facts
    facts = copy.copy(facts)
    axes: MatrixAxes | tuple[()] = ()
    if not _EXEMPT.search(path):
        axes = matrices.axes_of(path, num_axes, facts.layer_axes)
    object.__setattr__(facts, "axes_by_name", axes)
    return facts


def _hidden_paths(params: Any) -> list[str]:
    """Paths of the leaves that a mask hides, and of hidden subtrees, whose leaves are unknown."""

    def is_hidden(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    # A `MaskedNode` is an empty container: without `is_leaf` it would have no path.
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_hidden)
    return [_joined(path) for path, node in leaves if is_hidden(node)]


def _idle_rules(regexes: list[re.Pattern], paths: list[str]) -> Iterator[str]:
    """Yields a sentence for each rule that decides no path."""
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
        # A last rule for whatever is left may find that nothing is.
        elif index not in takers and not (index == len(regexes) - 1 and len(matched) == len(paths)):
            first = matched[0]
            taker = takers[first]
            assert taker is not None  # a path that a rule matches has one
            yield (
                f"the rule {regex.pattern!r} decides nothing: rules before it take all that it "
                f"matches, as {regexes[taker].pattern!r} takes {paths[first]!r}"
            )


def check_rules(rules: Rules) -> None:
    """Raises ValueError for an unknown name, an invalid rule, or a regex that comes twice."""
    _compile(rules)


def leaf_paths(params: Any) -> list[str]:
    """Every leaf's keys joined by '/', in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return [_joined(path) for path, _ in leaves]


def _joined(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def matches(regex: str | re.Pattern, path: str) -> bool:
    """Returns whether a regex finds a leaf's path, with or without NNX's '/value' at its end.

    `nnx.Optimizer` calls `init` with the paths of variables, 'dense/bias/value', and `update` with
    the paths of their arrays, 'dense/bias'. One rule has to fit both, and a Linen model of the same
    names.

    >>> [matches('bias$', path) for path in ('dense/bias/value', 'dense/bias', 'bias/kernel')]
    [True, True, False]
    >>> [matches('bias/value$', path) for path in ('dense/bias/value', 'dense/bias')]
    [True, True]
    """
    regex = re.compile(regex)
    if regex.search(path) or regex.search(path.removesuffix("/value")):
        return True
    # Without this condition 'value$' would find every leaf of every model.
    return (
        regex.pattern[:-7] != ""
        and regex.pattern.endswith("/value$")
        and bool(regex.search(f"{path}/value"))
    )


def table(
    params: Any,
    rules: Rules,
    by_name: bool = False,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """The facts of every leaf as text: to log, to keep as a golden file, to compare on resume.

    Rows are sorted by path. Depends on paths, shapes, dtypes and facts only.

    Args:
      params: arrays or `jax.ShapeDtypeStruct`s.
      rules: see `resolve`.
      by_name: for an optimizer that goes by names: also show matrix axes that a leaf has by its
        name, where they are others than by the number of its axes.
      columns: titles of further columns, and their cells in the order of `jax.tree.leaves(params)`.

    Raises:
      ValueError: see `resolve`; `by_name` is not a bool, or `columns` is not a mapping.
    """
    checks.check_flag("by_name", by_name)
    checks.check_mapping("columns", columns)
    columns = columns or {}
    facts = jax.tree.leaves(resolve(params, rules))
    factors = [  # most tables have none, and those of older runs know none
        name
        for name in ("rate_factor", "decay_factor")
        if any(getattr(fact, name) != 1.0 for fact in facts)
    ]
    leaves = jax.tree.leaves(params)
    axes = [
        _shown_axes(fact, np.ndim(leaf), by_name) for leaf, fact in zip(leaves, facts, strict=True)
    ]
    shows_axes = any(shown is not None for shown in axes)
    rows = [
        (
            "path",
            "shape",
            "dtype",
            "count",
            "decay",
            "adapt",
            "layer axes",
            *(name.replace("_", " ") for name in factors),
            *(["matrix axes"] if shows_axes else []),
            *columns,
        )
    ]
    totals = {"total": [0, 0], "decay": [0, 0], "adapt": [0, 0]}
    # Sorted by path, the table does not depend on the order of a container's keys.
    for path, leaf, fact, shown, *more in sorted(
        zip(leaf_paths(params), leaves, facts, axes, *columns.values(), strict=True),
        key=lambda row: row[0],
    ):
        count = math.prod(np.shape(leaf))
        rows.append(
            (
                path,
                _axes(np.shape(leaf)),
                np.dtype(_dtype(leaf)).name,
                str(count),
                "yes" if fact.decay else "no",
                "yes" if fact.adapt else "no",
                _axes(fact.layer_axes) if fact.layer_axes else "-",
                *(f"{getattr(fact, name):.6g}" for name in factors),
                *([_matrix_text(shown)] if shows_axes else []),
                *more,
            )
        )
        for name, counted in (("total", True), ("decay", fact.decay), ("adapt", fact.adapt)):
            totals[name][0] += counted
            totals[name][1] += counted * count
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if rows[0][column] in ("count", "bytes") else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append(
        "; ".join(
            f"{name}: {leaves} {'leaf' if leaves == 1 else 'leaves'}, {values} values"
            for name, (leaves, values) in totals.items()
        )
    )
    return "\n".join(lines)


def _axes(values: Sequence[int]) -> str:
    return f"({','.join(map(str, values))})"


def _shown_axes(
    facts: ParameterFacts, num_axes: int, by_name: bool
) -> MatrixAxes | tuple[()] | None:
    if by_name and facts.adapt and facts.matrix(num_axes) != facts.matrix(num_axes, by_name=False):
        return facts.axes_by_name
    return facts.matrix_axes


def _matrix_text(axes: MatrixAxes | tuple[()] | None) -> str:
    if not axes:
        return "-" if axes is None else "none"
    return " x ".join(map(_axes, axes))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


def _compile(rules: Rules) -> list[tuple[re.Pattern, ParameterFacts]]:
    if isinstance(rules, str):
        if rules not in RULES:
            raise ValueError(f"rules {rules!r} are unknown; the named rules are {', '.join(RULES)}")
        rules = RULES[rules]
    if isinstance(rules, Mapping) or not isinstance(rules, Sequence):
        raise ValueError(
            f"rules must be a name of rules or a list of (regex, facts), not {rules!r}"
        )
    compiled = [_compile_rule(rule) for rule in rules]
    patterns = [regex.pattern for regex, _ in compiled]
    # `check_rules` has no parameters, so a rule that can never decide is found by its text alone.
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"the rule {pattern!r} is given twice; only the first would decide")
    return compiled


def _compile_rule(rule: Any) -> tuple[re.Pattern, ParameterFacts]:
    if not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], str):
        raise ValueError(f"rules: a rule must be a pair (regex, facts), not {rule!r}")
    pattern, facts = rule
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"the rule {pattern!r} is not a valid regular expression: {error}"
        ) from error
    if isinstance(facts, ParameterFacts):
        return regex, facts
    # A mapping, as config files have it.
    known = [field.name for field in dataclasses.fields(ParameterFacts) if field.init]
    try:
        facts = dict(facts)
    except (TypeError, ValueError):
        raise ValueError(
            f"the facts of the rule {pattern!r} must be a mapping of {', '.join(known)}, "
            f"not {facts!r}"
        ) from None
    for name in facts:
        if name not in known:
            raise ValueError(
                f"the rule {pattern!r} has the unknown fact {name!r}; known: {', '.join(known)}"
            )
    return regex, ParameterFacts(**facts)

"""Which leaves decay, which adapt and which axes stack layers: one table for the three.

A rule is a pair `(regex, facts)`. The regex is searched (`re.search`) in a leaf's path, its keys
joined by '/', as in 'encoder/layer_0/bias'; the first rule that matches decides. Rules are given
as the name of a preset in `RULES`, or as a sequence of pairs whose second element is a
`ParameterFacts` or a mapping of its fields:

>>> import jax, jax.numpy as jnp
>>> params = {'layers': {'kernel': jnp.ones((4, 8, 8)), 'bias': jnp.ones((4, 8))}}
>>> print(table(params, [('bias$', {'decay': False, 'adapt': False, 'layer_axes': (0,)}),
...                      ('^layers/', {'layer_axes': (0,)})]))
path           shape    dtype    count  decay  adapt  layer axes
layers/bias    (4,8)    float32     32  no     no     (0)
layers/kernel  (4,8,8)  float32    256  yes    yes    (0)
total: 2 leaves, 288 values; decay: 1 leaf, 256 values; adapt: 1 leaf, 256 values
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class ParameterFacts:
    """What an optimizer must know of one leaf.

    Attributes:
      decay: weight decay is applied to it.
      adapt: its update is scaled by a trust ratio; without, the ratio is 1.
      layer_axes: the axes that stack layers, as the leading axis of a scanned Transformer. Norms
        reduce over the other axes, so that each stacked layer has its own trust ratio.
    """

    decay: bool = True
    adapt: bool = True
    layer_axes: tuple[int, ...] = ()

    def __post_init__(self):
        for name in ("decay", "adapt"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        axes = self.layer_axes
        if not isinstance(axes, (tuple, list)) or not all(
            isinstance(axis, int) and axis >= 0 for axis in axes
        ) or len(set(axes)) != len(axes):
            raise ValueError(f"layer_axes must be distinct axes counted from 0, not {axes!r}")
        object.__setattr__(self, "layer_axes", tuple(sorted(axes)))


Rules = str | Sequence[tuple[str, ParameterFacts | Mapping[str, Any]]]


def _without(pattern: str, *, adapt: bool = False) -> tuple[tuple[str, ParameterFacts], ...]:
    """Rules by which what the pattern finds does not decay, nor adapt unless it is said."""
    return (pattern, ParameterFacts(decay=False, adapt=adapt)), ("", ParameterFacts())


# Flax names a norm's leaves scale and bias, others gamma and beta; NNX may end a path in '/value'.
_LEAVES = r"(^|/)(bias|scale|gamma|beta)(/value)?$"
# Modules such as BatchNorm_0, layer_norm, norm_proj, bn1, init_bn; and a leaf that only norms have.
_NORMS = r"(?i)norm[^/]*/|(^|[/_])bn\d*(_[^/]*)?/|(^|/)(scale|gamma|beta)(/value)?$"

# Presets fit any model, so a rule of theirs may match nothing.
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
    "lstm": _without(r"(^|/)bias(/value)?$"),
}
DEFAULT_RULES = "all"


def resolve(params: Any, rules: Rules) -> Any:
    """The facts of every leaf.

    Args:
      params: any pytree whose leaves have a shape: arrays or `jax.ShapeDtypeStruct`s.
      rules: a preset's name, or a sequence of `(regex, facts)`, of which the first match decides.

    Returns:
      A pytree of `ParameterFacts` with the structure of `params`.

    Raises:
      ValueError: a leaf that no rule matches; a rule that decides no leaf, because it matches
        none, or because rules before it take all that it matches (not checked for presets, nor in
        a tree without leaves, nor for a last rule that matches every leaf); a layer axis that the
        leaf does not have; rules that are not rules.
    """
    compiled = _compile(rules)
    leaves, treedef = jax.tree.flatten(params)
    paths = leaf_paths(params)
    facts, takers = [], []
    for path, leaf in zip(paths, leaves, strict=True):
        taker = next((i for i, (regex, _) in enumerate(compiled) if regex.search(path)), None)
        if taker is None:
            raise ValueError(f"no rule matches the parameter {path!r}: add a rule for it to rules")
        takers.append(taker)
        match = compiled[taker][1]
        num_axes = np.ndim(leaf)
        if match.layer_axes and match.layer_axes[-1] >= num_axes:
            raise ValueError(
                f"layer_axes {match.layer_axes} do not exist in the parameter {path!r}, "
                f"which has {num_axes} axes"
            )
        facts.append(match)
    # Inside optax.partition or a mask the other leaves are hidden, which one list may serve too.
    hidden = any(
        isinstance(node, optax.MaskedNode)
        for node in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    )
    if paths and not hidden and not isinstance(rules, str):
        _check_each_decides([regex for regex, _ in compiled], paths, takers)
    return jax.tree.unflatten(treedef, facts)


def _check_each_decides(regexes: list[re.Pattern], paths: list[str], takers: list[int]) -> None:
    """Raises ValueError for a rule by which no path is taken; `takers` has each path's rule."""
    for index, regex in enumerate(regexes):
        matched = [i for i, path in enumerate(paths) if regex.search(path)]
        if not matched:
            raise ValueError(
                f"the rule {regex.pattern!r} matches no parameter; the paths are "
                f"{', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"
            )
        # A last rule for whatever is left may find that nothing is.
        catch_all = index == len(regexes) - 1 and len(matched) == len(paths)
        if index not in takers and not catch_all:
            first = matched[0]
            raise ValueError(
                f"the rule {regex.pattern!r} decides nothing: rules before it take all that it "
                f"matches, as {regexes[takers[first]].pattern!r} takes {paths[first]!r}"
            )


def check_rules(rules: Rules) -> None:
    """Raises ValueError for an unknown preset, a rule that is none, or a regex that comes twice."""
    _compile(rules)


def leaf_paths(params: Any) -> list[str]:
    """Every leaf's keys joined by '/', in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def table(params: Any, rules: Rules) -> str:
    """The facts of every leaf as text: to log, to keep as a golden file, to compare on resume.

    Rows are sorted by path. Depends on paths, shapes, dtypes and facts only.
    """
    rows = [("path", "shape", "dtype", "count", "decay", "adapt", "layer axes")]
    facts = jax.tree.leaves(resolve(params, rules))
    totals = {"total": [0, 0], "decay": [0, 0], "adapt": [0, 0]}
    for path, leaf, fact in sorted(
        zip(leaf_paths(params), jax.tree.leaves(params), facts, strict=True),
        key=lambda row: row[0],
    ):
        count = math.prod(np.shape(leaf))
        rows.append((
            path, _axes(np.shape(leaf)), np.dtype(_dtype(leaf)).name, str(count),
            "yes" if fact.decay else "no", "yes" if fact.adapt else "no",
            _axes(fact.layer_axes) if fact.layer_axes else "-",
        ))
        for name, counted in (("total", True), ("decay", fact.decay), ("adapt", fact.adapt)):
            totals[name][0] += counted
            totals[name][1] += counted * count
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append("; ".join(
        f"{name}: {leaves} {'leaf' if leaves == 1 else 'leaves'}, {values} values"
        for name, (leaves, values) in totals.items()
    ))
    return "\n".join(lines)


def _axes(values: Sequence[int]) -> str:
    return f"({','.join(map(str, values))})"


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


def _compile(rules: Rules) -> list[tuple[re.Pattern, ParameterFacts]]:
    if isinstance(rules, str):
        if rules not in RULES:
            raise ValueError(f"rules {rules!r} is no preset; the presets are {', '.join(RULES)}")
        rules = RULES[rules]
    if isinstance(rules, Mapping) or not isinstance(rules, Sequence):
        raise ValueError(f"rules must be a preset's name or a list of (regex, facts): {rules!r}")
    compiled = [_compile_rule(rule) for rule in rules]
    patterns = [regex.pattern for regex, _ in compiled]
    for pattern in patterns:
        if patterns.count(pattern) > 1:
            raise ValueError(f"the rule {pattern!r} is given twice; only the first would decide")
    return compiled


def _compile_rule(rule: Any) -> tuple[re.Pattern, ParameterFacts]:
    if not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], str):
        raise ValueError(f"a rule must be a pair (regex, facts), not {rule!r}")
    pattern, facts = rule
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the rule {pattern!r} is no regular expression: {error}") from error
    if isinstance(facts, ParameterFacts):
        return regex, facts
    known = [field.name for field in dataclasses.fields(ParameterFacts)]
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

"""The fastest layout of a recipe's step on a slice: `--find=fastest`.

A layout is how the same update of the same batch is computed: under jit or shard_map, in
microbatches, with what is recomputed, with scanned layers, with what is split over which axes. Two
of them change more than the speed. Scanned layers draw other initial weights and masks of dropout
than unrolled ones, and bfloat16 gradients are rounded before they are added up.

What would change the mathematics is left alone: the size of BatchNorm's groups, and microbatches
where a group is the whole batch. Nor are rules made up: the mesh axis 'model' is tried where
config.parallel.rules split something over it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu import terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.topology import Topology
from lamb_tpu.errors import UserError
from lamb_tpu.plan.trials import HEAD, Answer, Trial, Trials, table
from lamb_tpu.plan.variants import Variants, changed, differences, flag
from lamb_tpu.run import overrides

ACCUMULATION = (1, 2, 4, 8, 16)
REMATS = ("none", "dots", "full")
_AXES = (1, 2, 4)  # sizes of the axes 'model' and 'sequence'


class Layout(NamedTuple):
    """A layout that was tried.

    Attributes:
      changes: the keys in which it differs from the config as given.
      trial: the outcome.
    """

    changes: dict[str, Any]
    trial: Trial

    @property
    def label(self) -> str:
        """The changes as text, without the rules that belong to scanned layers."""
        shown = [
            f"{key.removesuffix('.name').rpartition('.')[2]}={value}"
            for key, value in self.changes.items()
            if key != "optimizer.rules"
        ]
        return ", ".join(shown) or "as given"


def dimensions(variants: Variants, slice_: Topology) -> list[list[dict[str, Any]]]:
    """Returns what is searched: for each dimension its values, as changes of the config."""
    config = variants.config
    found: list[list[dict[str, Any]]] = [
        [{"parallel.backend": name} for name in ("jit", "shard_map")]
    ]
    if not _normalizes_batch(config):
        found.append([{"accumulation_steps": steps} for steps in ACCUMULATION])
    if _has(config, "model.remat"):
        found.append([{"model.remat": name} for name in REMATS])
    if _has(config, "model.scan_layers"):
        # The recipe's argument brings the rules that give each stacked layer a ratio of its own.
        scanned = variants.by_argument("scan=true")
        found.append(
            [
                {"model.scan_layers": False},
                scanned if scanned.get("model.scan_layers") else {"model.scan_layers": True},
            ]
        )
    whole: dict[str, Any] = {"parallel.optimizer_state": "replicated"}
    split: dict[str, Any] = {"parallel.optimizer_state": "zero1"}
    found.append(
        [
            whole,
            split,
            *(
                # The state's gathers then stay on a chip, or in a row of the torus.
                split | {"mesh.data": -1, "mesh.fsdp": size}
                for size in _rows(slice_)
            ),
        ]
    )
    found.append(
        [
            {"parallel.exchange.name": "float32"},
            # Under jit the compiler chooses the dtype.
            {"parallel.exchange.name": "bfloat16", "parallel.backend": "shard_map"},
        ]
    )
    if any("model" in rule[1] for rule in config.parallel.rules):
        found.append([_split("model", size) for size in _AXES])
    if _has(config, "model.num_heads"):
        found.append([_split("sequence", size) for size in _AXES])
    return found


def _split(axis: str, size: int) -> dict[str, Any]:
    """Returns the changes for a mesh axis besides the batch's, which shard_map does not split."""
    changes: dict[str, Any] = {"mesh.data": -1, f"mesh.{axis}": size}
    return changes | {"parallel.backend": "jit"} if size > 1 else changes


def most(variants: Variants, slice_: Topology) -> int:
    """Returns the largest number of plans of a search."""
    return 1 + sum(len(values) for values in dimensions(variants, slice_))


def find(variants: Variants, topology: str, trials: Trials) -> Answer:
    """Returns the fastest layout that fits, and the table of those that were tried.

    One dimension after the other is searched, with the others at the best so far.

    Args:
      variants: the recipe.
      topology: name of the slice.
      trials: makes the plans, at most `most`.

    Raises:
      UserError: the config as given is refused.
    """
    given = variants.config
    tried = [Layout({}, trials.first(given, topology, "the config as given"))]
    best, config = tried[0], given
    for values in dimensions(variants, topology_lib.topology(topology)):
        base = config
        for value in values:
            candidate = changed(base, value)
            changes = differences(given, candidate)
            if any(changes == layout.changes for layout in tried):
                continue
            label = Layout(changes, best.trial).label
            tried.append(Layout(changes, trials.make(candidate, topology, label)))
            if tried[-1].trial.expected < best.trial.expected:
                best, config = tried[-1], candidate
    return _answer(topology, tried, best)


def _answer(topology: str, tried: list[Layout], best: Layout) -> Answer:
    rows = []
    for layout in tried:
        cells = layout.trial.cells()
        rows.append(((*cells, *[""] * (len(HEAD) - len(cells)), layout.label), layout.trial))
    flags = [flag(key, value) for key, value in best.changes.items()]
    first, fastest = tried[0].trial, best.trial
    if not fastest.fits:
        line = f"none of the {len(tried)} layouts fits on {topology}"
    elif not flags:
        line = (
            f"the config as given is the fastest of the {len(tried)} layouts that were tried on "
            f"{topology}: {fastest.describe()}"
        )
    else:
        line = f"the fastest layout on {topology}: {fastest.describe()}, {gain(first, fastest)}"
    lines = [table((*HEAD, "layout"), rows, right=(1,)), terminal.fit(line)]
    # Flags are copied, so they are not wrapped.
    lines += ["add " + " ".join(flags)] if flags else []
    return Answer(
        "\n".join(lines),
        {
            "topology": topology,
            "find": "fastest",
            "decision": line,
            "flags": flags,
            "changes": best.changes,
            "trials": [{"changes": each.changes} | each.trial.as_json() for each in tried],
        },
    )


def gain(first: Trial, fastest: Trial) -> str:
    """Returns what a layout gains over the config as given, and how sure that is."""
    if first.step_seconds is None or fastest.step_seconds is None or not first.fits:
        return "where the config as given does not fit"
    saved = first.expected - fastest.expected
    text = (
        f"{1e3 * saved:.3g} ms ({100 * saved / first.expected:.2g} %) less than the config as given"
    )
    if fastest.step_seconds[2] < first.step_seconds[0]:
        return text
    # Both intervals are made of the same three sets of the network's constants.
    always = all(
        ours < theirs for ours, theirs in zip(fastest.step_seconds, first.step_seconds, strict=True)
    )
    return f"{text}, a gain inside the network's interval" + (
        ", but at both of its ends too" if always else ""
    )


def _rows(slice_: Topology) -> Iterator[int]:
    """Yields the devices of a chip and of a row of the torus, where they are some but not all."""
    cores = slice_.generation.devices
    for size in dict.fromkeys((cores, cores * slice_.shape[0])):
        if 1 < size < slice_.num_devices:
            yield size


def _has(config: ConfigDict, key: str) -> bool:
    try:
        overrides.kind_of(config, key)
    except UserError:
        return False
    return True


def _normalizes_batch(config: ConfigDict) -> bool:
    """Returns whether BatchNorm's groups are the whole batch, so of a microbatch other ones."""
    if not _has(config, "model.group_size"):
        return False
    fields: Mapping[str, Any] = config.model
    # The dense network has BatchNorm only where it is asked for.
    has_norm = fields.get("batch_norm", not _has(config, "model.batch_norm"))
    return bool(has_norm) and fields.get("group_size") is None

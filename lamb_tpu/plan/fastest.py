"""Search for the fastest layout of a recipe's step on a slice: `--find=fastest`.

A layout is a way to compute the same update of the same batch: a choice of backend, microbatches,
recomputation, scanned layers, sharded state, gradient dtype and mesh axes. Two of these change more
than the speed: scanned layers draw other initial weights and dropout masks than unrolled layers, and
bfloat16 gradients are rounded before they are summed.

The search does not vary settings that change the mathematics: the size of BatchNorm groups, and the
number of microbatches if a group is the full batch. It adds no sharding rules, so it tries the mesh
axis 'model' only if config.parallel.rules shard parameters over this axis.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from lamb_tpu import terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.topology import Topology
from lamb_tpu.plan.trials import HEAD, Answer, Trial, Trials, table
from lamb_tpu.plan.variants import Variants, differences, flag
from lamb_tpu.run.categories import REGISTRIES
from lamb_tpu.spec import Component, changed

ACCUMULATION = (1, 2, 4, 8, 16)
REMATS = ("none", "dots", "full")
_AXES = (1, 2, 4)  # sizes of the axes 'model' and 'sequence'


class TriedLayout(NamedTuple):
    """A layout that was tried, with the keys in which it differs from the config as given."""

    changes: dict[str, Any]
    trial: Trial

    @property
    def label(self) -> str:
        """The changes as text, without the optimizer's rules, which change with `scan_layers`."""
        shown = [
            f"{key.removesuffix('.name').rpartition('.')[2]}={value}"
            for key, value in self.changes.items()
            if key != "optimizer.rules"
        ]
        return ", ".join(shown) or "as given"


def dimensions(variants: Variants, slice_: Topology) -> list[list[dict[str, Any]]]:
    """Returns the values of each dimension of the search, as changes of the config."""
    config = variants.config
    searched: list[list[dict[str, Any]]] = [
        [{"parallel.backend": name} for name in ("jit", "shard_map")]
    ]
    fields = REGISTRIES["model"].keys_of(config.model.name)
    if not _normalizes_batch(config.model, fields):
        searched.append([{"accumulation_steps": steps} for steps in ACCUMULATION])
    if "remat" in fields:
        searched.append([{"model.remat": name} for name in REMATS])
    if "scan_layers" in fields:
        # The recipe's argument `scan` also sets the rules that give each stacked layer its trust ratio.
        scanned = variants.by_argument("scan=true")
        searched.append(
            [
                {"model.scan_layers": False},
                scanned if scanned.get("model.scan_layers") else {"model.scan_layers": True},
            ]
        )
    replicated: dict[str, Any] = {"parallel.optimizer_state": "replicated"}
    sharded: dict[str, Any] = {"parallel.optimizer_state": "zero1"}
    searched.append(
        [
            replicated,
            sharded,
            *(
                # All-gathers of the state then run within a chip, or within a row of the torus.
                sharded | {"mesh.data": -1, "mesh.fsdp": size}
                for size in _rows(slice_)
            ),
        ]
    )
    searched.append(
        [
            {"parallel.exchange.name": "float32"},
            # bfloat16 needs shard_map, because under jit the compiler chooses the dtype.
            {"parallel.exchange.name": "bfloat16", "parallel.backend": "shard_map"},
        ]
    )
    if any("model" in rule[1] for rule in config.parallel.rules):
        searched.append([_split("model", size) for size in _AXES])
    if "num_heads" in fields:
        searched.append([_split("sequence", size) for size in _AXES])
    return searched


def _split(axis: str, size: int) -> dict[str, Any]:
    """Returns the changes that add a mesh axis, which needs jit: shard_map shards only the batch."""
    changes: dict[str, Any] = {"mesh.data": -1, f"mesh.{axis}": size}
    return changes | {"parallel.backend": "jit"} if size > 1 else changes


def most(variants: Variants, slice_: Topology) -> int:
    """Returns the largest number of plans that a search can make."""
    return 1 + sum(len(values) for values in dimensions(variants, slice_))


def find(variants: Variants, topology: str, trials: Trials) -> Answer:
    """Returns the fastest layout that fits, with a table of all layouts that were tried.

    Varies one dimension at a time, with the best values so far in all other dimensions. `trials`
    makes at most `most` plans on the slice named `topology`.

    Raises:
      UserError: the config as given is rejected.
    """
    given = variants.config
    tried = [TriedLayout({}, trials.first(given, topology, "the config as given"))]
    best, config = tried[0], given
    for values in dimensions(variants, topology_lib.topology(topology)):
        base = config
        for value in values:
            candidate = changed(base, value)
            changes = differences(given, candidate)
            if any(changes == layout.changes for layout in tried):
                continue
            label = TriedLayout(changes, best.trial).label
            tried.append(TriedLayout(changes, trials.make(candidate, topology, label)))
            if tried[-1].trial.expected < best.trial.expected:
                best, config = tried[-1], candidate
    return _answer(topology, tried, best)


def _answer(topology: str, tried: list[TriedLayout], best: TriedLayout) -> Answer:
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
    # Do not wrap the flags: users copy them.
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
    """Describes how much faster a layout is than the config as given, and how certain that is."""
    if first.step_seconds is None or fastest.step_seconds is None or not first.fits:
        return "and the config as given does not fit"
    saved = first.expected - fastest.expected
    text = (
        f"{1e3 * saved:.3g} ms ({100 * saved / first.expected:.2g} %) less than the config as given"
    )
    if fastest.step_seconds[2] < first.step_seconds[0]:
        return text
    # Both intervals come from the same three sets of constants, so compare bound by bound.
    always = all(
        ours < theirs for ours, theirs in zip(fastest.step_seconds, first.step_seconds, strict=True)
    )
    return f"{text}; the two intervals overlap" + (
        ", but this layout is also faster at both ends" if always else ""
    )


def _rows(slice_: Topology) -> Iterator[int]:
    """Yields the numbers of devices on a chip and in a row of the torus, except 1 and the full slice."""
    cores = slice_.generation.devices
    for size in dict.fromkeys((cores, cores * slice_.shape[0])):
        if 1 < size < slice_.num_devices:
            yield size


def _normalizes_batch(model: Component, fields: Collection[str]) -> bool:
    """Returns whether BatchNorm normalizes over the full batch, which microbatches would change.

    `fields` has the names of all fields of this type of model.
    """
    # A model with the field batch_norm, such as the dense network, has BatchNorm only if the field is set.
    has_norm = model.fields.get("batch_norm", "batch_norm" not in fields)
    return "group_size" in fields and bool(has_norm) and model.fields.get("group_size") is None

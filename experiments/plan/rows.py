"""Published runs (`published.toml`), and times of their programs from the TPU compiler (rows.json).

The time that a program waits for the network is almost linear in the network constants, because
these programs overlap little or no communication with computation. A row therefore stores, for each
phase of a run, the computation time and three network times: that of links at full bandwidth, that of
hops of one microsecond, and that of collectives of one microsecond. The constants are fitted to these
numbers, so programs need not be compiled again.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from lamb_tpu import overrides
from lamb_tpu.cost.network import Constants
from lamb_tpu.plan.report import Plan
from lamb_tpu.plan.variants import differences
from lamb_tpu.spec import Spec, changed, of_flat

FOLDER = pathlib.Path(__file__).parent
LOGGED = "lamb_tpu, "  # prefix of the names of logged runs' programs
_OPTIONAL = ("evaluated", "seconds", "all_reduce", "reported_updates", "reported_seconds")
_FREE = 1e12  # an efficiency so high that bytes take no time
# Links alone, one microsecond for each hop, one microsecond for each collective.
BASIS = (
    Constants(1.0, 0.0, 0.0, 1.0, 0.0),
    Constants(_FREE, 1e-6, 0.0, _FREE, 0.0),
    Constants(_FREE, 0.0, 1e-6, _FREE, 0.0),
)


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a run: one program.

    Attributes:
      recipe: the config with its arguments, as --config takes it; '' for the default config.
      overrides: values of the config's keys.
      updates: number of updates.
      label: name of the phase; '' names it by its recipe and overrides.
      examples: number of training examples, for a data set without stored metadata.
    """

    recipe: str
    overrides: Mapping[str, Any]
    updates: float
    label: str = ""
    examples: int | None = None

    @property
    def name(self) -> str:
        """The label, or the recipe with its overrides."""
        if self.label:
            return self.label
        changes = (f"{key}={value}" for key, value in self.overrides.items())
        return ", ".join([self.recipe, *changes])

    def config(self) -> Spec:
        """Returns the config."""
        if not self.recipe:
            return of_flat(self.overrides)
        return changed(overrides.load(self.recipe), self.overrides)

    @functools.cached_property
    def _changes(self) -> dict[str, Any]:
        # Omit defaults: a config key that is added later must not change the keys of stored phases.
        return differences(Spec(), self.config())

    def key(self, topology: str) -> str:
        """Returns a hash of the slice and the config; rows.json stores the phase under this key."""
        text = json.dumps([topology, self._changes], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a source.

    Attributes:
      source: name of the source.
      topology: name of the slice.
      phases: the programs, in order.
      evaluated: number of evaluated examples.
      seconds: measured time; None if it is unknown.
      all_reduce: measured share of the time in all-reduce; None if unknown.
      reported_updates: updates of the full run whose time the source reports; None if it reports only
        `seconds`.
      reported_seconds: the time of the full run, including start-up.
      cells: table, cell and metric of each value that this run gives in the papers' tables, see `tables`.
    """

    source: str
    topology: str
    phases: tuple[Phase, ...]
    evaluated: int = 0
    seconds: float | None = None
    all_reduce: float | None = None
    reported_updates: float | None = None
    reported_seconds: float | None = None
    cells: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        """The source and slice, with the first phase's argument."""
        return f"{self.source}, {self.topology} ({self.phases[0].recipe.partition(':')[2]})"


@dataclasses.dataclass(frozen=True)
class Source:
    """A program of one team, and its published runs.

    Attributes:
      name: name of the program.
      where: where the times of its runs come from.
      known: seen, recalled or planned.
      gap: how our config differs from the program.
      runs: the published runs.
    """

    name: str
    where: str
    known: str
    gap: str
    runs: tuple[Run, ...]


def load_sources(path: pathlib.Path = FOLDER / "published.toml") -> tuple[Source, ...]:
    """Returns the sources of a file."""
    return tuple(map(_source, tomllib.loads(path.read_text())["sources"]))


def _source(entry: Mapping[str, Any]) -> Source:
    def phases(run: Mapping[str, Any]) -> Iterator[Phase]:
        arguments, overrides = run["arguments"], run.get("overrides", {})
        changes = run.get("part_overrides", [overrides] * len(arguments))
        for argument, phase_overrides, updates in zip(
            arguments, changes, run["updates"], strict=True
        ):
            separator = "," if ":" in entry["config"] else ":"
            recipe = f"{entry['config']}{separator}{argument}"
            yield Phase(recipe, phase_overrides, updates)

    runs = tuple(
        Run(
            entry["name"],
            run["topology"],
            tuple(phases(run)),
            **{key: run[key] for key in _OPTIONAL if key in run},
            cells=tuple((table, cell, metric) for table, cell, metric in run.get("cells", ())),
        )
        for run in entry["runs"]
    )
    return Source(entry["name"], entry["where"], entry["known"], entry["gap"], runs)


def measure(plan: Plan, key: str) -> dict[str, Any]:
    """Returns the figures of a phase's plan that rows.json stores.

    `compute` and `basis` are seconds per update. `basis` has the time that the computation waits for the
    network with each of `BASIS`. The two fields are missing if the program does not fit into memory.
    """
    row: dict[str, Any] = {
        "key": key,
        "devices": plan.topology.num_devices,
        "chips": plan.topology.num_chips,
        "batch_size": plan.batch_size,
        "fits": plan.fits,
        "needed_bytes": plan.needed,
        "usable_bytes": plan.topology.generation.usable,
        "compile_seconds": plan.compile_seconds,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
    }
    if plan.fits:
        timelines = plan.timelines(BASIS)
        row |= {
            "compute": timelines[0].compute,
            "basis": [each.exposed for each in timelines],
            "hidden": timelines[0].network - timelines[0].exposed,
        }
    return row


def load_rows(path: pathlib.Path = FOLDER / "rows.json") -> dict[str, dict[str, Any]]:
    """Returns the compiled phases by key; {} if the file is missing."""
    return json.loads(path.read_text()) if path.exists() else {}

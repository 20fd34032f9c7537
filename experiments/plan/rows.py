"""Published runs and what the TPU compiler and the links say of each: `published.toml`, rows.json.

The time that a program waits for the network is almost linear in the constants of the network:
nothing of it runs beside computation in these programs, or little. A row therefore keeps, for each
part of a run, the computation and three times: of the links at full bandwidth, of a microsecond for
each hop, and of a microsecond for each collective. Constants are fitted to these, and no program is
read again.
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

from ml_collections import ConfigDict

from lamb_tpu import cli
from lamb_tpu.config import base_config, unflatten
from lamb_tpu.cost.network import Constants
from lamb_tpu.plan.report import Plan
from lamb_tpu.plan.variants import differences

FOLDER = pathlib.Path(__file__).parent
LOGGED = "lamb_tpu, "  # what the names of the programs of logged runs begin with
_OPTIONAL = ("evaluated", "seconds", "all_reduce", "reported_updates", "reported_seconds")
_FREE = 1e12  # an efficiency so high that the bytes take no time
# Links alone, a microsecond for each hop, a microsecond for each collective.
BASIS = (
    Constants(1.0, 0.0, 0.0, 1.0, 0.0),
    Constants(_FREE, 1e-6, 0.0, _FREE, 0.0),
    Constants(_FREE, 0.0, 1e-6, _FREE, 0.0),
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a run: one program.

    Attributes:
      recipe: the config with its arguments, as --config takes it; '' for the config of defaults.
      overrides: values of the config's keys.
      updates: number of updates.
      label: its name, if recipe and overrides are not.
      examples: number of training examples, for a data set whose facts are not known.
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

    def config(self) -> ConfigDict:
        """Returns the config."""
        if not self.recipe:
            return unflatten(self.overrides)
        config = cli.load_recipe(self.recipe)
        config.update_from_flattened_dict(dict(self.overrides))
        return config

    @functools.cached_property
    def _changes(self) -> dict[str, Any]:
        # A key that is new to all configs, and has its default here, changes nothing.
        return differences(base_config(), self.config())

    def key(self, topology: str) -> str:
        """Returns what a kept part must have been made from: slice and config."""
        text = json.dumps([topology, self._changes], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a source.

    Attributes:
      source: name of the source.
      topology: name of the slice.
      parts: the programs, in order.
      evaluated: examples evaluated meanwhile.
      seconds: measured time; None if nobody ran it.
      all_reduce: measured share of the time that is in all-reduce; None if unknown.
      reported_updates: updates of the whole run, whose time the source reports; None if it does not
        report another time than `seconds`.
      reported_seconds: that time, with start-up.
    """

    source: str
    topology: str
    parts: tuple[Part, ...]
    evaluated: int = 0
    seconds: float | None = None
    all_reduce: float | None = None
    reported_updates: float | None = None
    reported_seconds: float | None = None

    @property
    def name(self) -> str:
        """Source and slice, with the first part's argument."""
        return f"{self.source}, {self.topology} ({self.parts[0].recipe.partition(':')[2]})"


@dataclasses.dataclass(frozen=True)
class Source:
    """A program of a team.

    Attributes:
      name: its name.
      where: where its times stand.
      known: seen, recalled or planned.
      gap: in what the config differs from it.
      runs: its runs.
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
    def parts(run: Mapping[str, Any]) -> Iterator[Part]:
        arguments, overrides = run["arguments"], run.get("overrides", {})
        changes = run.get("part_overrides", [overrides] * len(arguments))
        for argument, of_part, updates in zip(arguments, changes, run["updates"], strict=True):
            separator = "," if ":" in entry["config"] else ":"
            recipe = f"{entry['config']}{separator}{argument}"
            yield Part(recipe, of_part, updates)

    runs = tuple(
        Run(
            entry["name"],
            run["topology"],
            tuple(parts(run)),
            **{key: run[key] for key in _OPTIONAL if key in run},
        )
        for run in entry["runs"]
    )
    return Source(entry["name"], entry["where"], entry["known"], entry["gap"], runs)


def measure(plan: Plan, key: str) -> dict[str, Any]:
    """Returns what is kept of a part's plan.

    Seconds are of one update: `compute`, and in `basis` the time by each of `BASIS` for which the
    computation waits. A program that does not fit has neither.
    """
    kept: dict[str, Any] = {
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
        found = plan.timelines(BASIS)
        kept |= {
            "compute": found[0].compute,
            "basis": [each.exposed for each in found],
            "hidden": found[0].network - found[0].exposed,
        }
    return kept


def load_kept(path: pathlib.Path = FOLDER / "rows.json") -> dict[str, dict[str, Any]]:
    """Returns the parts that were compiled, by their keys; none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}

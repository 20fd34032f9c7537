"""The runs of a table, and the config of each."""

import ast
import functools
import hashlib
import json
import os
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lamb_tpu import overrides as overrides_lib
from lamb_tpu.config import FREE_KEYS, differences
from lamb_tpu.data import folders
from lamb_tpu.errors import UserError, listed
from lamb_tpu.reproduce.tables import Cell, Scale, Table
from lamb_tpu.spec import Spec, flatten

# Keys that do not change what a run measures: free keys, and the seed.
_FREE = (*FREE_KEYS, "seed")
# A value that starts with this is a path below the folder of the data sets.
DATA = "DATA/"


class Job(NamedTuple):
    """One run: a cell of a table at a scale, with a random seed.

    Attributes:
      factor: one of `Tuning.factors` if the run belongs to a search; None if it measures the cell.
      chosen: for a measurement after a search, the best factor of the search.
    """

    table: Table
    scale: Scale
    cell: Cell
    seed: int
    factor: float | None = None
    chosen: float = 1.0

    @property
    def name(self) -> str:
        """Name of the run's workdir, below the folder of the table."""
        search = "" if self.factor is None else f"-search{self.factor:g}"
        return f"{self.cell.name}-{self.scale.name}{search}-seed{self.seed}"

    @property
    def key(self) -> tuple[str, str, int, float | None]:
        """Key of the run's record: scale, cell, seed and factor."""
        return self.scale.name, self.cell.name, self.seed, self.factor


class JobStage(NamedTuple):
    """One training run of a job: a recipe in the syntax of --config, and config overrides."""

    recipe: str
    overrides: Mapping[str, Any]
    cpu_devices: int = 1

    def config(self) -> Spec:
        """Returns the config."""
        return overrides_lib.load(self.recipe, self.overrides)

    def arguments(self, workdir: str, init_from: str | None = None) -> list[str]:
        """Returns the arguments of `lamb_tpu.train`, except those about the machine.

        `init_from` is the workdir of the previous stage.
        """
        flags = [overrides_lib.flag(key, value) for key, value in self.overrides.items()]
        start = [] if init_from is None else [f"--config.init_from={init_from}"]
        return [f"--config={self.recipe}", *flags, *start, f"--workdir={workdir}"]

    def command(
        self, workdir: str, init_from: str | None = None, quote: Callable[[str], str] = shlex.quote
    ) -> str:
        """Returns the shell command that trains the stage on this machine; `quote` quotes each word."""
        words = ["python", "-m", "lamb_tpu.train", *self.arguments(workdir, init_from)]
        if self.cpu_devices > 1:
            words.append(f"--cpu-devices={self.cpu_devices}")
        return " ".join(map(quote, words))


def stages(
    job: Job, data: str | os.PathLike[str] | None = None, more: Mapping[str, Any] = {}
) -> list[JobStage]:
    """Returns the stages of a job, in order; each stage starts from the weights of the previous stage.

    Args:
      job: the job.
      data: folder that contains the folders of `Scale.data`; None if data sets are downloaded.
      more: additional overrides of every stage, with keys that change no result.
    """
    result = []
    scale, cell, tuning = job.scale, job.cell, job.table.tuning
    recipes = cell.stages or scale.stages
    if cell.stages and scale.name == "smoke":
        recipes = tuple(overrides_lib.with_argument(recipe, "smoke") for recipe in recipes)
    data_folders = scale.data[-len(recipes) :]
    over_cells = scale.over_cells[-len(recipes) :] or ({},) * len(recipes)
    for number, recipe in enumerate(recipes):
        changed: dict[str, Any] = {}
        if number == 0 and cell.argument:
            recipe = overrides_lib.with_argument(recipe, cell.argument)
        if number == 0:
            changed |= cell.first
        if number == len(recipes) - 1:
            changed |= {**scale.overrides, **cell.overrides}
            if tuning is not None:
                factor = job.chosen if job.factor is None else job.factor
                value = flatten(JobStage(recipe, changed).config()).get(tuning.key)
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise UserError(
                        f"{job.table.path}: tuning.key",
                        tuning.key,
                        f"has the value {value!r} in cell {cell.name}, not a number",
                        "use a key whose value is a number",
                    )
                changed[tuning.key] = value * factor
                if job.factor is not None:
                    changed |= {**tuning.overrides, **cell.search}
        changed |= {**over_cells[number], "seed": job.seed, **more}
        if data is not None:
            if data_folders[number]:
                name = changed.get("data.name") or _data_name(recipe)
                changed[folders.key_of(name)] = os.path.join(data, data_folders[number])
            changed = {
                key: os.path.join(data, value.removeprefix(DATA))
                if isinstance(value, str) and value.startswith(DATA)
                else value
                for key, value in changed.items()
            }
        result.append(JobStage(recipe, changed, scale.cpu_devices))
    return result


def stage_folders(folder: pathlib.Path, stages: Sequence[JobStage]) -> list[pathlib.Path]:
    """Returns the workdir of each stage of a run."""
    if len(stages) == 1:
        return [folder]
    return [folder / f"stage_{number}" for number in range(1, len(stages) + 1)]


def commands(
    folder: pathlib.Path, stages: Sequence[JobStage], quote: Callable[[str], str] = shlex.quote
) -> list[str]:
    """Returns the commands of the stages; each stage starts from the weights of the previous stage."""
    folders = list(map(str, stage_folders(folder, stages)))
    return [
        stage.command(each, before, quote)
        for stage, each, before in zip(stages, folders, [None, *folders])
    ]


@functools.cache  # the report calls this for every cell
def _data_name(recipe: str) -> str:
    return overrides_lib.load(recipe).data.name


def free_values(flags: Sequence[str]) -> dict[str, Any]:
    """Parses flags for keys that change no result (see `FREE_KEYS`), such as --config.log.every=X."""
    values: dict[str, Any] = {}
    for flag in flags:
        key, separator, text = flag.removeprefix("--config.").partition("=")
        if not separator:
            raise UserError(flag, problem="has no value", remedy=f"use --config.{key}=VALUE")
        if not key.startswith(FREE_KEYS):
            raise UserError(
                f"--config.{key}",
                text,
                "can change what a table measures, so only the table sets it",
                f"use keys that begin with {listed(sorted(FREE_KEYS))}",
            )
        try:
            values[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):  # an unquoted word or duration
            values[key] = text
    return values


def flat_configs(configs: Sequence[Spec]) -> list[dict[str, Any]]:
    """Returns the flattened configs of a job's stages, without free keys and the seed."""
    return [
        {key: value for key, value in flatten(config).items() if not key.startswith(_FREE)}
        for config in configs
    ]


def config_hash(flat: Sequence[Mapping[str, Any]]) -> str:
    """Returns the hash of configs made by `flat_configs`."""
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:12]


def changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each key that differs; a key that one side lacks has its default there."""
    if len(old) != len(new):
        return [f"{len(old)} stages there, {len(new)} now"]
    return [
        line
        for before, now in zip(old, new)
        for line in differences(_complete(before, now), _complete(now, before), _FREE)
    ]


def _complete(flat: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flattened config, completed by defaults for the keys that only the other config has.

    Configs of older versions lack keys that were added later.
    """
    result = flatten(Spec())
    for section in overrides_lib.SECTIONS:
        prefix = f"{section}."
        missing = {key for key in other.keys() - flat.keys() if key.startswith(prefix)}
        if missing:
            defaults = overrides_lib.defaults_of_stored(section, flat)
            known = {f"{prefix}{key}": value for key, value in defaults.items()}
            result |= flatten({key: known[key] for key in missing & known.keys()})
    return result | dict(flat)

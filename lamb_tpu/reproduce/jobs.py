"""The runs that a table asks for, and the config of each."""

import hashlib
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from lamb_tpu import cli
from lamb_tpu.config import (
    FREE_KEYS,
    base_config,
    check_keys,
    check_values,
    differences,
    flatten,
    renamed,
    section_of,
)
from lamb_tpu.errors import UserError
from lamb_tpu.reproduce.tables import Cell, Scale, Table
from lamb_tpu.run import overrides as overrides_lib

# Free keys and the seed do not change which setting a run measures.
_FREE = (*FREE_KEYS, "seed")
# A value that begins so is a path below the folder of the data sets.
_DATA = "DATA/"


class Job(NamedTuple):
    """One run: a cell of a table at a scale, with a seed.

    Attributes:
      table, scale, cell: what it measures.
      seed: of the run.
      factor: of `Tuning.factors` for a run that searches, None for a run that measures.
      chosen: of a run that measures after a search, the factor that the search found best.
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
        """Key of its record: scale, cell, seed and factor."""
        return self.scale.name, self.cell.name, self.seed, self.factor


class Stage(NamedTuple):
    """One training run of a job.

    Attributes:
      recipe: as --config takes it.
      overrides: the keys of its config that the run changes.
      cpu_devices: see `Scale`.
    """

    recipe: str
    overrides: Mapping[str, Any]
    cpu_devices: int = 1

    def config(self) -> ConfigDict:
        """Returns the config.

        Raises:
          UserError: there is no such recipe, or a key is wrong.
        """
        config = cli.load_recipe(self.recipe)
        own, rest = overrides_lib.take(self.flags())
        overrides_lib.apply(config, own)
        for item in rest:
            key = item.partition("=")[0].removeprefix("--config.")
            _assign(config, key, self.overrides[key])
        check_keys(config)
        check_values(config)
        return config.lock()

    def flags(self) -> list[str]:
        """Returns the overrides as flags of `lamb_tpu.train`."""
        return [f"--config.{key}={_text(value)}" for key, value in self.overrides.items()]

    def command(self, workdir: str) -> str:
        """Returns the command that trains it, for a shell."""
        devices = [f"--cpu_devices={self.cpu_devices}"] if self.cpu_devices > 1 else []
        return " ".join(
            map(
                shlex.quote,
                [
                    "python",
                    "-m",
                    "lamb_tpu.train",
                    f"--config={self.recipe}",
                    *self.flags(),
                    *devices,
                    f"--workdir={workdir}",
                ],
            )
        )


def stages(job: Job, data: pathlib.Path | None = None) -> list[Stage]:
    """Returns the training runs of a job, in order; each starts from the one before.

    Args:
      job: the job.
      data: the folder that holds the folders of `Scale.data`; None: data sets are downloaded.
    """
    found = []
    scale, cell, tuning = job.scale, job.cell, job.table.tuning
    recipes = cell.stages or scale.stages
    folders = scale.data[-len(recipes) :]
    for number, recipe in enumerate(recipes):
        changed: dict[str, Any] = {}
        if number == 0 and cell.argument:
            recipe += f"{',' if ':' in recipe else ':'}{cell.argument}"
        if number == 0:
            changed |= cell.first
        if number == len(recipes) - 1:
            changed |= {**scale.overrides, **cell.overrides}
            if tuning is not None:
                factor = job.chosen if job.factor is None else job.factor
                value = flatten(Stage(recipe, changed).config()).get(tuning.key)
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise UserError(
                        f"{job.table.path}: tuning.key is {tuning.key!r}, which in the config of "
                        f"cell {cell.name} is {value!r} and not a number"
                    )
                changed[tuning.key] = value * factor
                if job.factor is not None:
                    changed |= {**tuning.overrides, **cell.search}
        changed["seed"] = job.seed
        if data is not None:
            if folders[number]:
                changed["data.dir"] = str(data / folders[number])
            changed = {
                key: str(data / value.removeprefix(_DATA))
                if isinstance(value, str) and value.startswith(_DATA)
                else value
                for key, value in changed.items()
            }
        found.append(Stage(recipe, changed, scale.cpu_devices))
    return found


def flat_configs(configs: Sequence[ConfigDict]) -> list[dict[str, Any]]:
    """Returns the flattened configs of a job's stages without what may differ between machines."""
    return [
        {key: value for key, value in flatten(config).items() if not key.startswith(_FREE)}
        for config in configs
    ]


def config_hash(flat: Sequence[Mapping[str, Any]]) -> str:
    """Returns the hash of configs that `flat_configs` made."""
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:12]


def changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each key that differs; a key that one of them lacks has its default."""
    if len(old) != len(new):
        return [f"{len(old)} stages there, {len(new)} now"]
    return [
        line
        for before, now in zip(map(renamed, old), map(renamed, new))
        for line in differences(_complete(before, now), _complete(now, before), _FREE)
    ]


def _complete(flat: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flattened config with the defaults of the keys that only the other one has.

    Configs of older versions lack the keys that came later.
    """
    found = flatten(base_config())
    for section in overrides_lib.SECTIONS:
        prefix = f"{section}."
        missing = {key for key in other.keys() - flat.keys() if key.startswith(prefix)}
        if not missing:
            continue
        fields = {key.removeprefix(prefix): flat[key] for key in flat if key.startswith(prefix)}
        try:
            name = (
                flat.get("data.name")
                if section == "data.options"
                else overrides_lib.name_of(section, fields)
            )
            defaults = overrides_lib.defaults(section, fields, name)
            found |= flatten(
                {
                    key: defaults[key.removeprefix(prefix)]
                    for key in missing
                    if key.removeprefix(prefix) in defaults
                }
            )
        except UserError:
            continue  # there is no such optimizer, model or data set any more
    return found | dict(flat)


def _text(value: Any) -> str:
    if isinstance(value, list):  # the flags of tuples take Python's form
        return str(_tuples(value))
    return str(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _assign(config: ConfigDict, key: str, value: Any) -> None:
    """Sets a dotted key that is not of a section with fields of its own."""
    section, last = section_of(config, key), key.rpartition(".")[2]
    try:
        section[last] = _tuples(value)
    except TypeError:
        raise UserError(
            f"config.{key} is {value!r}; it must have the type of {section[last]!r}"
        ) from None

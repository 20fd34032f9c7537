"""Phases of a config: several runs, each starting from the weights of the one before.

BERT's pre-training has two phases: 128 tokens, then 512. Each phase is a run of its own in
WORKDIR/NAME, with its own config, data, clock, warm-up and checkpoints. Its config is the whole
config with the changes of config.phases.NAME. The first phase starts as the config says. Every
other starts from the phase before it, as if that folder were its config.init_from; config.init
decides about the optimizer's state. When the run is started again, complete phases are skipped.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from lamb_tpu.config import check_keys, check_values, flatten
from lamb_tpu.errors import UserError
from lamb_tpu.run import initial
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.store import checksums, programs
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir

# Sections in which a phase may set fields that the config leaves at their defaults.
_OPEN = ("data.options", "model", "task", "optimizer", "mesh", "batch_rule", "parallel.exchange")
_TAKEN = ("checkpoints", programs.FOLDER, "logs", "tensorboard")  # folders of a run


@dataclasses.dataclass(frozen=True)
class Phase:
    """One run of several.

    Attributes:
      name: name of the phase; '' for the only run of a config without phases.
      config: the phase's whole config, itself without phases.
      folder: the phase's workdir.
    """

    name: str
    config: ConfigDict
    folder: pathlib.Path


def split(config: ConfigDict, workdir: str | os.PathLike[str] = "") -> list[Phase]:
    """Returns the phases of a config in their order; one phase for a config without.

    Raises:
      UserError: the config has a mistake; a phase's own keys are named config.phases.NAME.KEY.
    """
    check_keys(config)
    check_values(config)
    folder = Workdir(workdir).path
    if not config.phases:
        return [Phase("", config, folder)]
    phases: list[Phase] = []
    for name in sorted(config.phases):
        where, changes = f"config.phases.{name}", config.phases[name]
        if not re.fullmatch(r"\w[\w-]*", name) or name in _TAKEN:
            raise UserError(
                f"{where}: {name!r} cannot name the phase's folder; take letters, digits, '_' and "
                f"'-', and none of {', '.join(_TAKEN)}"
            )
        if not isinstance(changes, ConfigDict) or not changes:
            found = "empty" if isinstance(changes, ConfigDict) else repr(changes)
            raise UserError(f"{where} is {found}; it must be a ConfigDict of the keys it sets")
        for key in ("init_from", "phases"):
            if key in changes:
                raise UserError(
                    f"{where}.{key} cannot be set: the first phase starts from config.init_from, "
                    "each other from the one before it"
                )
        whole = config.copy_and_resolve_references()
        with whole.unlocked(), whole.ignore_type():
            whole.phases = ConfigDict()
            _merge(whole, changes, where, "")
            if phases:
                whole.init_from = str(phases[-1].folder)
        # A mistake may show only in the merged config, but the phase's key is where to mend it.
        with errors_in_phase(name, changes):
            check_keys(whole)
            check_values(whole)
        phases.append(Phase(name, whole, folder / name))
    return phases


def _merge(config: ConfigDict, changes: Mapping[str, Any], where: str, section: str) -> None:
    """Merges `changes` into `config`, whose dotted path in the whole config is `section`."""
    is_open = section.startswith(_OPEN) if section else False
    for key, value in changes.items():
        if key not in config and not is_open:
            name = f"config.{section}" if section else "config"
            raise UserError(f"{where}.{key} is unknown; {name} has: {', '.join(config)}")
        path = f"{section}.{key}" if section else key
        if isinstance(config.get(key), ConfigDict):
            if not isinstance(value, ConfigDict):
                raise UserError(f"{where}.{key} is {value!r}; it must be a ConfigDict")
            _merge(config[key], value, f"{where}.{key}", path)
            continue
        config[key] = value


@contextmanager
def errors_in_phase(name: str, changes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Prefixes the message of a UserError with the phase, or with the phase's own key.

    Args:
      name: name of the phase; '' (a config without phases) changes nothing.
      changes: the keys that the phase sets.
    """
    try:
        yield
    except UserError as error:
        if not name:
            raise
        text = str(error)
        key = re.match(r"config\.([\w.]*\w)", text)
        # The mistake is in a key that the phase sets, or else in one of the whole config.
        own = key is not None and key[1] in flatten(changes or {})
        where = f"config.phases.{name}"
        raise UserError(f"{where}.{text[7:]}" if own else f"{where}: {text}") from error


def due(config: ConfigDict, workdir: str | os.PathLike[str]) -> list[Phase]:
    """Returns the phases that are still to run or to resume, after checking all phases.

    The last phase is always among them. A phase is skipped if a later one has begun, or if its last
    checkpoint is whole and its last evaluation is recorded.

    Raises:
      UserError: a phase has a mistake, even if it is not the next one.
    """
    phases = split(config, workdir)
    # All folders first: this check is quick, while data may have to be prepared.
    for phase in phases:
        Workdir(phase.folder).check(phase.config)
    begun = [n for n, phase in enumerate(phases) if Workdir(phase.folder).has_checkpoint()]
    # A phase whose successor has begun is complete: the successor has taken its weights.
    phases = phases[_agreed(begun[-1] if begun else 0) :]
    runs: list[Run] = []
    for phase in phases:
        if len(phases) > 1:  # a single phase left is checked when it runs
            with errors_in_phase(phase.name, config.phases[phase.name]):
                runs.append(_prepare(phase, runs[-1] if runs else None))
    if runs and _agreed(_is_complete(phases[0], runs[0].recipe)):
        return phases[1:]
    return phases


def _prepare(phase: Phase, before: Run | None) -> Run:
    """Returns the run of a phase.

    A later phase gets no folder, because its initial weights do not exist yet; instead its
    parameters are checked against the run of the phase before it.
    """
    run = prepare(phase.config, phase.folder if before is None else None)
    if before is not None:
        state = before.abstract_state
        there = {field: getattr(state, field) for field in ("params", "model_state", "opt_state")}
        where = "the phase before it"
        # Raises if the weights will not fit; the match itself is of no use yet.
        initial.match(phase.config, run.abstract_state, there, before.config.model, where)
    return run


def _is_complete(phase: Phase, recipe: Recipe) -> bool:
    # The answer of process 0 is the one that counts, see `_agreed`.
    if jax.process_index() != 0:
        return False
    folder = Workdir(phase.folder)
    metrics = folder.path / "metrics.jsonl"
    if not metrics.exists():
        return False
    total_steps = recipe.total_steps
    if recipe.path is not None and recipe.decides:  # the run itself has decided how many there are
        total_steps = next(
            (
                record["step"]
                for record in read_records(metrics, "train")
                if record["examples"] == recipe.path.total
            ),
            0,
        )
    last = folder.checkpoints / str(total_steps)
    if not last.is_dir():
        return False
    # A run that was preempted in its last evaluation has saved the last update without it.
    evaluated = [record["step"] for record in read_records(metrics, "eval")]
    return total_steps in evaluated and checksums.find_damage(last) is None


def _agreed(value: int) -> int:
    """Returns the value of process 0, which alone writes the files, in all processes."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))

"""Phases of a config: several runs, each of which starts from the weights of the previous run.

BERT's pre-training has two phases: 128 tokens, then 512. Each phase is a separate run in
WORKDIR/NAME, with its own config, data, clock, warm-up and checkpoints. Its config is the full
config with the changes of config.phases.NAME. The first phase starts from config.init_from, and each
later phase from the folder of the previous phase. A restarted run skips complete phases.
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

from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.run import initial
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.spec import Config, Spec, as_dict, flatten, parse
from lamb_tpu.spec_keys import plain
from lamb_tpu.store import checksums, programs
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir

# Sections in which a phase may set fields that the config leaves at their defaults.
_OPEN = ("data.options", "model", "task", "optimizer", "mesh", "batch_rule", "parallel.exchange")
_TAKEN = ("checkpoints", programs.FOLDER, "logs", "tensorboard")  # folders in a run's folder


@dataclasses.dataclass(frozen=True)
class Phase:
    """A phase of a config; a config without phases has one, whose name is ''."""

    name: str
    config: Spec
    folder: pathlib.Path


def split(config: Config, workdir: str | os.PathLike[str] = "") -> list[Phase]:
    """Returns the phases of a config in order; a single `Phase` if the config has no phases."""
    spec = parse(config)
    folder = Workdir(workdir).path
    if not spec.phases:
        return [Phase("", spec, folder)]
    phases: list[Phase] = []
    for name in sorted(spec.phases):
        where, changes = f"config.phases.{name}", plain(spec.phases[name])
        if not re.fullmatch(r"\w[\w-]*", name) or name in _TAKEN:
            problem = f": {name!r} cannot be the name of a folder of the run"
            remedy = f"use letters, digits, '_' and '-', but none of the names {', '.join(_TAKEN)}"
            raise UserError(where, ABSENT, problem, remedy)
        if not isinstance(changes, dict) or not changes:
            problem = "is not a ConfigDict with keys"
            raise UserError(where, changes, problem, "use a ConfigDict of the keys that differ")
        for key in ("init_from", "phases"):
            if key in changes:
                problem = "cannot be set in a phase: each phase starts from the previous phase"
                raise UserError(f"{where}.{key}", ABSENT, problem, f"set config.{key} instead")
        merged = as_dict(spec) | {"phases": {}}
        _merge(merged, changes, where, "")
        if phases:
            merged["init_from"] = str(phases[-1].folder)
        # An error may show only in the merged config, but the user corrects it in the phase's key.
        with errors_in_phase(name, changes):
            phases.append(Phase(name, parse(merged), folder / name))
    return phases


def _merge(config: dict[str, Any], changes: Mapping[str, Any], where: str, section: str) -> None:
    """Merges `changes` into `config`, a section with the dotted path `section`."""
    is_open = section.startswith(_OPEN) if section else False
    for key, value in changes.items():
        if key not in config and not is_open:
            name = f"config.{section}" if section else "config"
            raise UserError(
                f"{where}.{key}", ABSENT, f"is unknown; {name} has: {', '.join(sorted(config))}"
            )
        path = f"{section}.{key}" if section else key
        if isinstance(config.get(key), dict):
            if not isinstance(value, dict):
                raise UserError(f"{where}.{key}", value, "is not a section", "use a ConfigDict")
            _merge(config[key], value, f"{where}.{key}", path)
            continue
        config[key] = value


@contextmanager
def errors_in_phase(name: str, changes: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Names the phase in a UserError's key: config.phases.NAME.KEY if the phase sets the key.

    Otherwise the phase precedes the key, as in 'config.phases.NAME: config.KEY'. For a config
    without phases, `name` is '' and errors are unchanged.
    """
    try:
        yield
    except UserError as error:
        if not name:
            raise
        key = re.match(r"config\.([\w.]*\w)", error.key)
        # The error is in a key that the phase sets, or else in a key that all phases share.
        is_set = key is not None and key[1] in flatten(plain(changes or {}))
        where = f"config.phases.{name}"
        text = f"{where}.{error.key[7:]}" if is_set else f"{where}: {error.key}"
        raise UserError(text, *error.args[1:]) from error


def due(spec: Spec, workdir: str | os.PathLike[str]) -> list[Phase]:
    """Returns the phases that are still to run or to resume, after checking all phases.

    The last phase is always included. Any other phase is omitted if a later phase has begun, or if the
    phase has ended: its last checkpoint is intact, and its last evaluation is recorded.
    """
    phases = split(spec, workdir)
    # Check all folders first: this is quick, while preparing data may take long.
    for phase in phases:
        Workdir(phase.folder).check(phase.config)
    begun = [n for n, phase in enumerate(phases) if Workdir(phase.folder).has_checkpoint()]
    # A phase whose successor has begun is complete: the successor has loaded its weights.
    phases = phases[_agreed(begun[-1] if begun else 0) :]
    runs: list[Run] = []
    for phase in phases:
        if len(phases) > 1:  # a single remaining phase is checked when it runs
            with errors_in_phase(phase.name, spec.phases[phase.name]):
                runs.append(_prepare(phase, runs[-1] if runs else None))
    if runs and _agreed(_is_complete(phases[0], runs[0].recipe)):
        return phases[1:]
    return phases


def _prepare(phase: Phase, before: Run | None) -> Run:
    """Returns the run of a phase.

    A later phase has no folder: its initial weights do not exist yet. Its parameters are checked
    against the run of the previous phase instead.
    """
    run = prepare(phase.config, phase.folder if before is None else None)
    if before is not None:
        state = before.abstract_state
        there = {field: getattr(state, field) for field in ("params", "model_state", "opt_state")}
        where = "the previous phase"
        # Call `match` only to check that the weights will fit.
        initial.match(phase.config, run.abstract_state, there, before.spec.model.as_dict(), where)
    return run


def _is_complete(phase: Phase, recipe: Recipe) -> bool:
    # Only the value of process 0 counts, see `_agreed`.
    if jax.process_index() != 0:
        return False
    folder = Workdir(phase.folder)
    metrics = folder.path / "metrics.jsonl"
    if not metrics.exists():
        return False
    total_steps = recipe.total_steps
    if recipe.path is not None and recipe.decides:  # decisions during the run set the total
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
    # A run that was preempted in its last evaluation has the last checkpoint, but not the record.
    evaluated = [record["step"] for record in read_records(metrics, "eval")]
    return total_steps in evaluated and checksums.find_damage(last) is None


def _agreed(value: int) -> int:
    """Returns process 0's value in all processes, because only process 0 writes files."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))

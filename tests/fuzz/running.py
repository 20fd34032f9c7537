"""Runs a leg of a case on some of the simulated devices, as a user's command would."""

import json
import pathlib
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from ml_collections import ConfigDict

from lamb_tpu import training
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.session import Session
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.train import train
from tests import tiny
from tests.fuzz import families
from tests.fuzz.case import PROCESSES, Case, num_devices

Arrays = dict[str, np.ndarray]


class Leg(NamedTuple):
    """Results of a leg.

    Attributes:
      run: the run, for its shapes and shardings.
      states: the saved states, by the number of completed updates.
      records: the records of metrics.jsonl.
    """

    run: Run
    states: dict[int, Arrays]
    records: list[dict[str, Any]]


def prepared(config: ConfigDict, devices: int, workdir: pathlib.Path | None = None) -> Run:
    """Builds a run on the first devices, with data sets that are loaded once."""
    return prepare(config, workdir, jax.devices()[:devices], load=families.load)


def arrays(tree: Any) -> Arrays:
    """Returns the leaves by path; the carry has one row for each example in the batch's order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {
        jax.tree_util.keystr(path): jax.random.key_data(leaf)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else leaf
        for path, leaf in leaves
    }
    found = jax.device_get(found)
    carry, example = ".carry['value']", ".carry['example']"
    if carry in found:
        order = np.argsort(found[example])
        found |= {carry: found[carry][order], example: found[example][order]}
    return found


def run_leg(config: ConfigDict, devices: int, workdir: pathlib.Path) -> Leg:
    """Trains, or resumes the run in `workdir`, to its end."""
    made: list[Run] = []
    states: dict[int, Arrays] = {}
    save = Session.save

    def preparing(config: Any, workdir: Any) -> Run:
        made.append(prepared(config, devices, workdir))
        return made[-1]

    def saving(self: Session, step: int, state: Any, position: Any) -> None:
        states[step] = arrays(state)
        save(self, step, state, position)

    with (
        mock.patch.object(training, "prepare", preparing),
        mock.patch.object(Session, "save", saving),
    ):
        train(config, workdir, quiet=True)
    [run] = made
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return Leg(run, states, records)


_RECIPE = """from tests.fuzz.case import Case

def get_config(argument=None):
    case = Case.from_json({text!r})
    return case.made(case.second)
"""
SECONDS = 300


def run_processes(case: Case, workdir: pathlib.Path) -> Leg:
    """Runs the second leg in several processes on this machine, as `run_leg`.

    Raises:
      RuntimeError: the processes fail; its text is the end of their output.
    """
    recipe = workdir.with_suffix(".py")
    recipe.write_text(_RECIPE.format(text=case.to_json()))
    processes, devices = case.second[PROCESSES], num_devices(case.second)
    shape = (f"--processes={processes}", f"--devices-per-process={devices // processes}")
    process = tiny.start(
        *("lamb_tpu.launch", "local", *shape, "--", f"--config={recipe}", f"--workdir={workdir}")
    )
    out, err = process.communicate(timeout=SECONDS)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}: {(err or out)[-600:]}")
    run = prepared(case.made(case.second), devices)
    states: dict[int, Arrays] = {}
    folder, keep = workdir / "checkpoints", run.spec.checkpoint.keep
    with Checkpoints(folder, keep, writes=False) as checkpoints:
        last = checkpoints.steps()[-1]
        states[last] = arrays(checkpoints.restore(last, run.abstract_state)[0])
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return Leg(run, states, records)

"""Training of the branches that are missing, their records, and the critical batches."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from lamb_tpu import data, trust
from lamb_tpu.batching.critical import Critical, Excess, critical, excess
from lamb_tpu.config import unflatten
from lamb_tpu.critical_batch.choices import Request, Study, check, choose, key_of
from lamb_tpu.critical_batch.progress import BranchProgress
from lamb_tpu.errors import UserError
from lamb_tpu.run.batches import has_agvm
from lamb_tpu.run.branch import Branches
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.store import programs, runs
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records

RECORDS = "critical_batch.jsonl"


class Row(NamedTuple):
    """The outcome at one place of the run.

    Attributes:
      step: completed updates of the checkpoint.
      excesses: excess of the loss at each factor; 0 at the first.
      critical: the critical batch.
      noise_scale: that of the nearest record, in examples; None in a run without.
    """

    step: int
    excesses: list[Excess]
    critical: Critical
    noise_scale: float | None


class Outcome(NamedTuple):
    """Outcome of a study.

    Attributes:
      run: the run.
      study: the branches.
      tolerance: largest excess that was allowed.
      rows: the outcome at each place.
      noise: pairs (completed updates, noise scale in examples) of the run's records.
    """

    run: Run
    study: Study
    tolerance: float
    rows: list[Row]
    noise: list[tuple[int, float]]


def measure(
    config: ConfigDict | None, workdir: str, request: Request, trust_workdir: bool = False
) -> Outcome:
    """Trains the branches that have no record in the run's folder, and records their losses.

    Args:
      config: the config that the run was started with; None reads it from the workdir.
      workdir: folder of the run.
      request: what to measure.
      trust_workdir: whether a config that is read from the workdir may name any custom code, see
        `lamb_tpu.trust`.

    Raises:
      UserError: a mistake, found before anything compiles; or a branch at the run's own batch has
        diverged.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"there are {jax.process_count()} processes, and branches are trained by one; start "
            "one on one machine, with --num_processes=1"
        )
    factors = check(request)
    files = runs.read(workdir)
    folder = files.folder
    if not folder.has_checkpoint():
        raise UserError(f"--workdir {folder.path} has no checkpoint yet")
    if config is None:
        if not trust_workdir:
            trust.check(files.config, folder.config, "--trust_workdir")
        config = unflatten(files.config)
    run = prepare(config, workdir)
    if run.recipe.path is not None:
        raise UserError(
            f"--workdir {folder.path} holds a run whose batch changes by config.batch_rule "
            f"{config.batch_rule.name!r}; branches are at multiples of one batch size"
        )
    if has_agvm(config):
        raise UserError(
            f"--workdir {folder.path} holds a run under config.optimizer.agvm, which needs the "
            "gradients of two halves of each batch; branches do not measure them"
        )
    if run.exchange is not None and run.exchange.keeps_residual:
        raise UserError(
            f"--workdir {folder.path} holds a run with config.parallel.exchange.name="
            f"{config.parallel.exchange.name!r}, whose error of compression depends on the batch; "
            "branches need 'float32' or 'bfloat16'"
        )
    if run.train_set.streams is not None:
        raise UserError(
            f"--workdir {folder.path} is of {data.title(run.train_set)}, whose batch is the number "
            "of its streams of text: a branch at another batch would read other text, so branches "
            "cannot measure its critical batch"
        )
    with (
        folder.hold(),
        programs.kept_in(folder.path),
        Checkpoints(folder.checkpoints, config.checkpoint.keep, writes=False) as checkpoints,
    ):
        study = choose(run, request, factors, checkpoints.steps())
        losses = _train(run, checkpoints, study)
    noise = [
        (record["step"], float(record["noise_scale"]))
        for record in files.records("train")
        if "noise_scale" in record
    ]
    rows = []
    for start in study.starts:
        nearest = min(noise, key=lambda point: abs(point[0] - start), default=None)
        excesses = _excesses(study, start, losses)
        found = critical(
            [factor * config.batch_size for factor in factors],
            [each.mean for each in excesses],
            request.tolerance,
        )
        rows.append(Row(start, excesses, found, nearest and nearest[1]))
    return Outcome(run, study, request.tolerance, rows, noise)


def _train(run: Run, checkpoints: Checkpoints, study: Study) -> dict[str, float]:
    """Trains the branches that have no record; returns the loss of each branch by its key."""
    assert run.folder is not None
    path = run.folder.path / RECORDS
    records = {key_of(record): record for record in read_records(path)} if path.exists() else {}
    due = [branch for branch in study.branches() if key_of(branch) not in records]
    if due:
        measured = _with_split(run, study.split)
        branches = Branches(run, checkpoints, study.starts, study.factors, study.scaling)
        evaluate = make_evaluator(measured)
        with BranchProgress(len(due), study.at[-1] * run.config.batch_size) as progress:
            for branch in due:
                progress.begins(branch["step"], branch["factor"])
                losses = branches.losses(
                    branch["step"],
                    branch["factor"],
                    branch["seed"],
                    study.at,
                    lambda state: evaluate(state)[study.metric],
                    progress.trained,
                )
                records[key_of(branch)] = {
                    **branch,
                    "rate_factor": branches.rate_factors[branch["factor"]],
                    # JSON has no NaN.
                    "losses": [loss if math.isfinite(loss) else str(loss) for loss in losses],
                }
                run.folder.write_file(
                    RECORDS, "".join(f"{json.dumps(record)}\n" for record in records.values())
                )
                progress.ended(statistics.fmean(losses))
    return {key_of(branch): _loss(records[key_of(branch)]) for branch in study.branches()}


def _loss(record: Mapping[str, Any]) -> float:
    return statistics.fmean(map(float, record["losses"]))


def _with_split(run: Run, split: str) -> Run:
    """Returns the run with the evaluation set of a split."""
    if split == run.config.data.eval_split:
        return run
    assert run.folder is not None
    config = run.config.copy_and_resolve_references()
    config.data.eval_split = split

    def load(name: str, split: str, training: bool, **options: Any) -> data.Source:
        return run.train_set if training else data.load(name, split, training=False, **options)

    other = prepare(config, run.folder.path, training=False, load=load)
    return dataclasses.replace(run, eval_set=other.eval_set)


def _excesses(study: Study, start: int, losses: Mapping[str, float]) -> list[Excess]:
    """Returns the excess of each factor at a place."""
    of: dict[int, list[float]] = {factor: [] for factor in study.factors}
    for branch in study.branches():
        if branch["step"] == start:
            of[branch["factor"]].append(losses[key_of(branch)])
    for loss in of[1]:
        if not 0 < loss < math.inf:
            raise UserError(
                f"--at: from update {start:,} a branch at the run's own batch has a {study.metric} "
                f"of {loss}, with which no other can be compared; leave this place out"
            )
    return [excess(of[factor], of[1]) for factor in study.factors]

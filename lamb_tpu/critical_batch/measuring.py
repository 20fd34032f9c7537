"""Trains missing branches, records their losses, and derives the critical batch sizes."""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from lamb_tpu import data, trust
from lamb_tpu.batching.critical import Critical, Excess, critical, excess
from lamb_tpu.critical_batch.branch import Branches
from lamb_tpu.critical_batch.choices import Study, StudyRequest, check, choose, key_of
from lamb_tpu.critical_batch.progress import BranchProgress
from lamb_tpu.errors import UserError
from lamb_tpu.run.batches import has_agvm
from lamb_tpu.run.build import Run, prepare
from lamb_tpu.run.evaluator import make_evaluator
from lamb_tpu.spec import Config, changed, of_flat
from lamb_tpu.store import programs, runs
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.store.metrics import read_records

RECORDS = "critical_batch.jsonl"


class PositionOutcome(NamedTuple):
    """The outcome at one position of the run, after `step` updates.

    Attributes:
      excesses: for each factor, the excess over the loss at the first factor; 0 for the first factor.
      noise_scale: noise scale of the nearest record, in examples; None if none is recorded.
    """

    step: int
    excesses: list[Excess]
    critical: Critical
    noise_scale: float | None


class Outcome(NamedTuple):
    """The outcome of a study; `noise` has pairs (completed updates, noise scale in examples)."""

    run: Run
    study: Study
    tolerance: float
    rows: list[PositionOutcome]
    noise: list[tuple[int, float]]


def measure(
    config: Config | None, workdir: str, request: StudyRequest, trust_workdir: bool = False
) -> Outcome:
    """Trains the branches that have no record in the run's folder, and records their losses.

    If `config` is None, the workdir's config is read, which may name custom code only from the user's
    own modules, unless `trust_workdir` is true (see `lamb_tpu.trust`). Raises UserError, before anything
    compiles, if the run or an option is invalid; later, if a branch at the run's own batch size diverges.
    """
    if jax.process_count() > 1:
        raise UserError(
            "--num-processes",
            jax.process_count(),
            "is more than the single process that branches need",
            "use --num-processes=1 on one machine",
        )
    factors = check(request)
    files = runs.read(workdir)
    folder = files.folder
    if not folder.has_checkpoint():
        raise UserError(
            f"--workdir {folder.path}",
            problem="has no checkpoint yet",
            remedy="train the run until it saves a checkpoint",
        )
    if config is None:
        if not trust_workdir:
            trust.check(files.config, folder.config, "--trust-workdir")
        config = of_flat(files.config)
    run = prepare(config, workdir)
    _check_run(run, folder.path)
    with (
        folder.hold(),
        programs.kept_in(folder.path),
        Checkpoints(folder.checkpoints, run.spec.checkpoint.keep, writes=False) as checkpoints,
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
        critical_batch = critical(
            [factor * run.spec.batch_size for factor in factors],
            [each.mean for each in excesses],
            request.tolerance,
        )
        rows.append(PositionOutcome(start, excesses, critical_batch, nearest and nearest[1]))
    return Outcome(run=run, study=study, tolerance=request.tolerance, rows=rows, noise=noise)


def _check_run(run: Run, folder: pathlib.Path) -> None:
    """Rejects a run for which branches cannot measure the critical batch size."""
    spec, problem, remedy = run.spec, "", ""
    if run.recipe.path is not None:
        problem = f"holds a run whose batch size follows config.batch_rule={spec.batch_rule.name!r}"
        remedy = "use a run with a constant batch size"
    elif has_agvm(spec):
        problem = "holds a run under config.optimizer.agvm, which needs statistics of each batch"
        remedy = "use a run without agvm, because branches do not measure these statistics"
    elif run.exchange is not None and run.exchange.keeps_residual:
        problem = (
            f"holds a run with config.parallel.exchange.name={spec.parallel.exchange.name!r}, "
            "whose compression error depends on the batch size"
        )
        remedy = "use a run with the exchange 'float32' or 'bfloat16'"
    elif run.train_set.streams is not None:
        problem = (
            f"holds a run on {data.title(run.train_set)}, where the batch size is the number of "
            "text streams, so a branch at another batch size would read different text"
        )
        remedy = "use a run on another data set"
    if problem:
        raise UserError(f"--workdir {folder}", problem=problem, remedy=remedy)


def _train(run: Run, checkpoints: Checkpoints, study: Study) -> dict[str, float]:
    """Trains the branches that have no record; returns the losses of all branches by key."""
    assert run.folder is not None
    path = run.folder.path / RECORDS
    records = {key_of(record): record for record in read_records(path)} if path.exists() else {}
    missing = [branch for branch in study.branches() if key_of(branch) not in records]
    if missing:
        measured = _with_split(run, study.split)
        branches = Branches(
            run=run,
            checkpoints=checkpoints,
            starts=study.starts,
            factors=study.factors,
            rule=study.scaling,
        )
        evaluate = make_evaluator(measured)
        with BranchProgress(len(missing), study.at[-1] * run.spec.batch_size) as progress:
            for branch in missing:
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
    return {
        key: statistics.fmean(map(float, records[key]["losses"]))
        for key in map(key_of, study.branches())
    }


def _with_split(run: Run, split: str) -> Run:
    if split == run.spec.data.eval_split:
        return run
    assert run.folder is not None
    spec = changed(run.spec, {"data.eval_split": split})

    def load(name: str, split: str, training: bool, **options: Any) -> data.Source:
        return run.train_set if training else data.load(name, split, training=False, **options)

    other = prepare(spec, run.folder.path, training=False, load=load)
    return dataclasses.replace(run, eval_set=other.eval_set)


def _excesses(study: Study, start: int, losses: Mapping[str, float]) -> list[Excess]:
    by_factor: dict[int, list[float]] = {factor: [] for factor in study.factors}
    for branch in study.branches():
        if branch["step"] == start:
            by_factor[branch["factor"]].append(losses[key_of(branch)])
    for loss in by_factor[1]:
        if not 0 < loss < math.inf:
            raise UserError(
                "--at",
                f"{start} steps",
                f"has a branch at the run's own batch size with a {study.metric} of {loss}, so the "
                "other losses cannot be compared with it",
                "leave this position out",
            )
    return [excess(by_factor[factor], by_factor[1]) for factor in study.factors]

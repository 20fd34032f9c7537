"""Checks the options of the command and derives positions, batch sizes and lengths from them."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lamb_tpu.critical_batch.branch import default_scaling, measured_at
from lamb_tpu.errors import UserError, naming, out_of_range, unknown
from lamb_tpu.optim import durations
from lamb_tpu.run.build import Run
from lamb_tpu.run.evaluator import metric_names
from lamb_tpu.run.recipe import Recipe

# Maximum distance of a checkpoint from a requested position, as a fraction of the run.
_NEAR = 0.01
_LEAST_UPDATES = 4  # minimum length of the branch at the largest factor
_MEASURED = ("losses", "rate_factor")  # fields of a record that are not in its key


class StudyRequest(NamedTuple):
    """Options of the command; see its --help."""

    at: str
    factors: str = "1,2,4,8"
    span: str = "2 percent"
    scaling: str | None = None
    tolerance: float = 0.01
    seeds: int = 1
    split: str | None = None
    metric: str | None = None


class Study(NamedTuple):
    """Branches to train, with all defaults filled in.

    Attributes:
      starts: the checkpoints' numbers of completed updates, ascending.
      factors: multiples of the run's batch size, ascending from 1.
      at: updates after which each branch is measured; the branch ends at the last. See `branch.measured_at`.
      seeds: seeds for the order of the examples.
      split: split on which the loss is measured.
      metric: name of the loss.
    """

    starts: Sequence[int]
    factors: Sequence[int]
    at: Sequence[int]
    scaling: str
    seeds: Sequence[int]
    split: str
    metric: str

    def branches(self) -> list[dict[str, Any]]:
        """Returns the fields that identify each branch, in the order of training."""
        return [
            {
                "step": start,
                "factor": factor,
                "seed": seed,
                "at": list(self.at),
                "scaling": self.scaling,
                "split": self.split,
                "metric": self.metric,
            }
            for start in self.starts
            for seed in self.seeds
            for factor in self.factors
        ]


def key_of(record: Mapping[str, Any]) -> str:
    """Returns the key of a branch or of its record."""
    key = {name: value for name, value in record.items() if name not in _MEASURED}
    return json.dumps(key, sort_keys=True)


def check(request: StudyRequest) -> list[int]:
    """Checks every option that can be checked without the run, and returns the factors."""
    if not 0 < request.tolerance < math.inf:
        raise out_of_range(
            "--tolerance",
            request.tolerance,
            "a number above 0, such as 0.01 for a loss one percent higher",
        )
    if request.seeds < 1:
        raise out_of_range("--seeds", request.seeds, "at least 1")
    positions(request.at)
    with naming("--span"):
        durations.parse(request.span)
    texts = [text.strip() for text in request.factors.split(",")]
    factors = [int(text) if re.fullmatch("[0-9]{1,9}", text) else 0 for text in texts]
    is_ascending = all(low < high for low, high in itertools.pairwise(factors))
    if factors[0] != 1 or len(factors) < 2 or not is_ascending:
        problem = "must be two or more whole numbers that ascend from 1"
        raise UserError("--factors", request.factors, problem, "use numbers such as 1,2,4,8")
    return factors


def positions(text: str) -> list[durations.Duration]:
    """Parses the durations of --at; a duration without a unit has the unit of the next duration.

    >>> print(*positions('10, 30 percent, 2 epochs'), sep=' | ')
    10 percent | 30 percent | 2 epochs
    """
    result: list[durations.Duration] = []
    for part in reversed(text.split(",")):
        if result and len(part.split()) == 1:
            part = f"{part} {result[0].unit}"
        with naming("--at"):
            result.insert(0, durations.parse(part))
    return result


def choose(
    run: Run, request: StudyRequest, factors: Sequence[int], checkpoints: Sequence[int]
) -> Study:
    """Returns the study of a request; `checkpoints` has the update number of each checkpoint, ascending."""
    length = span(request.span, factors, run.recipe)
    return Study(
        starts=starts(request.at, checkpoints, length, run.recipe),
        factors=factors,
        at=measured_at(length, factors),
        scaling=request.scaling
        or default_scaling(run.spec.schedule.scaling, run.spec.optimizer.name),
        seeds=[run.spec.seed + number for number in range(request.seeds)],
        split=request.split or run.spec.data.eval_split,
        metric=_loss(metric_names(run), request.metric),
    )


def span(text: str, factors: Sequence[int], recipe: Recipe) -> int:
    """Returns the length of a branch in updates of the run, a multiple of every factor."""
    updates = durations.parse(text).whole_steps(
        recipe.batch_size, recipe.num_examples, recipe.total_steps
    )
    unit, largest = math.lcm(*factors), factors[-1]
    rounded = math.ceil(updates / unit) * unit
    if rounded // largest < _LEAST_UPDATES:
        least = math.ceil(_LEAST_UPDATES * largest / unit) * unit
        problem = f"gives a branch at {largest} times the batch size too few updates ({rounded // largest})"
        remedy = f"use at least '{least} steps', or smaller --factors"
        raise UserError("--span", text, problem, remedy)
    return rounded


def starts(text: str, checkpoints: Sequence[int], length: int, recipe: Recipe) -> list[int]:
    """Returns the updates at which branches start: the checkpoints nearest to --at, ascending."""
    total, result = recipe.total_steps, list[int]()
    for position in positions(text):
        wanted = position.steps(recipe.batch_size, recipe.num_examples, total)
        nearest = min(checkpoints, key=lambda step: abs(step - wanted))
        if abs(nearest - wanted) > max(1.0, _NEAR * total):
            known = ", ".join(
                f"{step:,} ({100 * step / total:.3g} percent)" for step in checkpoints
            )
            raise UserError(
                "--at",
                str(position),
                f"is update {wanted:,.0f}, far from the checkpoints at updates {known}",
                "use one of these updates, or a run with --config.checkpoint.keep_every='10 percent'",
            )
        if nearest + length > total:
            raise UserError(
                "--at",
                str(position),
                f"starts a branch of {length:,} updates at {nearest:,}, but the run has only {total:,}",
                "use an earlier position, or a shorter --span",
            )
        # One program serves all positions, so branches must not overlap; see `branch.widened`.
        overlapping = [start for start in result if abs(start - nearest) < length]
        if overlapping:
            problem = (
                f"starts a branch of {length:,} updates at update {nearest:,}, which overlaps the "
                f"branch at update {overlapping[0]:,}"
            )
            raise UserError(
                "--at", str(position), problem, "leave out one position, or use a shorter --span"
            )
        result.append(nearest)
    return sorted(result)


def _loss(names: Sequence[str], name: str | None) -> str:
    losses = [each for each in names if each.endswith("loss") and not each.startswith("ema_")]
    if name is None and losses:
        return losses[0]
    if name not in losses:
        raise unknown("--metric", name, losses or ["a run whose evaluation measures a loss"])
    return name

"""Options of the command, checked, and what they mean for a run: places, batches, lengths."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lamb_tpu.errors import UserError
from lamb_tpu.optim import durations
from lamb_tpu.run.branch import measured_at, own_scaling
from lamb_tpu.run.build import Run
from lamb_tpu.run.evaluator import metric_names
from lamb_tpu.run.recipe import Recipe, naming

# A checkpoint must be within this part of the run from the place that is asked for.
_NEAR = 0.01
_LEAST_UPDATES = 4  # of the branch at the largest factor
_MEASURED = ("losses", "rate_factor")  # what a record has beside its key


class Request(NamedTuple):
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
    """Branches to train, with every choice made.

    Attributes:
      starts: completed updates of the checkpoints, ascending.
      factors: batches in batches of the run, ascending from 1.
      at: when each branch is measured, see `branch.measured_at`; the last is its length.
      scaling: how the learning rate follows the batch.
      seeds: seeds of the orders of the examples.
      split: split whose loss is measured.
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
        """Returns what tells each branch from all others, in the order of training."""
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
    """Returns the key of a branch, the same for its record."""
    chosen = {name: value for name, value in record.items() if name not in _MEASURED}
    return json.dumps(chosen, sort_keys=True)


def check(request: Request) -> list[int]:
    """Returns the factors, after checking every option that needs no run.

    Raises:
      UserError: an option has a mistake.
    """
    if not 0 < request.tolerance < math.inf:
        raise UserError(
            f"--tolerance is {request.tolerance}; it must be above 0, such as 0.01 for a loss one "
            "percent higher"
        )
    if request.seeds < 1:
        raise UserError(f"--seeds is {request.seeds}; it must be at least 1")
    places(request.at)
    with naming("--span"):
        durations.parse(request.span)
    parts = [part.strip() for part in request.factors.split(",")]
    found = [int(part) if re.fullmatch("[0-9]{1,9}", part) else 0 for part in parts]
    ascend = all(low < high for low, high in itertools.pairwise(found))
    if found[0] != 1 or len(found) < 2 or not ascend:
        raise UserError(
            f"--factors is {request.factors!r}; it must be whole numbers that ascend from 1, such "
            "as 1,2,4,8"
        )
    return found


def places(text: str) -> list[durations.Duration]:
    """Returns the durations of --at; one without a unit has that of the next.

    >>> print(*places('10, 30 percent, 2 epochs'), sep=' | ')
    10 percent | 30 percent | 2 epochs

    Raises:
      UserError: one of them is no duration.
    """
    found: list[durations.Duration] = []
    for part in reversed(text.split(",")):
        if found and len(part.split()) == 1:
            part = f"{part} {found[0].unit}"
        with naming("--at"):
            found.insert(0, durations.parse(part))
    return found


def choose(run: Run, request: Request, factors: Sequence[int], there: Sequence[int]) -> Study:
    """Returns the branches that a request asks of a run.

    Args:
      run: the run.
      request: the options.
      factors: result of `check`.
      there: completed updates of the run's checkpoints, ascending.

    Raises:
      UserError: no checkpoint is near a place, branches are too short, overlap or go on beyond the
        run, or the evaluation has no such loss.
    """
    length = span(request.span, factors, run.recipe)
    return Study(
        starts(request.at, there, length, run.recipe),
        factors,
        measured_at(length, factors),
        request.scaling or own_scaling(run.config),
        [run.config.seed + number for number in range(request.seeds)],
        request.split or run.config.data.eval_split,
        _loss(metric_names(run), request.metric),
    )


def span(text: str, factors: Sequence[int], recipe: Recipe) -> int:
    """Returns the length of a branch in updates of the run, a multiple of every factor.

    Raises:
      UserError: the largest factor has too few updates in it.
    """
    updates = durations.parse(text).whole_steps(
        recipe.batch_size, recipe.num_examples, recipe.total_steps
    )
    unit, largest = math.lcm(*factors), factors[-1]
    rounded = math.ceil(updates / unit) * unit
    if rounded // largest < _LEAST_UPDATES:
        least = math.ceil(_LEAST_UPDATES * largest / unit) * unit
        raise UserError(
            f"--span is {text!r}, in which a branch at {largest} times the batch has "
            f"{rounded // largest} updates and needs at least {_LEAST_UPDATES}; give at least "
            f"'{least} steps', or smaller --factors"
        )
    return rounded


def starts(text: str, there: Sequence[int], length: int, recipe: Recipe) -> list[int]:
    """Returns the updates of the checkpoints nearest to the places of --at, ascending.

    Raises:
      UserError: a place has no checkpoint near it, or no room for a branch.
    """
    total, found = recipe.total_steps, list[int]()
    for place in places(text):
        wanted = place.steps(recipe.batch_size, recipe.num_examples, total)
        nearest = min(there, key=lambda step: abs(step - wanted))
        if abs(nearest - wanted) > max(1.0, _NEAR * total):
            listed = ", ".join(f"{step:,} ({100 * step / total:.3g} percent)" for step in there)
            raise UserError(
                f"--at has '{place}', which is update {wanted:,.0f}, and the run has no checkpoint "
                f"within {_NEAR:.0%} of its length from there; it has those of updates {listed}, "
                "and a run with --config.checkpoint.keep_every='10 percent' keeps some all along"
            )
        if nearest + length > total:
            raise UserError(
                f"--at has '{place}', and a branch of {length:,} updates from the checkpoint of "
                f"update {nearest:,} would go on beyond the run's last, {total:,}; give an earlier "
                "place, or a shorter --span"
            )
        # See `branch.widened`: one program serves all places.
        near = [start for start in found if abs(start - nearest) < length]
        if near:
            raise UserError(
                f"--at has '{place}', whose checkpoint of update {nearest:,} is less than a "
                f"branch, {length:,} updates, from that of update {near[0]:,}; leave one out, or "
                "give a shorter --span"
            )
        found.append(nearest)
    return sorted(found)


def _loss(names: Sequence[str], name: str | None) -> str:
    losses = [each for each in names if each.endswith("loss") and not each.startswith("ema_")]
    if name is None and losses:
        return losses[0]
    if name not in losses:
        raise UserError(
            f"--metric is {name!r}; the losses of this run's evaluation are: "
            f"{', '.join(losses) or 'none'}"
        )
    return name

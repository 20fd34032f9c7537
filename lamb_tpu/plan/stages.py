"""The time of a run with a program for each stage of an exchange or optimizer, or for each batch size.

Some exchanges send full gradients during the warm-up and compressed gradients later, or become
sparser over time. A plan compiles one step for each stage. The time of the run is the sum over
stages, or batches, of the number of updates times the time of a step.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from lamb_tpu import terminal
from lamb_tpu.cost import traffic
from lamb_tpu.cost.timeline import Timeline
from lamb_tpu.optim.reducing import Reducing
from lamb_tpu.plan.totals import span_text
from lamb_tpu.run.build import Run

Stage = Any  # a `lamb_tpu.parallel.step.Stage`, as `Run.stage` returns it


class StageRow(NamedTuple):
    """The updates of a stage."""

    name: str  # the exchange, with its fields that differ between the stages
    updates: int
    # Seconds of an update's computation: shortest, expected, longest; None if unknown.
    compute: tuple[float, ...] | None
    # Seconds for which an update waits for the network, in the same form.
    network: tuple[float, ...] | None
    sent: dict[str, int] | None  # bytes that a device sends in an update, by dtype


class BatchRow(NamedTuple):
    """Updates with one batch size; for `compute` and `network` see `StageRow`."""

    updates: float
    examples: float  # examples of all these updates together
    compute: tuple[float, ...] | None
    network: tuple[float, ...] | None


class Along(NamedTuple):
    """The updates of a run in which the batch size changes, in order."""

    microbatch: int  # examples of a microbatch over all devices
    rows: tuple[BatchRow, ...]

    def describe(self, listed: int = 8) -> list[str]:
        """Returns a table of the first `listed` rows and the last row."""
        cells: list[tuple[str, ...]] = [("batch", "updates", "examples", "ms", "time")]
        for row in self.rows:
            numbers = (row.examples / row.updates, row.updates, row.examples)
            cells.append((*(f"{number:,.0f}" for number in numbers), *step_texts(row)))
        if len(cells) > listed + 2:
            skipped = len(cells) - listed - 2
            cells[listed + 1 : -1] = [(f"{skipped:,} more", "", "", "", "")]
        head = f"updates by batch size, in microbatches of {self.microbatch:,} examples:"
        return [head, *terminal.columns(cells, right=range(5)).splitlines()]


def stages_of(run: Run) -> dict[Stage, tuple[int, int]]:
    """Returns the first update (counted from 0) and the number of updates of each stage."""
    if run.exchange is None and not isinstance(run.tx, Reducing):
        return {run.stage(0): (0, run.recipe.total_steps)}  # spares a loop over up to 10^8 updates
    stages: dict[Stage, tuple[int, int]] = {}
    for update in range(run.recipe.total_steps):
        stage = run.stage(update)
        first, count = stages.get(stage, (update, 0))
        stages[stage] = first, count + 1
    return stages


def names(stages: Sequence[Stage]) -> list[str]:
    """Names each stage by its exchange and by the fields that differ between the stages."""
    every = [_fields(stage) for stage in stages]
    differing = {
        key
        for fields in every
        for key, value in fields.items()
        if any(key in other and other[key] != value for other in every)
    }
    texts = []
    for stage, fields in zip(stages, every, strict=True):
        kind = type(stage.exchange).__name__ if stage.exchange is not None else "by the compiler"
        shown = [
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in fields.items()
            if key in differing
        ]
        if stage.of_optimizer is not None:
            shown.append(f"optimizer {stage.of_optimizer}")
        texts.append(", ".join([kind, *shown]))
    return texts


def _fields(stage: Stage) -> dict[str, Any]:
    exchange: Any = stage.exchange
    if not dataclasses.is_dataclass(exchange):
        return {}
    return {
        field.name: getattr(exchange, field.name)
        for field in dataclasses.fields(exchange)
        if field.name not in ("axes", "num_devices")
    }


def row(name: str, updates: int, times: Sequence[Timeline] | None) -> StageRow:
    """Makes the row of a stage from the schedules of its step."""
    if times is None:
        return StageRow(name=name, updates=updates, compute=None, network=None, sent=None)
    return StageRow(
        name=name,
        updates=updates,
        compute=tuple(each.compute for each in times),
        network=tuple(each.exposed for each in times),
        sent=traffic.sent_by_dtype(event.collective for event in times[1].events),
    )


def seconds(
    rows: Sequence[StageRow] | Sequence[BatchRow],
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns the computation and the network times of all updates together; None if any is unknown."""
    sums = [[0.0] * 3, [0.0] * 3]
    for each in rows:
        if each.compute is None or each.network is None:
            return None
        for bound in range(3):
            sums[0][bound] += each.updates * each.compute[bound]
            sums[1][bound] += each.updates * each.network[bound]
    return tuple(sums[0]), tuple(sums[1])


def describe(rows: Sequence[StageRow]) -> list[str]:
    """Returns a table of the stages."""
    cells: list[tuple[str, ...]] = [("stage", "updates", "ms", "sends", "time")]
    for each in rows:
        step, time = step_texts(each)
        sent = "?" if each.sent is None else f"{sum(each.sent.values()) / 2**20:,.4g} MiB"
        cells.append((each.name, f"{each.updates:,}", step, sent, time))
    head = "stages of the run; the plan above is for the stage with the most updates:"
    return [head, *terminal.columns(cells, right=(1, 2, 3, 4)).splitlines()]


def step_texts(row: StageRow | BatchRow) -> tuple[str, str]:
    """Formats the expected milliseconds of an update and the time of the row's updates; '?' if unknown."""
    if row.compute is None or row.network is None:
        return "?", "?"
    step = row.compute[1] + row.network[1]
    return f"{1e3 * step:.3g}", span_text(row.updates * step, row.updates * step)

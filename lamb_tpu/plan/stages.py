"""Stages of a run's exchange or optimizer, each of which is a program of its own.

Warm-up with whole gradients and then compressed ones, or sparser from step to step: a plan compiles
a step for each stage, and a run takes the sum over stages of their updates times their steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from lamb_tpu import terminal
from lamb_tpu.cost import traffic
from lamb_tpu.cost.timeline import Timeline
from lamb_tpu.plan.totals import span_text
from lamb_tpu.run.build import Run

Stage = Any  # a `lamb_tpu.parallel.step.Stage`, as `Run.stage` returns it


class Row(NamedTuple):
    """A stage of a run.

    Attributes:
      name: in what it differs from the other stages.
      updates: number of its updates.
      compute: seconds of an update's computation: shortest, expected, longest; None if unknown.
      network: seconds for which an update waits for the network, likewise.
      sent: bytes that a device sends in an update, by dtype; None if unknown.
    """

    name: str
    updates: int
    compute: tuple[float, ...] | None
    network: tuple[float, ...] | None
    sent: dict[str, int] | None


def stages_of(run: Run) -> dict[Stage, tuple[int, int]]:
    """Returns for each stage its first update, counted from 0, and the number of its updates."""
    found: dict[Stage, tuple[int, int]] = {}
    for update in range(run.recipe.total_steps):
        stage = run.stage(update)
        first, count = found.get(stage, (update, 0))
        found[stage] = first, count + 1
    return found


def names(stages: Sequence[Stage]) -> list[str]:
    """Returns what each stage does: an exchange by its name, and fields that others have not."""
    every = [_fields(stage) for stage in stages]
    differing = {
        key
        for fields in every
        for key, value in fields.items()
        if any(key in other and other[key] != value for other in every)
    }
    found = []
    for stage, fields in zip(stages, every, strict=True):
        kind = type(stage.exchange).__name__ if stage.exchange is not None else "by the compiler"
        shown = [f"{key}={_value(fields[key])}" for key in fields if key in differing]
        if stage.of_optimizer is not None:
            shown.append(f"optimizer {stage.of_optimizer}")
        found.append(", ".join([kind, *shown]))
    return found


def _fields(stage: Stage) -> dict[str, Any]:
    exchange: Any = stage.exchange
    if not dataclasses.is_dataclass(exchange):
        return {}
    return {
        field.name: getattr(exchange, field.name)
        for field in dataclasses.fields(exchange)
        if field.name not in ("axes", "num_devices")
    }


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def row(name: str, updates: int, times: Sequence[Timeline] | None) -> Row:
    """Returns the row of a stage whose step has these times."""
    if times is None:
        return Row(name, updates, None, None, None)
    return Row(
        name,
        updates,
        tuple(each.compute for each in times),
        tuple(each.exposed for each in times),
        traffic.sent_by_dtype(event.collective for event in times[1].events),
    )


def seconds(rows: Sequence[Row]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Returns the computation and the network of all updates; None if a time is unknown."""
    sums = [[0.0] * 3, [0.0] * 3]
    for each in rows:
        if each.compute is None or each.network is None:
            return None
        for place in range(3):
            sums[0][place] += each.updates * each.compute[place]
            sums[1][place] += each.updates * each.network[place]
    return tuple(sums[0]), tuple(sums[1])


def describe(rows: Sequence[Row]) -> list[str]:
    """Returns a table of the stages."""
    cells: list[tuple[str, ...]] = [("stage", "updates", "ms", "sends", "time")]
    for each in rows:
        step = (
            None
            if each.compute is None or each.network is None
            else (each.compute[1] + each.network[1])
        )
        time = "?" if step is None else span_text(each.updates * step, each.updates * step)
        sent = "?" if each.sent is None else f"{sum(each.sent.values()) / 2**20:,.4g} MiB"
        cells.append(
            (
                each.name,
                f"{each.updates:,}",
                "?" if step is None else f"{1e3 * step:.3g}",
                sent,
                time,
            )
        )
    head = "stages of the run, each a program; above is the one of most updates:"
    return [head, *terminal.columns(cells, right=(1, 2, 3, 4)).splitlines()]

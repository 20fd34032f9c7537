"""Estimates how long runs take, and selects runs that fit into a time budget."""

from collections.abc import Sequence

import jax

from lamb_tpu.reproduce import timing
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.timing import Span

# A run that is killed without notice loses at most _PERCENT of its time or _SECONDS, whichever is more.
_PERCENT = 2.0
_SECONDS = 30.0


def estimate(job: Job, results: Results) -> Span | None:
    """Returns the seconds that a run takes on this machine; None if unknown.

    Uses the records of runs on this type of device: those of the same cell or, if there are none, those of
    any cell at the same scale. If there are no such records, uses the table's estimate for the platform.
    """
    kind = jax.devices()[0].device_kind
    alike = [
        record
        for record in results
        if record["scale"] == job.scale.name
        and record["device"] == kind
        and (record["factor"] is None) == (job.factor is None)
    ]
    same = [record for record in alike if record["cell"] == job.cell.name]
    if measured := timing.span(same) or timing.span(alike):
        return measured
    minutes = job.scale.minutes.get(jax.default_backend())
    return None if minutes is None else Span(60 * minutes, 60 * minutes, 60 * minutes, 0)


def checkpoints(seconds: float | None) -> str | None:
    """Returns the duration between checkpoints of a run on a borrowed machine.

    A run that is killed without notice loses at most 2 percent of its time, or 30 s if that is more.
    Each save takes a fraction of a second, so 50 saves in a short run would cost more than the training
    that they protect. The run also saves when the budget ends. If `seconds`, the run's estimated time, is
    None or 0 (unknown), returns None, which keeps the recipe's setting.
    """
    if not seconds:
        return None
    return f"{min(100.0, max(_PERCENT, 100 * _SECONDS / seconds)):.3g} percent"


def fitting(jobs: Sequence[Job], results: Results, seconds: float) -> list[Job]:
    """Returns the runs that fit into `seconds` one after another, the most informative first.

    Every cell gets its first seed before any second seed. Among runs with the same seed, cells with a
    published value come first. The first run of unknown time is accepted if time is left, and ends the list.
    """
    chosen: list[Job] = []
    for job in sorted(jobs, key=lambda job: (job.seed, not job.cell.published)):
        needed = estimate(job, results)
        if needed is None:
            return [*chosen, job] if seconds > 0 else chosen
        if needed.median <= seconds:
            chosen.append(job)
            seconds -= needed.median
    return chosen

"""Estimates how long runs take, and chooses those that fit into a time."""

import statistics
from collections.abc import Sequence

import jax

from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results


def estimate(job: Job, results: Results) -> float | None:
    """Returns the seconds that a run takes on this machine; None if nothing is known.

    It is the mean of what such runs took on this kind of device: of the same cell, else of any cell
    at the same scale; without records it is what the table says of this platform.
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
    if alike:
        return statistics.fmean(record["seconds"] for record in same or alike)
    minutes = job.scale.minutes.get(jax.default_backend())
    return None if minutes is None else 60 * minutes


def fitting(jobs: Sequence[Job], results: Results, seconds: float) -> list[Job]:
    """Returns the runs that fit into a time one after another, the most telling first.

    Those are runs of cells that the paper has a value for, each with its first seed before any has
    its second. A run of which nothing is known counts as fitting; the ones after it wait until its
    time is known.
    """
    chosen: list[Job] = []
    for job in sorted(jobs, key=lambda job: (job.seed, not job.cell.published)):
        needed = estimate(job, results)
        if needed is None:
            return [*chosen, job] if seconds > 0 else chosen
        if needed <= seconds:
            chosen.append(job)
            seconds -= needed
    return chosen

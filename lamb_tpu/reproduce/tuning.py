"""The tuned form of a table: every cell searches the same range with the same number of runs.

A tuned layerwise optimizer looks better than an untuned baseline; equal budgets favour neither (Nado
et al. 2021, arXiv:2102.06356). The tuned form's records are in mnist.tuned.jsonl beside mnist.jsonl.
"""

import pathlib
from collections.abc import Sequence

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.search import Range, halton_points
from lamb_tpu.reproduce.tables import Table, Tuning


def tuned(table: Table, count: int) -> Table:
    """Returns a table whose cells each search `count` values of one key before they are measured.

    The first value is the cell's default. The others are quasi-random points in `Table.space`; a
    smaller count gives the first points of a larger count, so that a search can be extended.
    """
    if table.tuning is not None:
        raise UserError(
            "--tune",
            count,
            f"conflicts with the search of {len(table.tuning.factors)} value(s) per cell in "
            f"{table.key}",
            "leave --tune out",
        )
    space = table.space
    points = halton_points([Range("factor", *space.range, log=True)], count - 1, 0)
    factors = (1.0, *(float(point["factor"]) for point in points))
    return table._replace(tuning=Tuning(space.key, factors, space.overrides), form="tuned")


def forms(table: Table, records: pathlib.Path | None) -> Sequence[Table]:
    """Returns a table, and its tuned form if that form has records in `records` or beside the table.

    The tuned form searches as many values as its records contain.
    """
    if table.tuning is not None:
        return [table]
    results = Results(tuned(table, 2), records)
    tried = {record["factor"] for record in results if record["factor"] is not None}
    # Include the tuned form even if all its records are damaged, so that the damage is reported.
    if not tried and not results.damage:
        return [table]
    return [table, tuned(table, max(2, len(tried)))]


def describe(table: Table) -> str:
    """Describes the search of a tuned form, without a full stop; '' for other tables."""
    if table.tuning is None or not table.form:
        return ""
    low, high = table.space.range
    return (
        f"tuned: the best of {len(table.tuning.factors)} values of {table.tuning.key} per cell, "
        f"from {low:g} to {high:g} times its default"
    )

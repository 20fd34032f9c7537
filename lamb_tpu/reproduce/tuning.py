"""The tuned form of a table: every cell searches the same range with the same number of runs.

A layerwise optimizer that was tuned looks better than a baseline that was not. With equal budgets
neither is favoured (Nado et al. 2021, arXiv:2102.06356). The records of a table's tuned form lie
beside those of the table as its file has it: mnist.tuned.jsonl beside mnist.jsonl.
"""

import pathlib
from collections.abc import Sequence

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.search import Range, halton_points
from lamb_tpu.reproduce.tables import Table, Tuning


def tuned(table: Table, count: int) -> Table:
    """Returns a table whose cells each search `count` values of one key before they are measured.

    The first is the cell's own value. The others are quasi-random in `Table.space`; those of a
    smaller count are the first ones of a larger, so that a search can be continued.

    Raises:
      UserError: `count` is less than 2, or the table has a search of its own.
    """
    if count < 2:
        raise UserError(f"--tune is {count}; it must be at least 2")
    if table.tuning is not None:
        raise UserError(
            f"{table.key} has a search of its own, of {len(table.tuning.factors)} values a cell; "
            "leave --tune out"
        )
    space = table.space
    points = halton_points([Range("factor", space.low, space.high, log=True)], count - 1, 0)
    factors = (1.0, *(float(point["factor"]) for point in points))
    return table._replace(tuning=Tuning(space.key, factors, space.overrides), form="tuned")


def forms(table: Table, records: pathlib.Path | None) -> Sequence[Table]:
    """Returns a table, and its tuned form if there are records of that.

    The search of the tuned form has as many values as have been tried in any cell.

    Args:
      table: the table as its file has it.
      records: folder of records of one's own; None: those beside the table.
    """
    if table.tuning is not None:
        return [table]
    tried = {
        record["factor"]
        for record in Results(tuned(table, 2), records)
        if record["factor"] is not None
    }
    return [table, tuned(table, max(2, len(tried)))] if tried else [table]


def describe(table: Table) -> str:
    """Returns what a tuned form's search is, as a sentence without its full stop; '' if it is not
    one.
    """
    if table.tuning is None or not table.form:
        return ""
    low, high = table.space.low, table.space.high
    return (
        f"tuned: the best of {len(table.tuning.factors)} values of {table.tuning.key} for every "
        f"cell, its own and others between {low:g} and {high:g} times that"
    )

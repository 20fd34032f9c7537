"""Selects tables, scales and cells by the names that a user gives."""

from collections.abc import Iterable, Mapping

from lamb_tpu.errors import UserError, listed, unknown
from lamb_tpu.reproduce.tables import SCALES, Cell, Scale, Table


def choose_tables(tables: Mapping[str, Table], names: Iterable[str]) -> list[Table]:
    """Returns the tables with these names: 'lamb/mnist', or 'lamb' for all tables of a paper."""
    chosen: dict[str, Table] = {}
    for name in names:
        matches = {key: table for key, table in tables.items() if name in (key, table.paper.key)}
        if not matches:
            raise unknown("TABLE", name, tables)
        chosen |= matches
    return list(chosen.values())


def choose_scale(table: Table, name: str | None, default: str) -> Scale:
    """Returns the named scale; if no name is given, the default scale or else another scale of the table.

    The smoke scale is the fallback only if the table has no other scale.
    """
    if name is None:
        # The scales are ordered as in SCALES, from smoke to paper.
        name = default if default in table.scales else list(table.scales)[-1]
    if name not in table.scales:
        known = table.scales if name in SCALES else SCALES
        raise UserError("--scale", name, f"is not a scale of {table.key}", f"use {listed(known)}")
    return table.scales[name]


def choose_cells(table: Table, names: str | None) -> list[Cell]:
    """Returns the cells with these comma-separated names; without names, all cells that can be run."""
    cells = {cell.name: cell for cell in table.cells.values() if not cell.unknown}
    if names is None:
        return list(cells.values())
    for name in names.split(","):
        if name not in cells:
            raise UserError(
                "--cells",
                name,
                f"is not a cell of {table.key} that can be run",
                f"use {listed(cells)}",
            )
    return [cells[name] for name in names.split(",")]

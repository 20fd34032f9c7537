"""Finds tables, scales and cells by the names that a user gives."""

from collections.abc import Iterable, Mapping

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce.tables import SCALES, Cell, Scale, Table


def choose_tables(tables: Mapping[str, Table], names: Iterable[str]) -> list[Table]:
    """Returns the tables of some names: 'lamb/mnist', or 'lamb' for all tables of a paper.

    Raises:
      UserError: there is no such table; the message lists the known ones.
    """
    chosen: dict[str, Table] = {}
    for name in names:
        fits = {key: table for key, table in tables.items() if name in (key, table.paper.key)}
        if not fits:
            raise UserError(f"there is no table {name!r}; known: {', '.join(tables)}")
        chosen |= fits
    return list(chosen.values())


def choose_scale(table: Table, name: str | None, default: str) -> Scale:
    """Returns the scale of a name; without one the default, or the only one that the table has.

    Raises:
      UserError: the table has no such scale.
    """
    if name is None:
        name = default if default in table.scales else next(iter(table.scales))
    if name not in table.scales:
        known = ", ".join(table.scales) if name in SCALES else ", ".join(SCALES)
        raise UserError(f"--scale is {name!r}; {table.key} has: {known}")
    return table.scales[name]


def choose_cells(table: Table, scale: Scale, names: str | None) -> list[Cell]:
    """Returns the cells of comma-separated names; without any, all that can be run.

    Raises:
      UserError: the table has no such cell at the scale, or it cannot be run.
    """
    cells = {cell.name: cell for cell in table.cells.values() if not cell.unknown}
    if names is None:
        return list(cells.values())
    for name in names.split(","):
        if name not in cells:
            raise UserError(
                f"--cells has {name!r}; {table.key} at the scale {scale.name} has: "
                f"{', '.join(cells)}"
            )
    return [cells[name] for name in names.split(",")]

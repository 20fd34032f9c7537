"""Tables, scales and cells are selected by name; an unknown name is an error."""

import pathlib

from lamb_tpu.reproduce import choosing, loading
from tests.raising import rejected
from tests.reproduce.papers import TABLE, write


def test_tables(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    write(tmp_path, name="other")
    actual = loading.load_all(tmp_path)
    expected = ["small/digits", "small/other"]
    assert [table.key for table in choosing.choose_tables(actual, ["small"])] == expected
    (table,) = choosing.choose_tables(actual, ["small/other"] * 2)
    assert table.key == "small/other"
    with rejected("TABLE", "big", "is unknown", "use small/digits or small/other"):
        choosing.choose_tables(actual, ["big"])


def test_scales_and_cells(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    scale = choosing.choose_scale(table, None, "paper")  # the table's only scale
    assert scale.name == "small" and choosing.choose_scale(table, "small", "paper") is scale
    smoke = write(tmp_path / "smoke", TABLE + '\n[scales.smoke]\nconfig = "digits:smoke"\n')
    # The smoke scale is not a fallback.
    assert choosing.choose_scale(smoke, None, "paper").name == "small"
    with rejected("--scale", "paper", "is not a scale of small/digits", "use small"):
        choosing.choose_scale(table, "paper", "small")
    names = [cell.name for cell in choosing.choose_cells(table, None)]
    assert names == ["lamb", "adamw"]  # the third cell cannot be run
    assert choosing.choose_cells(table, "adamw") == [table.cells["adamw"]]
    with rejected("--cells", "lars", "is not a cell of small/digits", "use lamb or adamw"):
        choosing.choose_cells(table, "lamb,lars")

"""Tables, scales and cells are found by name, and an unknown one is one sentence."""

import pathlib

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import choosing, loading
from tests.reproduce.papers import write


def test_tables(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    write(tmp_path, name="other")
    found = loading.load_all(tmp_path)
    assert [table.key for table in choosing.choose_tables(found, ["small"])] == [
        "small/digits",
        "small/other",
    ]
    assert [table.key for table in choosing.choose_tables(found, ["small/other"] * 2)] == [
        "small/other"
    ]
    with pytest.raises(UserError, match="no table 'big'; known: small/digits, small/other"):
        choosing.choose_tables(found, ["big"])


def test_scales_and_cells(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    scale = choosing.choose_scale(table, None, "paper")  # the only one
    assert scale.name == "small" and choosing.choose_scale(table, "small", "paper") is scale
    with pytest.raises(UserError, match="--scale is 'paper'; small/digits has: small"):
        choosing.choose_scale(table, "paper", "small")
    names = [cell.name for cell in choosing.choose_cells(table, scale, None)]
    assert names == ["lamb", "adamw"]  # the third cannot be run
    assert choosing.choose_cells(table, scale, "adamw") == [table.cells["adamw"]]
    with pytest.raises(UserError, match="--cells has 'lars'; small/digits .* has: lamb, adamw"):
        choosing.choose_cells(table, scale, "lamb,lars")

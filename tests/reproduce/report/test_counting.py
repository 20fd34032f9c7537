"""Counts of cells by status, and the values of the site's row filters."""

import json
import pathlib

import pytest

from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import load_all
from lamb_tpu.reproduce.report import counting, pages
from lamb_tpu.reproduce.report.counting import PaperCounts
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.status import Counts
from lamb_tpu.reproduce.tables import Table
from tests.reproduce.papers import TABLE, with_keys, write
from tests.reproduce.test_planned import entry
from tests.reproduce.test_results import add

SCALES = TABLE + TABLE[TABLE.index("[scales.small]") :].replace("small", "paper")


def measure(table: Table, cell: str, scale: str, seed: int = 0) -> None:
    add(Results(table), Job(table, table.scales[scale], table.cells[cell], seed), 0.9)


def made(folder: pathlib.Path) -> list[pages.Page]:
    return [pages.of_table(table, None) for table in load_all(folder).values()]


def test_a_cell_counts_once_by_its_first_status(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, SCALES.replace("cells = [", 'cells = [\n  {name = "wide"},'))
    plan = {"metric": "accuracy", "value": 90.0, "low": 80.0, "high": 95.0}
    # A planned time does not make a cell with a published accuracy planned.
    plans = [*(entry(cell=cell, **plan) for cell in ("lamb", "adamw")), entry(cell="lars")]
    (tmp_path / "planned.json").write_text(json.dumps(plans))
    everything = counting.counts(made(tmp_path))[1]
    assert everything.published == (0, 0, 2, 1) and everything.others == (0, 0, 0, 1)
    labels = {row.cell.name: row.label for _, row in made(tmp_path)[0].best}
    assert (labels["lamb"], labels["lars"]) == ("planned", "not run: settings not published")
    measure(table, "lamb", "small")
    measure(table, "adamw", "small")
    measure(table, "adamw", "paper")
    measure(table, "wide", "paper")
    (paper,), everything = counting.counts(made(tmp_path))
    assert paper.published == everything.published == (1, 1, 0, 1)
    assert paper.others == (1, 0, 0, 0)
    assert paper.complete == 0 and "None of the 1 values at the paper's scale" in paper.sentence
    measure(table, "adamw", "paper", seed=1)
    assert counting.counts(made(tmp_path))[1].complete == 1


def test_sentence() -> None:
    counts = PaperCounts(None, Counts(3, 13, 1, 96), Counts(), complete=3)
    assert counts.sentence == (
        "113 published values: 3 are measured at the paper's scale, 13 at another scale, 1 is "
        "planned, and 96 are not run."
    )
    assert PaperCounts(None, Counts(), Counts(1)).sentence == ""


def test_choices(tmp_path: pathlib.Path) -> None:
    text = SCALES.replace(
        "cells = [", 'cells = [\n  {name = "wide", argument = "optimizer=lamb,batch=1024"},'
    )
    text = with_keys(text, lars='overrides = {"optimizer.name" = "lars", batch_size = 64}')
    table = write(tmp_path, text)
    measure(table, "lamb", "paper")
    assert counting.choices(made(tmp_path)) == {
        "status": ["measured at the paper's scale", "not run"],
        "optimizer": ["AdamW", "LAMB", "LARS"],
        "batch": ["64", "128", "1,024"],
    }


@pytest.mark.parametrize(
    "flat, expected",
    [
        ({"optimizer.name": "lamb", "batch_size": 4096}, ("LAMB", "4,096")),
        (
            {"optimizer.name": "lamb", "phases.b.batch_size": 32, "phases.a.batch_size": 65536},
            ("LAMB", "65,536"),
        ),
        ({"optimizer.name": 3, "batch_size": "many"}, ("3", "many")),  # a damaged record
        ({}, ("", "")),
    ],
)
def test_setting(flat: dict[str, object], expected: tuple[str, str]) -> None:
    assert pages.setting(flat) == expected

"""The status of a cell, its text for readers, and the counts of statuses."""

import doctest
import pathlib

import pytest

from lamb_tpu.reproduce import planned, status
from lamb_tpu.reproduce.status import Counts, Status
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_planned import entry, with_plans


def test_examples() -> None:
    assert doctest.testmod(status).failed == 0


def test_the_first_status_that_holds() -> None:
    assert status.of(["small", "paper"], is_planned=True) is Status.PAPER
    assert status.of(["smoke"], is_planned=True) is Status.OTHER
    assert status.of([], is_planned=True) is Status.PLANNED
    assert status.of([]) is Status.OPEN


def test_counts_are_in_the_order_of_the_statuses() -> None:
    counts = Counts.of([Status.OPEN, Status.PAPER, Status.OPEN, Status.OTHER])
    assert counts == (1, 1, 0, 2) and (counts.total, counts.measured) == (4, 2)
    assert Counts.sum([counts, Counts(planned=5)]) == (1, 1, 5, 2)


@pytest.mark.parametrize(
    "standing, detail, expected",
    [
        (Status.PAPER, "measured", "measured at the paper's scale"),
        (Status.PAPER, "1 of 5 seeds", "measured at the paper's scale, 1 of 5 seeds"),
        (Status.OTHER, "measured", "measured at another scale"),
        (Status.PLANNED, "not run", "planned"),
        (Status.OPEN, "settings not published", "not run: settings not published"),
        (Status.OPEN, "stale", "not run: stale runs only"),
        (Status.OPEN, "not run", "not run"),
    ],
)
def test_label(tmp_path: pathlib.Path, standing: Status, detail: str, expected: str) -> None:
    table = write(tmp_path)
    group, text = status.label(table, table.cells["lamb"], standing, detail)
    assert (group, text) == (standing.value, expected)


def test_a_study_has_no_other_scale(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace(", published = {accuracy = 93.0}", "")
    table = write(tmp_path, text)
    cell = table.cells["lamb"]
    expected = ("measured", "measured, 1 of 2 seeds")
    assert status.label(table, cell, Status.OTHER, "1 of 2 seeds") == expected
    # If a table has a paper's scale, the status names other scales, even without a published value.
    paper = write(tmp_path, text + '[scales.paper]\nconfig = "digits"\n')
    assert status.label(paper, cell, Status.OTHER, "measured")[0] == "measured at another scale"


def test_a_planned_time_is_not_a_planned_accuracy(tmp_path: pathlib.Path) -> None:
    text = (
        TABLE.replace("[scales.small]", "[scales.paper]")
        .replace("published = {accuracy = 93.0}", "published = {accuracy = 93.0, hours = 81.4}")
        .replace("published = {accuracy = 92.5}", "published = {hours = 1.5}")
        .replace('published = {accuracy = "diverged"}, ', "")
    )
    metrics = {"lamb": "hours", "adamw": "hours", "lars": "accuracy"}
    entries = [entry(cell=cell, metric=metric) for cell, metric in metrics.items()]
    table = with_plans(tmp_path, text, *entries)
    plans, (scale,) = planned.of_table(table), table.scales.values()
    expected = [False, True, True]
    assert [status.is_planned(scale, cell, plans) for cell in table.cells.values()] == expected
    small = scale._replace(name="small")
    assert not status.is_planned(small, table.cells["adamw"], plans)

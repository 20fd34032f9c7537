"""Planned values are read from planned.json, checked, and shown beside the published values."""

import json
import pathlib
from typing import Any

import msgspec
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import planned, showing
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.report import site
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests.raising import rejected
from tests.reproduce.papers import TABLE, with_keys, write
from tests.reproduce.test_results import add

COMMAND = "python -m lamb_tpu.plan --config=digits --topology=v3-8"
PAPER = TABLE.replace("[scales.small]", "[scales.paper]").replace(
    "published = {accuracy = 93.0}", "published = {accuracy = 93.0, hours = 81.4}"
)
RATES = PAPER.replace("accuracy", "examples_per_second")


def entry(**more: Any) -> dict[str, Any]:
    return {
        "table": "small/digits",
        "cell": "lamb",
        "metric": "hours",
        "unit": "hours",
        "value": 56.92,
        "low": 27.4,
        "high": 118.0,
        "command": COMMAND,
        "commit": "0123456789ab",
        "versions": {"jax": "0.10.2", "libtpu": "0.0.42"},
        **more,
    }


def with_plans(tmp_path: pathlib.Path, text: str, *entries: dict[str, Any]) -> Table:
    table = write(tmp_path, text)
    (tmp_path / "planned.json").write_text(json.dumps(entries))
    return table


def test_another_metric_has_two_columns(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = with_plans(tmp_path, PAPER, entry(), entry(table="small/other"))
    showing.show([table], None)
    output = capsys.readouterr().out
    assert "paper, hours  planned, hours" in output
    assert "81.4          56.9 (27.4 to 118)" in output and COMMAND in " ".join(output.split())
    site.write({table.key: table}, tmp_path / "report", tmp_path / "site")
    page = (tmp_path / "report" / "small-digits.md").read_text()
    assert "| paper, hours | planned, hours | difference |" in page
    assert "| lamb | not run | 93.0 (recalled) | - | 81.4 | 56.9 (27.4 to 118) |" in page
    assert f"- lamb, 56.9 (27.4 to 118) hours: `{COMMAND}`\n" in page
    assert "At commit 0123456789ab, with jax 0.10.2, libtpu 0.0.42." in page
    assert "\n\n\n" not in page and "A planned value is the prediction of lamb_tpu.plan" in page
    html = (tmp_path / "site" / "small-digits.html").read_text()
    assert "81.4</td>" in html and "56.9 (27.4 to 118)</td>" in html and COMMAND in html


def test_the_matrix_shows_a_planned_metric_until_it_is_measured(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {name: f'row = "{name}", column = "c"' for name in ("lamb", "adamw", "lars")}
    plan = entry(metric="examples_per_second", unit="images/ms", high=1180.0)
    table = with_plans(tmp_path, with_keys(RATES, **keys), plan)
    cell, scale = table.cells["lamb"], table.scales["paper"]
    plans = planned.of_table(table)
    assert planned.heads(table, plans) == ["planned, images/ms"]
    assert planned.columns(table, scale, cell, plans) == ["56.9 (27.4 to 1,180)"]
    assert planned.columns(table, scale._replace(name="small"), cell, plans) == [""]
    assert planned.columns(table, scale, table.cells["adamw"], plans) == [""]
    low = [msgspec.structs.replace(each, low=1.0, high=92.0) for each in plans]
    assert planned.columns(table, scale, cell, low) == ["56.9 (1 to 92), paper's outside"]
    showing.show([table], None)
    assert "planned 56.9, 27.4 to 1,180 (93.0)" in capsys.readouterr().out
    site.write({table.key: table}, tmp_path / "report", None)
    page = (tmp_path / "report" / "small-digits.md").read_text()
    assert "| lamb | planned 56.9, 27.4 to 1,180 (93.0) |" in page

    add(Results(table), Job(table, scale, cell, 0), None, values={"examples_per_second": 91.0})
    site.write({table.key: table}, tmp_path / "report", None)
    page = (tmp_path / "report" / "small-digits.md").read_text()
    assert "| lamb | 9100.0 (93.0) |" in page


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"value": "fast"}, "[1].value"),
        ({"low": 60.0}, "entry 1"),
        ({"value": -1}, "[1].value"),
        ({"high": float("inf")}, "[1].high"),
        ({"cell": "a|b"}, "[1].cell"),
        ({"command": "a\x1b[31m"}, "[1].command"),
        ({"commit": "HEAD"}, "[1].commit"),
    ],
)
def test_a_damaged_entry_is_one_sentence(
    tmp_path: pathlib.Path, more: dict[str, Any], key: str
) -> None:
    table = with_plans(tmp_path, PAPER, entry(**more))
    problem = "has low 60, value 56.92 and high 118" if key == "entry 1" else "is not valid"
    with rejected(f"{tmp_path / 'planned.json'}: {key}", ..., problem):
        planned.of_table(table)


def test_a_damaged_file_is_one_sentence(tmp_path: pathlib.Path) -> None:
    table = with_plans(tmp_path, PAPER, entry(), entry(value=50.0))
    with rejected(
        "*: entry 2", ..., "has the table, cell and metric of an earlier entry", "delete"
    ):
        planned.of_table(table)
    for content in ("{", '{"a": 1}', "[1]"):
        (tmp_path / "planned.json").write_text(content)
        with pytest.raises(UserError, match="planned.json"):
            planned.of_table(table)
    (tmp_path / "planned.json").unlink()
    assert planned.of_table(table) == ()


def test_the_file_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    table = with_plans(tmp_path, PAPER, entry(), entry(cell="adamw"))
    actual = planned.of_table(table)
    (tmp_path / "planned.json").write_text(planned.dump(actual))
    assert planned.read(tmp_path) == actual


def test_shipped_values_are_of_cells_with_a_published_one() -> None:
    tables, actual = load_all(folder()), planned.read(folder())
    assert len({(each.table, each.cell) for each in actual}) >= 32
    for each in actual:
        published = tables[each.table].cells[each.cell].published[each.metric]
        assert isinstance(published, (int, float)) and published > 0, each.key
        assert "paper" in tables[each.table].scales

"""Every number on a page of experiments/ comes from a record beside it.

A page is of one of four kinds. A page that is `MADE` is made anew here from the records beside it,
byte for byte, and one that is `REPORTED` in the tests of lamb_tpu.reproduce. One that is `PRINTED`
is the whole output of a benchmark's command with --write, so it is itself the record. A page that
is `WRITTEN` by hand repeats: each number in its prose and tables stands, rounded perhaps, in the
records beside it or on one of the pages that it links to, or follows from two of those by a
calculation told here, or is quoted from a paper in experiments/quoted.json.
"""

import json
import operator
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest

from experiments.batching import measures
from experiments.exchange import page as compression
from experiments.exchange import programs
from experiments.legw import lipschitz
from experiments.plan import layouts, logged, rows
from experiments.plan import page as calibration
from lamb_tpu.store.metrics import read_records
from tests.shared import ROOT, shared

FOLDER = ROOT / "experiments"


def _kept(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / name).read_text())


MADE: dict[str, Callable[[], str]] = {
    "legw/lipschitz.md": lambda: lipschitz.page(_kept("legw/lipschitz.json")),
    "exchange/compression.md": lambda: compression.text(programs.load()),
    "plan/calibration.md": lambda: calibration.text(logged.load_all(), rows.load_kept()),
    "plan/layouts.md": lambda: layouts.page(layouts.load()),
}
if measures.RECORD.exists():  # no record, no page
    MADE["batching/measures.md"] = lambda: measures.page(json.loads(measures.RECORD.read_text()))
# Of lamb_tpu.reproduce, made anew by tests/reproduce/report/test_site.py.
REPORTED = {"README.md"} | {f"report/{path.name}" for path in (FOLDER / "report").glob("*.md")}
PRINTED = {f"bench/{path.name}" for path in (FOLDER / "bench").glob("*.md")}


class Written(NamedTuple):
    """A page written by hand.

    Attributes:
      calculated: a number on it: how it follows from two that it may repeat.
      said: numbers that are no results, such as what a command takes.
    """

    calculated: dict[str, tuple[Callable[[float, float], float], float, float]] = {}
    said: tuple[str, ...] = ()


WRITTEN = {
    "bert/README.md": Written({"0.4": (operator.sub, 7.968, 7.570)}, said=("76", "30,522", "24")),
    "vision/README.md": Written(
        {"1.30": (operator.truediv, 1082, 834), "1.17": (operator.truediv, 996, 851)},
        said=("1,024",),
    ),
}
_LINK = re.compile(r"\]\(([^):]+\.md)\)")
_CODE = re.compile(r"```.*?```|`[^`]*`|^    .*$|\]\([^)]*\)|https?://\S+", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w])")


def numbers(text: str) -> list[str]:
    """Returns the numbers in prose and tables, without code, links and names such as v3."""
    return [found.rstrip(",") for found in _NUMBER.findall(_CODE.sub(" ", text))]


def value(text: str) -> float:
    return float(text.replace(",", ""))


def is_from(text: str, sources: Iterable[float]) -> bool:
    """Returns whether a source equals a number, rounded to its decimals; whole ones exactly."""
    decimals = len(text.partition(".")[2])
    room = 0.5 * 10.0**-decimals * (1 + 1e-9) if decimals else 0.0
    return any(abs(source - value(text)) <= room for source in sources)


def quoted() -> list[float]:
    entries = json.loads((FOLDER / "quoted.json").read_text())
    return [float(number) for entry in entries for number in entry["numbers"]]


def unfounded(name: str, written: Written) -> list[str]:
    """The numbers on a page written by hand that come from nowhere."""
    folder, own = (FOLDER / name).parent, (FOLDER / name).read_text()
    sources = quoted()
    for path in folder.glob("*.jsonl"):
        for record in read_records(path):
            sources += [*(record["values"] or {}).values(), record["updates"]]
            sources += [loss for _, loss in record["losses"]]
    for page in _LINK.findall(own):
        sources += map(value, numbers((folder / page).read_text()))
    known = set(written.said)
    for text, (calculate, first, second) in written.calculated.items():
        assert first in sources and second in sources
        if is_from(text, [calculate(first, second)]):
            known.add(text)
    return [text for text in numbers(own) if text not in known and not is_from(text, sources)]


@pytest.mark.parametrize("name", MADE)
def test_a_page_is_made_of_its_records(name: str) -> None:
    assert MADE[name]() == (FOLDER / name).read_text()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_written_by_hand_repeats(name: str) -> None:
    assert not unfounded(name, WRITTEN[name])


def test_every_page_is_looked_at() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.md")}
    assert found == {*MADE, *PRINTED, *REPORTED, *WRITTEN}
    for name in MADE:
        assert re.search(r"jax \d|libtpu", MADE[name]())
        assert re.search("[Cc]ommand|One run: `|python -m", MADE[name]())


def test_what_is_told_of_the_test_of_numbers() -> None:
    text = "At 4,096 it is 7.97, 3.52 % of v3-1024 (`loss=9.1`, [a](b-7.md)); batch 64.\n\n    9 "
    assert numbers(text) == ["4,096", "7.97", "3.52", "64"]
    assert is_from("7.97", [7.968]) and not is_from("7.96", [7.968])
    assert is_from("529", [529.0]) and not is_from("529", [529.3])


def test_a_number_without_a_record_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FOLDER", tmp_path)
    (tmp_path / "quoted.json").write_text('[{"numbers": [0.9408]}]')
    (tmp_path / "study.md").write_text("| 0.1120 | 684 | `0.3333` |")
    (tmp_path / "page.md").write_text(
        "LAMB: 684 updates, in 12.5 minutes; the paper 0.9408. As [here](study.md) 0.112, not "
        "0.3333; 0.0895 less."
    )
    assert unfounded("page.md", Written()) == ["12.5", "0.3333", "0.0895"]
    less = {"0.0895": (operator.sub, 0.9408, 0.8513)}
    with pytest.raises(AssertionError):  # neither number of the calculation is anywhere
        unfounded("page.md", Written(less))
    assert unfounded("page.md", Written(said=("12.5", "0.0895"))) == ["0.3333"]
    record = {"values": {"accuracy": 0.33334}, "updates": 7, "losses": [[7, 0.0895]]}
    (tmp_path / "study.jsonl").write_text(json.dumps(record) + "\n")
    assert unfounded("page.md", Written()) == ["12.5"]


def test_quotations_are_those_of_the_papers() -> None:
    tables = json.loads(shared("papers", "tables.json").read_text())
    for entry in json.loads((FOLDER / "quoted.json").read_text()):
        (table,) = (
            each
            for each in tables
            if (each["paper"], each["table"]) == (entry["paper"], entry["table"])
        )
        assert table["provenance"]["status"] == entry["status"]
        text = json.dumps(table["rows"])
        for number in entry["numbers"]:
            assert re.search(rf"(?<![\d.]){re.escape(str(number))}(?!\d)", text), number


# Of the tables that a benchmark prints: page, table, column, what it is, and of what. Columns are
# counted from 0; a text names the row that all of a column are parts of.
PARTS = [
    ("convolution", 0, 4, 3, 2),
    ("convolution", 0, 7, 6, 5),
    ("image_throughput", 0, 2, 1, "tf.data"),
    ("image_throughput", 0, 4, 3, "tf.data"),
    ("image_throughput", 1, 4, 2, 3),
    ("save_stall", 0, 2, 1, "update alone"),
    ("train_loop", 0, 3, 1, 2),
    ("update_speed", 0, 3, 1, "optax.lamb"),
    ("update_speed", 0, 4, 1, "optax.adamw"),
    ("update_tpu", 0, 2, 1, "optax.lamb"),
    ("update_tpu", 0, 3, 1, "optax.adamw"),
]


def tables(text: str) -> list[list[list[str]]]:
    """Cells of a page's tables, without their heads."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in found
    ]


def _range(cell: str) -> tuple[float, float]:
    """Between which numbers a rounded one was."""
    room = 0.5 * 10.0 ** -len(cell.partition(".")[2])
    return value(cell) - room, value(cell) + room


@pytest.mark.parametrize(("name", "table", "column", "part", "whole"), PARTS)
def test_ratios_that_a_benchmark_printed_follow_from_its_figures(
    name: str, table: int, column: int, part: int, whole: int | str
) -> None:
    rows = tables((FOLDER / "bench" / f"{name}.md").read_text())[table]
    assert rows
    for row in rows:
        of = row[whole] if isinstance(whole, int) else next(r for r in rows if r[0] == whole)[part]
        (low, high), (least, most) = _range(row[part]), _range(of)
        shown = _range(row[column])
        assert shown[0] <= high / least and low / most <= shown[1], row

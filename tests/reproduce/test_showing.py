"""Tables printed on the terminal; test_running.py tests further output."""

import pathlib
import re

import pytest

from lamb_tpu.reproduce import showing
from lamb_tpu.reproduce.results import Results
from tests.raising import rejected
from tests.reproduce.papers import TABLE, with_keys, write
from tests.reproduce.test_results import add, job_of
from tests.reproduce.test_running import call


def test_show(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path)
    results = Results(table)
    for seed, accuracy in enumerate((0.93, 0.94)):
        add(results, job_of(table, seed=seed), accuracy)
    add(results, job_of(table, "adamw"), None)
    showing.show([table], None)
    half = "measured at another scale, 1 of 2 seeds"
    assert (
        capsys.readouterr().out
        == f"""\
small/digits: Digits by optimizer
arXiv:0000.00000, Table 9

small: test accuracy, % (higher is better); 1.5 seconds per run on 2 CPU cores
    (1.5 in 2 runs; processor not recorded)
  cell   paper                measured         difference  seeds
  lamb   93.0 (recalled)      93.5 ± 6.4                   2      measured at another scale
  adamw  92.5 (seen)          1 of 1 diverged              1      {half}
  lars   diverged (recalled)  -                                   not run: settings not published
  A run counts as diverged if it ended with a loss or metric that is not finite.
"""
    )


def test_further_columns(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = 'columns = ["updates", "average_batch"]\n\n[scales.small]'
    for in_matrix in (False, True):
        text = TABLE.replace("[scales.small]", asked)
        if in_matrix:  # below a matrix, a measured cell has a row with the additional columns
            text = text.replace('{name = "', '{row = "r", column = "c", name = "')
        table = write(tmp_path, text)
        add(Results(table), job_of(table), 0.93, updates=1000, examples=1_172_400)
        add(Results(table), job_of(table, seed=1), 0.94, updates=1002, examples=1_172_400)
        showing.show([table], None)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        head = "cell paper measured updates average batch difference seeds".split()
        row = "lamb 93.0 (recalled) 93.5 ± 6.4 1,001 1,171 2 measured at another scale".split()
        assert head in lines and row in lines


def test_matrix(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {name: f'row = "{name}", column = "128"' for name in ("lamb", "adamw", "lars")}
    text = with_keys(**keys)
    showing.show_list({"small/digits": write(tmp_path, text)})
    showing.show([write(tmp_path, text)], None)
    output = capsys.readouterr().out
    assert "A small paper (arXiv:0000.00000)\n  small/digits  Digits by optimizer\n" in output
    assert "         128\n  lamb   - (93.0)\n  adamw  - (92.5)\n" in output
    assert "In parentheses: the paper's values." in output
    # Cells of the matrix without runs have no separate row.
    assert output.endswith("""
  cell  paper                measured  difference  seeds
  lars  diverged (recalled)  -                            not run: settings not published
  not run: lamb, adamw
""")


def test_a_matrix_that_says_all(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in TABLE.splitlines() if '"adamw"' not in line and '"lars"' not in line]
    text = "\n".join(lines).replace("published = {accuracy = 93.0}", 'row = "r", column = "128"')
    table = write(tmp_path, text)
    for seed in (0, 1):
        add(Results(table), job_of(table, seed=seed), 0.93)
        showing.show([table], None)
    text = capsys.readouterr().out
    _, first, second = re.split(r" \(higher is better\)[^)]*recorded\)\n", text)
    assert first.startswith("     128\n  r  93.0\n\n  cell ") and "1 of 2 seeds\n" in first
    assert second == "     128\n  r  93.0 ± 0.0\n"


@pytest.mark.parametrize("command", ["list", "show small", "report small"])
def test_a_damaged_record_stops_no_reader(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    table = write(tmp_path)
    for seed in (0, 1, 2):
        add(Results(table), job_of(table, seed=seed), 0.93)
    lines = table.records.read_text().replace('"seconds": 1.5', '"seconds": "long"', 1)
    table.records.write_text(lines)
    out, err = call(tmp_path, *command.split()), capsys.readouterr().err
    assert " ".join(err.split()) == (
        f"warning: line 1 of {table.records}: seconds='long' is not valid; use the type float; "
        "this entry is omitted"
    )
    if command == "show small":
        assert "93.0" in out
    if command == "report small":
        page = (tmp_path / "report" / "small-digits.md").read_text()
        note = "1 damaged record is omitted from this page; `show small/digits` lists them."
        assert note in " ".join(page.split()) and "seed 2 93.0" in page
    # Commands that write are rejected, because they would delete the damaged record.
    for writing in ("run small", "run small --dry-run"):
        with rejected(table.records, ..., "seconds='long'", "restore digits"):
            call(tmp_path, *writing.split(), f"--runs={tmp_path / 'runs'}")
    assert table.records.read_text() == lines and not (tmp_path / "runs").exists()

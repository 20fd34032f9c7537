"""Tables on the terminal; tests/reproduce/test_running.py follows them through a whole story."""

import pathlib
import subprocess

import pytest

from lamb_tpu.reproduce import showing
from lamb_tpu.reproduce.results import Results
from tests.reproduce.papers import TABLE, write
from tests.reproduce.test_results import add, job_of


def test_show(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(tmp_path)
    results = Results(table)
    for seed, accuracy in enumerate((0.93, 0.94)):
        add(results, job_of(table, seed=seed), accuracy)
    add(results, job_of(table, "adamw"), None)
    showing.show([table], None)
    assert (
        capsys.readouterr().out
        == """\
small/digits: Digits by optimizer
arXiv:0000.00000, Table 9

small: test accuracy, % (higher is better)
  cell   paper                measured         difference  seeds
  lamb   93.0 (recalled)      93.5 ± 6.4       +0.5        2      measured
  adamw  92.5 (seen)          1 of 1 diverged              1      1 of 2 seeds
  lars   diverged (recalled)  -                                   settings not published
"""
    )


def test_further_columns(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = 'columns = ["updates", "average_batch"]\n\n[scales.small]'
    for placed in (False, True):
        text = TABLE.replace("[scales.small]", asked)
        if placed:  # in a matrix a cell that is measured has a row of its own for them
            text = text.replace('{name = "', '{row = "r", column = "c", name = "')
        table = write(tmp_path, text)
        add(Results(table), job_of(table), 0.93, updates=1000, examples=1_172_400)
        add(Results(table), job_of(table, seed=1), 0.94, updates=1002, examples=1_172_400)
        showing.show([table], None)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        head = "cell paper measured updates average batch difference seeds".split()
        row = "lamb 93.0 (recalled) 93.5 ± 6.4 1,001 1,171 +0.5 2 measured".split()
        assert head in lines and row in lines


def test_matrix(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TABLE
    for name in ("lamb", "adamw", "lars"):
        text = text.replace(f'name = "{name}"', f'name = "{name}", row = "{name}", column = "128"')
    showing.show_list({"small/digits": write(tmp_path, text)})
    showing.show([write(tmp_path, text)], None)
    told = capsys.readouterr().out
    assert "A small paper (arXiv:0000.00000)\n  small/digits  Digits by optimizer\n" in told
    assert "         128\n  lamb   - (93.0)\n  adamw  - (92.5)\n" in told
    assert "In parentheses: the paper's." in told
    # A cell of the matrix that was not run has no row of its own.
    assert told.endswith("""
  cell  paper                measured  difference  seeds
  lars  diverged (recalled)  -                            settings not published
  not run: lamb, adamw
""")


def test_a_matrix_that_says_all(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in TABLE.splitlines() if '"adamw"' not in line and '"lars"' not in line]
    text = "\n".join(lines).replace("published = {accuracy = 93.0}", 'row = "r", column = "128"')
    table = write(tmp_path, text)
    for seed in (0, 1):
        add(Results(table), job_of(table, seed=seed), 0.93)
        showing.show([table], None)
    _, first, second = capsys.readouterr().out.split(" (higher is better)\n")
    assert first.startswith("     128\n  r  93.0\n\n  cell ") and "1 of 2 seeds\n" in first
    assert second == "     128\n  r  93.0 ± 0.0\n"


def test_commands_are_those_of_train(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    showing.show_commands([write(tmp_path)], None, "lamb")
    title, command = capsys.readouterr().out.splitlines()
    assert title == "# small/digits, small"
    assert command == (
        "python -m lamb_tpu.train --config=digits:batch=128,optimizer=lamb "
        "'--config.duration=4 steps' '--config.log.every=2 steps' --config.seed=0 "
        "--workdir=runs/small/digits/lamb"
    )
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0

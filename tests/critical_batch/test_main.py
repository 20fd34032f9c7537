"""Tests the command `critical_batch` in a separate process."""

import pathlib
from xml.etree import ElementTree

import pytest

from lamb_tpu.critical_batch.measuring import RECORDS
from lamb_tpu.store.metrics import read_records
from tests import tiny


@pytest.mark.long
def test_command(copy: pathlib.Path) -> None:
    arguments = (f"--workdir={copy}", "--at=33 percent", "--factors=1,2", "--span=8 steps")
    done = tiny.command("lamb_tpu.critical_batch", *arguments, "--scaling=sqrt")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines[0] == "  update  of run  critical batch  crossing"
    assert lines[1].startswith("       4  33.3 %              64 ")
    assert last == str(copy / "critical_batch.svg")
    assert ElementTree.parse(last).getroot().tag.endswith("svg")
    assert max(map(len, lines)) <= 80
    output = done.stderr.splitlines()
    assert len(output) == 2 and output[1].startswith("branch 2/2: update 4, x2: loss ")
    assert [record["factor"] for record in read_records(copy / RECORDS)] == [1, 2]
    # A repeated command trains nothing and prints the same report.
    again = tiny.command("lamb_tpu.critical_batch", *arguments, "--scaling=sqrt")
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")


@pytest.mark.long
def test_an_error_is_one_sentence(trained: pathlib.Path) -> None:
    done = tiny.command(
        "lamb_tpu.critical_batch", f"--workdir={trained}", "--at=4 steps", "--factors=2"
    )
    message = (
        "error: --factors='2' must be two or more whole numbers that ascend from 1; use numbers such "
        "as 1,2,4,8\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)

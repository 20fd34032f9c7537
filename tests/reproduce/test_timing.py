"""Times of runs come from the records, or else from the table's estimate."""

import doctest
import pathlib

import pytest

from lamb_tpu.reproduce import commands, running, showing, timing
from lamb_tpu.reproduce.report import pages
from lamb_tpu.reproduce.results import Results
from tests.reproduce.papers import TABLE, record, write
from tests.reproduce.test_results import add, job_of

SAID = TABLE.replace("seeds = 2", "seeds = 2\nminutes = {cpu = 3, gpu = 0.5}")
MEASURED = "8.4 minutes per run on 2 CPU cores (6.2 to 16.1 in 3 runs; processor not recorded)"


def test_examples() -> None:
    assert doctest.testmod(timing).failed == 0


def test_cost(tmp_path: pathlib.Path) -> None:
    scale = write(tmp_path, SAID).scales["small"]
    estimated = "about 30 seconds per run on a GPU (estimated)"
    assert timing.cost(scale, []) == f"about 3 minutes per run on a CPU (estimated), {estimated}"
    runs = [record("lamb", 0, 0.9, seconds=seconds) for seconds in (372.0, 504.0, 966.0)]
    failed = record("adamw", 0, None, seconds=1.0)  # ended early
    assert timing.cost(scale, [*runs, failed]) == f"{MEASURED}, {estimated}"
    runs = [run | {"processor": "Xeon"} for run in runs[:1]]
    runs += [record("lamb", 1, 0.9, device="NVIDIA H100", cores=16, seconds=3600.0 * 3)]
    assert timing.cost(scale._replace(hardware="a GPU"), runs) == (
        "a GPU, 6.2 minutes per run on 2 CPU cores (1 run; Xeon), 3 hours per run on NVIDIA H100 "
        "(1 run; processor not recorded)"
    )
    both = [record("lamb", 0, 0.9, seconds=60.0, processor=name) for name in ("A", None)]
    assert timing.cost(scale, both).startswith(
        "1 minute per run on 2 CPU cores (1 in 2 runs; A, or not recorded)"
    )


def test_every_command_has_the_records_time(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(tmp_path, SAID)
    for seed, seconds in enumerate((372.0, 504.0, 966.0)):
        add(Results(table), job_of(table, seed=seed), 0.9, seconds=seconds)
    showing.show([table], None)
    assert MEASURED in " ".join(capsys.readouterr().out.split())
    commands.show([table], "small", None)
    assert MEASURED in capsys.readouterr().out
    assert f"Cost: {MEASURED}" in pages.of_table(table, None).parts[0].summary
    running.run([table], running.TableRequest(tmp_path, dry_run=True))
    lines = capsys.readouterr().out.splitlines()
    assert "  adamw-small-seed0  about 8.4 minutes (6.2 to 16.1 in 3 runs)" in lines
    # Stale runs still take precedence over an estimate.
    old = write(tmp_path, SAID.replace("4 steps", "5 steps"))
    showing.show([old], None)
    assert MEASURED in " ".join(capsys.readouterr().out.split())

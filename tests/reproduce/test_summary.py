"""A cell's measurements beside the published value."""

import doctest
import pathlib

import pytest

from lamb_tpu.reproduce import jobs, summary
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import Summary, further, matrix, measured, summaries
from tests.reproduce.papers import TABLE, record, write
from tests.reproduce.test_results import add, job_of


def of(tmp_path: pathlib.Path, text: str = TABLE) -> dict[str, Summary]:
    table = write(tmp_path, text)
    found = summaries(table, table.scales["small"], Results(table))
    return {one.cell.name: one for one in found}


def test_summaries(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    metric = table.scales["small"].metric
    found = of(tmp_path)
    assert [one.status for one in found.values()] == [
        "not run",
        "not run",
        "settings not published",
    ]
    assert (found["lamb"].published, found["lars"].published) == ("93.0", "diverged")
    results = Results(table)
    add(results, job_of(table), 0.92)
    assert of(tmp_path)["lamb"].status == "1 of 2 seeds"
    assert measured(of(tmp_path)["lamb"], metric) == "92.0"
    for seed, accuracy in ((1, 0.94), (2, 0.96)):
        add(results, job_of(table, seed=seed), accuracy)
    lamb = of(tmp_path)["lamb"]
    assert lamb.status == "measured" and len(lamb.values) == 3  # one more than asked for
    assert lamb.mean == pytest.approx(94.0) and lamb.distance == pytest.approx(1.0)
    assert lamb.half_width == pytest.approx(4.303 * 2.0 / 3**0.5, rel=1e-3)
    assert measured(lamb, metric) == "94.0 ± 5.0"
    for seed in (0, 1, 2):
        add(results, job_of(table, seed=seed), 0.0)  # a mean of 0 has an interval too
    assert of(tmp_path)["lamb"].half_width == 0.0
    add(results, job_of(table, "adamw"), None)
    adamw = of(tmp_path)["adamw"]
    assert measured(adamw, metric) == "1 of 1 diverged" and adamw.distance is None


def test_further(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    keys = ("updates", "average_batch")
    assert [further(of(tmp_path)["lamb"], key) for key in keys] == ["", ""]
    # An older record has no examples, and its batch was constant.
    add(Results(table), job_of(table), 0.92)
    assert [further(of(tmp_path)["lamb"], key) for key in keys] == ["4", "128"]
    add(Results(table), job_of(table, seed=1), 0.92, updates=3000, examples=6_000_000)
    assert [further(of(tmp_path)["lamb"], key) for key in keys] == ["1,502", "1,064"]


def test_baseline(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace('optimizer=lamb"', 'optimizer=lamb", baseline = "adamw"')
    table = write(tmp_path, text)

    add(Results(table), job_of(table), 0.72)
    assert further(of(tmp_path, text)["lamb"], "to_baseline") == ""
    add(Results(table), job_of(table, "adamw"), 0.90, sent_bytes=1_000_000)
    found = of(tmp_path, text)
    assert further(found["lamb"], "to_baseline") == "-20.00"
    sent = [further(found[cell], "sent_bytes") for cell in ("lamb", "adamw")]
    assert sent == ["", "1,000,000"]


def test_matrix(tmp_path: pathlib.Path) -> None:
    assert matrix(list(of(tmp_path).values()), write(tmp_path).scales["small"].metric) == []
    text = TABLE
    for name, column in (("lamb", "32"), ("adamw", "64"), ("lars", "32")):
        row = "others" if name == "lars" else "ours"
        text = text.replace(
            f'name = "{name}"', f'name = "{name}", row = "{row}", column = "{column}"'
        )
    table = write(tmp_path, text)
    add(Results(table), job_of(table), 0.92)
    found = summaries(table, table.scales["small"], Results(table))
    assert matrix(found, table.scales["small"].metric) == [
        ["", "32", "64"],
        ["ours", "92.0 (93.0)", "- (92.5)"],
        ["others", "- (diverged)", ""],
    ]


def test_stale(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.92)
    lamb = of(tmp_path, TABLE.replace("4 steps", "5 steps"))["lamb"]
    assert lamb.status == "stale" and lamb.values == []
    assert lamb.stale == (1, ["duration: '4 steps' there, '5 steps' now"])
    metric = table.scales["small"].metric
    told = "1 stale, 92.0: duration: '4 steps' there, '5 steps' now"
    assert summary.stale(lamb, metric) == told
    many = lamb._replace(stale=(1, ["a", "b", "c", "d", "e"]), stale_values=[None])
    assert summary.stale(many, metric) == "1 stale, diverged: a; b; c; d; 1 more keys"
    assert summary.stale(of(tmp_path)["lamb"], metric) == ""
    in_matrix = [one._replace(cell=one.cell._replace(row="r", column="c")) for one in (lamb,)]
    assert matrix(in_matrix, metric) == [["", "c"], ["r", "92.0 stale (93.0)"]]


def test_stale_before_a_search(tmp_path: pathlib.Path) -> None:
    text = (
        TABLE
        + """
[tuning]
key = "optimizer.learning_rate"
factors = [1, 2]
"""
    )
    table = write(tmp_path, text)
    job = job_of(table)._replace(chosen=2.0)
    flat = jobs.flat_configs([stage.config() for stage in jobs.stages(job)])
    Results(table).add(record("lamb", 0, 0.92, config=jobs.config_hash(flat), chosen=2.0), flat)
    lamb = of(tmp_path, text)["lamb"]  # it has the rate that its own search chose
    assert lamb.status == "search: 0 of 2 runs" and lamb.values == [pytest.approx(92.0)]
    lamb = of(tmp_path, text.replace("4 steps", "5 steps"))["lamb"]
    assert (lamb.status, lamb.stale[0], lamb.values) == ("stale", 1, [])


def test_examples() -> None:
    assert doctest.testmod(summary).failed == 0
    assert summary.half_width([1.0]) is None

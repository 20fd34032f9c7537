"""Summaries of cells: means, intervals, and differences from the published values."""

import doctest
import pathlib

import pytest
from scipy import stats

from lamb_tpu.reproduce import summary
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import (
    Summary,
    average_batch,
    column_value,
    matrix,
    measured,
    summaries,
)
from tests.reproduce.papers import TABLE, TUNED, record, with_keys, write
from tests.reproduce.test_results import add, job_of


def of(tmp_path: pathlib.Path, text: str = TABLE) -> dict[str, Summary]:
    table = write(tmp_path, text)
    actual = summaries(table, table.scales["small"], Results(table))
    return {one.cell.name: one for one in actual}


def test_summaries(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    metric = table.scales["small"].metric
    actual = of(tmp_path)
    expected = ["not run", "not run", "settings not published"]
    assert [one.status for one in actual.values()] == expected
    assert (actual["lamb"].published, actual["lars"].published) == ("93.0", "diverged")
    results = Results(table)
    add(results, job_of(table), 0.92)
    assert of(tmp_path)["lamb"].status == "1 of 2 seeds"
    assert measured(of(tmp_path)["lamb"], metric) == "92.0"
    for seed, accuracy in ((1, 0.94), (2, 0.96)):
        add(results, job_of(table, seed=seed), accuracy)
    lamb = of(tmp_path)["lamb"]
    assert lamb.status == "measured" and len(lamb.values) == 3  # the table requests two seeds
    assert lamb.mean == pytest.approx(94.0)
    assert lamb.half_width == pytest.approx(4.303 * 2.0 / 3**0.5, rel=1e-3)
    assert measured(lamb, metric) == "94.0 ± 5.0"
    for seed in (0, 1, 2):
        add(results, job_of(table, seed=seed), 0.0)  # a mean of 0 has an interval too
    assert of(tmp_path)["lamb"].half_width == 0.0
    add(results, job_of(table, "adamw"), None)
    adamw = of(tmp_path)["adamw"]
    assert measured(adamw, metric) == "1 of 1 diverged" and adamw.distance is None


def test_only_the_papers_scale_has_a_distance(tmp_path: pathlib.Path) -> None:
    table = write(
        tmp_path, TABLE + TABLE[TABLE.index("[scales.small]") :].replace("small", "paper")
    )
    for name, distance in (("small", None), ("paper", pytest.approx(-1.0))):
        scale = table.scales[name]
        add(Results(table), job_of(table)._replace(scale=scale), 0.92)
        lamb = summaries(table, scale, Results(table))[0]
        assert (lamb.mean, lamb.distance) == (pytest.approx(92.0), distance)
        output = "" if distance is None else "-1.0 (one seed)"
        assert summary.difference(lamb, scale.metric) == output
        more = lamb._replace(half_width=0.25)
        assert summary.difference(more, scale.metric) == output.replace("(one seed)", "± 0.2")


def test_column_values(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    keys = ("updates", "average_batch")
    assert [column_value(of(tmp_path)["lamb"], key) for key in keys] == ["", ""]
    # Older records have no example counts; their batch was constant.
    add(Results(table), job_of(table), 0.92)
    assert [column_value(of(tmp_path)["lamb"], key) for key in keys] == ["4", "128"]
    add(Results(table), job_of(table, seed=1), 0.92, updates=3000, examples=6_000_000)
    assert [column_value(of(tmp_path)["lamb"], key) for key in keys] == ["1,502", "1,064"]


def test_baseline(tmp_path: pathlib.Path) -> None:
    text = with_keys(lamb='baseline = "adamw"')
    table = write(tmp_path, text)
    add(Results(table), job_of(table), 0.72)
    assert column_value(of(tmp_path, text)["lamb"], "to_baseline") == ""
    add(Results(table), job_of(table, "adamw"), 0.90, sent_bytes=1_000_000)
    actual = of(tmp_path, text)
    assert column_value(actual["lamb"], "to_baseline") == "-20.00 (one seed)"
    sent = [column_value(actual[cell], "sent_bytes") for cell in ("lamb", "adamw")]
    assert sent == ["", "1,000,000"]
    # With two seeds each (72, 76 and 90, 92), the difference has Welch's interval.
    add(Results(table), job_of(table, seed=1), 0.76)
    assert column_value(of(tmp_path, text)["lamb"], "to_baseline") == "-17.78 (one seed)"
    add(Results(table), job_of(table, "adamw", seed=1), 0.92)
    squares = 8 / 2, 2 / 2
    freedom = sum(squares) ** 2 / sum(square**2 for square in squares)
    width = 100 / 91 * stats.t.ppf(0.975, freedom) * sum(squares) ** 0.5
    assert column_value(of(tmp_path, text)["lamb"], "to_baseline") == f"-18.68 ± {width:.2f}"
    # If a run diverged, the mean is not compared with the baseline.
    add(Results(table), job_of(table, seed=1), None)
    assert column_value(of(tmp_path, text)["lamb"], "to_baseline") == ""
    add(Results(table), job_of(table, seed=1), 0.76)
    add(Results(table), job_of(table, "adamw", seed=1), None)
    assert column_value(of(tmp_path, text)["lamb"], "to_baseline") == ""


def test_a_mean_has_no_run_that_diverged(tmp_path: pathlib.Path) -> None:
    text = TABLE.replace("factor = 100.0", "factor = 100.0, chance = 0.1")
    table = write(tmp_path, text)
    for seed, accuracy in enumerate((0.98, 0.1135, 0.984, None, 0.988)):
        add(Results(table), job_of(table, seed=seed), accuracy, updates=4 if accuracy else 1)
    actual = summaries(table, table.scales["small"], Results(table))
    lamb, metric = actual[0], table.scales["small"].metric
    assert measured(lamb, metric) == "3 of 5 at 98.4; 2 diverged"
    assert (lamb.mean, lamb.half_width, lamb.distance) == (None, None, None)
    assert [value is None for value in lamb.values] == [False, True, False, True, False]
    assert column_value(lamb, "updates") == "4"
    assert summary.criterion(actual, metric).endswith(
        "accuracy is 19 % or less; a random guess has 10 %."
    )
    assert summary.criterion(actual[1:], metric) == ""
    # Now the runs have an older config than the table.
    old = of(tmp_path, text.replace("4 steps", "5 steps"))["lamb"]
    assert summary.stale_mean(old, metric) == "3 of 5 at 98.4; 2 diverged, stale"
    assert "98.0, 11.3 (diverged), 98.4, diverged, 98.8" in summary.stale(old, metric)


def test_matrix(tmp_path: pathlib.Path) -> None:
    assert matrix(list(of(tmp_path).values()), write(tmp_path).scales["small"].metric) == []
    text = with_keys(
        lamb='row = "ours", column = "32"',
        adamw='row = "ours", column = "64"',
        lars='row = "others", column = "32"',
    )
    table = write(tmp_path, text)
    add(Results(table), job_of(table), 0.92)
    actual = summaries(table, table.scales["small"], Results(table))
    assert matrix(actual, table.scales["small"].metric) == [
        ["", "32", "64"],
        ["ours", "92.0 (93.0)", "- (92.5)"],
        ["others", "- (diverged)", ""],
    ]


def test_stale(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.92)
    lamb = of(tmp_path, TABLE.replace("4 steps", "5 steps"))["lamb"]
    assert lamb.status == "stale" and lamb.values == []
    assert lamb.changes == ["duration: '4 steps' there, '5 steps' now"]
    metric = table.scales["small"].metric
    output = "1 stale, 92.0: duration: '4 steps' there, '5 steps' now"
    assert summary.stale(lamb, metric) == output
    many = lamb._replace(changes=["a", "b", "c", "d", "e"], stale=[record("lamb", 0, None)])
    assert summary.stale(many, metric) == "1 stale, diverged: a; b; c; d; 1 more keys"
    assert summary.stale(of(tmp_path)["lamb"], metric) == ""
    in_matrix = lamb._replace(cell=lamb.cell._replace(row="r", column="c"))
    assert matrix([in_matrix], metric) == [["", "c"], ["r", "92.0 stale (93.0)"]]


def test_stale_before_a_search(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TUNED)
    add(Results(table), job_of(table)._replace(chosen=2.0), 0.92, chosen=2.0)
    lamb = of(tmp_path, TUNED)["lamb"]  # the factor comes from the record
    assert lamb.status == "search: 0 of 6 runs" and lamb.values == [pytest.approx(92.0)]
    lamb = of(tmp_path, TUNED.replace("4 steps", "5 steps"))["lamb"]
    assert (lamb.status, len(lamb.stale), lamb.values) == ("stale", 1, [])


def test_examples() -> None:
    assert doctest.testmod(summary).failed == 0
    assert summary.half_width([1.0]) is None


def test_a_run_that_diverged_at_its_start_has_its_configured_batch() -> None:
    assert average_batch({"updates": 0, "batch": 128, "examples": 0}) == 128
    assert average_batch({"updates": 4, "batch": 128, "examples": 640}) == 160

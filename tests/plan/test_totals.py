"""A whole run's times, and its input against measured rates."""

import doctest
import re

import pytest

from lamb_tpu.plan import making
from lamb_tpu.plan import totals as totals_lib
from lamb_tpu.plan.totals import Input, Work, describe_input, times_due, totals, work_of
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import resolve
from tests import tiny

IMAGES = Input("images", 0, 1_000, "a page", False)
WORK = Work(600, 128, 3, 1_000, IMAGES)


def test_a_runs_times() -> None:
    found = totals(WORK, (0.1, 0.1, 0.2), (0.01, 0.02, 0.05), 64)
    assert found.compute == pytest.approx((60, 60, 120))
    assert found.network == pytest.approx((6, 12, 30))
    # A third of the computation an example: 3 x 1,000 of them against 600 x 128.
    assert found.evaluation == pytest.approx(60 * 3000 / (600 * 128) / 3)
    assert found.seconds == pytest.approx([each + found.evaluation for each in (66, 72, 150)])
    assert found.chip_hours == pytest.approx((72 + found.evaluation) * 64 / 3600)
    unknown = totals(WORK._replace(eval_examples=None), (0.1,) * 3, (0.01, 0.02, 0.05), 64)
    assert unknown.evaluation is None and unknown.seconds[0] == pytest.approx(66)


@pytest.mark.parametrize("every", ["7 steps", "1 epochs", "3 percent", "40 steps", "0.3 steps"])
def test_evaluations_are_those_of_the_recipe(every: str) -> None:
    recipe = resolve(tiny.digits(duration="40 steps", eval__every=every), 300)
    due = sum(recipe.is_due(recipe.eval_every, step) for step in range(1, 41))
    assert times_due(recipe.eval_every, 40) == due


def test_what_a_run_does() -> None:
    config = tiny.digits(ema__decay=0.9, eval__batch_size=64)
    run = prepare(config, None, load=making.loader(config, None))
    # 360 scans in 6 batches of 64, by the weights and by their averages.
    assert work_of(run) == Work(
        12, 64, 2, 2 * 384, Input("images", 0, None, "experiments/bench/image_throughput.md", True)
    )


def test_an_evaluation_of_streams_is_of_all_their_windows() -> None:
    config = tiny.recipe_file(tiny.ROOT / "configs" / "ptb.py").get_config("batch=40")
    found = work_of(prepare(config, None, load=making.loader(config, None)))
    windows = (929_589 // 40 - 1) // 20
    # 40 rows over 8 devices in training; one stream of 3,688 windows on each in an evaluation.
    assert found[:4] == (13 * windows, 40, 13, 8 * 3688)
    assert (found.input.unit, found.input.tokens) == ("sequences", 20)


@pytest.mark.parametrize(
    "changes, version, line",
    [
        ({}, "v5e", "input: 6,400 images a second and host, 6.4 cores at 1,000 a core (a page)"),
        (
            {},
            "v6e",
            "input: 6,400 images a second and host, 6.4 cores at 1,000 a core (a page); a host "
            "has 180 vCPUs",
        ),
        (
            {"unit": "sequences", "tokens": 512, "per_core": None},
            "v3",
            "input: 6,400 sequences (3,276,800 tokens) a second and host; how many a core reads was not "
            "measured",
        ),
        ({"is_in_memory": True}, "v3", "input: 6,400 images a second and host, from memory"),
    ],
)
def test_input(changes: dict, version: str, line: str) -> None:
    work = WORK._replace(input=IMAGES._replace(**changes))
    assert describe_input(work, 0.01, 2, version) == line


def test_rates_are_those_of_the_benchmarks() -> None:
    bench = tiny.ROOT / "experiments" / "bench"
    page = (bench / "image_throughput.md").read_text()
    found = re.findall(r"\| (\d+) \| [\d,]+ \| ([\d,]+) \| [\d.]+ \|", page)
    rates = {int(side): int(rate.replace(",", "")) for side, rate in found}
    assert rates == totals_lib.IMAGES_PER_CORE
    page = (bench / "text_throughput.md").read_text()
    found = re.findall(r"\| (\d+), \d+ \| by record \| ([\d,]+) \|", page)
    rates = {int(length): int(rate.replace(",", "")) for length, rate in found}
    assert rates == totals_lib.PAIRS_PER_CORE


def test_docstrings() -> None:
    assert doctest.testmod(totals_lib) == (0, 2)

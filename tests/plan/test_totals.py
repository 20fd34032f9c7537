"""Totals of a run, and the CPU cores that its input needs at measured rates."""

import re

import pytest

from lamb_tpu.plan import making
from lamb_tpu.plan import totals as totals_lib
from lamb_tpu.plan.totals import Input, Stretch, Work, describe_input, evaluations, totals, work_of
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import resolve
from tests import tiny
from tests.plan.planned import config_of

IMAGES = Input("images", 0, 1_000, "a page", False)
WORK = Work(600, 128, 3, 1_000, IMAGES)


def test_times_of_a_run() -> None:
    actual = totals(WORK, (0.1, 0.1, 0.2), (0.01, 0.02, 0.05), 64)
    assert actual.compute == pytest.approx((60, 60, 120))
    assert actual.network == pytest.approx((6, 12, 30))
    # An evaluated example takes a third of the computation of a training example. There are 3
    # evaluations of 1,000 examples, and 600 updates of 128 examples.
    assert actual.evaluation == pytest.approx(60 * 3000 / (600 * 128) / 3)
    assert actual.seconds == pytest.approx([each + actual.evaluation for each in (66, 72, 150)])
    assert actual.chip_hours == pytest.approx((72 + actual.evaluation) * 64 / 3600)
    unknown = totals(WORK._replace(eval_examples=None), (0.1,) * 3, (0.01, 0.02, 0.05), 64)
    assert unknown.evaluation is None and unknown.seconds[0] == pytest.approx(66)


@pytest.mark.parametrize("every", ["7 steps", "1 epochs", "3 percent", "40 steps", "0.3 steps"])
def test_number_of_evaluations(every: str) -> None:
    recipe = resolve(tiny.digits(duration="40 steps", eval__every=every), 300)
    due = sum(recipe.is_due(recipe.eval_every, step) for step in range(1, 41))
    assert evaluations([Stretch(40, 40)], recipe.eval_every) == due


def test_work() -> None:
    config = tiny.digits(ema__decay=0.9, eval__batch_size=64)
    run = prepare(config, None, load=making.loader(config, None))
    # 360 images in 6 batches of 64, evaluated with the weights and with their averages.
    assert work_of(run) == Work(
        12, 64, 2, 2 * 384, Input("images", 0, None, "experiments/bench/image_throughput.md", True)
    )


def test_evaluation_of_streams() -> None:
    config = config_of("ptb.py:batch=40")
    actual = work_of(prepare(config, None, load=making.loader(config, None)))
    windows = (929_589 // 40 - 1) // 20
    # Training has 40 rows over 8 devices; an evaluation has one stream of 3,688 windows per device.
    assert actual[:4] == (13 * windows, 40, 13, 8 * 3688)
    assert (actual.input.unit, actual.input.tokens) == ("sequences", 20)


@pytest.mark.parametrize(
    "changes, version, line",
    [
        (
            {},
            "v5e",
            "input: 6,400 images per second and host, 6.4 CPU cores at 1,000 per core (a page)",
        ),
        (
            {},
            "v6e",
            "input: 6,400 images per second and host, 6.4 CPU cores at 1,000 per core (a page); a host "
            "has 180 vCPUs",
        ),
        (
            {"unit": "sequences", "tokens": 512, "per_core": None},
            "v3",
            "input: 6,400 sequences (3,276,800 tokens) per second and host; the rate of a CPU core was "
            "not measured",
        ),
        ({"is_in_memory": True}, "v3", "input: 6,400 images per second and host, from memory"),
    ],
)
def test_input(changes: dict, version: str, line: str) -> None:
    work = WORK._replace(input=IMAGES._replace(**changes))
    assert describe_input(work, 0.01, 2, version) == line


def test_rates_match_the_benchmarks() -> None:
    bench = tiny.ROOT / "experiments" / "bench"
    page = (bench / "image_throughput.md").read_text()
    actual = re.findall(r"\| (\d+) \| [\d,]+ \| ([\d,]+) \| [\d.]+ \|", page)
    rates = {int(side): int(rate.replace(",", "")) for side, rate in actual}
    assert rates == totals_lib.IMAGES_PER_CORE
    page = (bench / "text_throughput.md").read_text()
    actual = re.findall(r"\| (\d+), \d+ \| files \| ([\d,]+) \|", page)
    rates = {int(length): int(rate.replace(",", "")) for length, rate in actual}
    assert rates == totals_lib.PAIRS_PER_CORE

"""Search for the largest batch that fits: the planned batches and the report."""

import pathlib
from typing import Any

import jax
import pytest

from lamb_tpu.plan.largest import MOST, Batches, search
from lamb_tpu.plan.trials import Answer, Trials
from lamb_tpu.plan.variants import Variants
from lamb_tpu.spec import parse
from tests import tiny
from tests.plan import planned
from tests.raising import rejected

CONFIG = planned.CONFIGS / "digits.py"


def variants(batch: int, **changes: object) -> Variants:
    return planned.variants(f"digits.py:batch={batch}", **changes)


def actual(of: Variants) -> Answer:
    batches = Batches(of, jax.devices())
    with Trials(MOST) as trials:
        return search(batches, of.config.batch_size, "v3-8", trials)


def test_doubling_and_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned.instead(
        monkeypatch, lambda config, _: (15.48 * config.batch_size / 1000, config.batch_size)
    )
    answer = actual(variants(128))
    assert [config.batch_size for config in made] == [128, 256, 512, 1024, 768, 896, 960]
    # The recipe sets the learning rate of each batch.
    assert made[0].optimizer == made[-1].optimizer
    assert answer.json["batch_size"] == 960
    lines = answer.text.splitlines()
    assert tiny.unbroken(lines[0]) == "batch fits memory ms a step examples a second"
    assert lines[1] == "    128  yes   12.8 %  128 (122 to 141)                1,000"
    assert lines[-3] == "  1,024  no     102 %"
    assert tiny.unbroken("\n".join(lines[-2:])) == (
        "the largest batch that fits on v3-8: 960 (96 % of memory, 960 (912 to 1,056) ms a step); "
        "1,024 does not fit"
    )
    batches = [trial["batch_size"] for trial in answer.json["trials"]]
    assert batches == [128, 256, 512, 768, 896, 960, 1024]


@pytest.mark.parametrize(
    "gib, batches, largest, text",
    [
        pytest.param(
            lambda batch: batch / 10,
            [1024, 512, 256, 128, 192, 160, 144],
            *(144, "160 does not fit"),
            marks=pytest.mark.long,
        ),
        (lambda _: 100, [64, 32, 16, 8], None, "not even 8, the smallest that was tried"),
        pytest.param(
            lambda _: 1,
            [8 * 2**power for power in range(17)],
            *(8 * 2**16, "no larger batch was tried"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_searches(
    monkeypatch: pytest.MonkeyPatch, gib: Any, batches: list[int], largest: int | None, text: str
) -> None:
    made = planned.instead(monkeypatch, lambda config, _: (gib(config.batch_size), 1))
    answer = actual(variants(batches[0]))
    assert [config.batch_size for config in made] == batches and len(made) <= MOST
    assert answer.json["batch_size"] == largest and answer.text.endswith(text)


def test_a_run_without_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """If larger batches are rejected, the search ends as if they did not fit."""
    planned.instead(
        monkeypatch, lambda config, _: (1, 1) if config.batch_size < 200 else "has no update"
    )
    answer = actual(variants(128))
    assert answer.json["batch_size"] == 192
    assert "\n    256  rejected: the step has no update\n" in answer.text
    assert answer.text.endswith("208 is rejected")


def test_a_rejected_config(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: "fails")
    with rejected("the step", problem="fails"):
        actual(variants(128))


@pytest.mark.long
def test_allowed_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is rounded to a size that the devices, microbatches and BatchNorm groups allow."""
    planned.instead(monkeypatch, lambda *_: (1, 1))
    answer = actual(variants(20, accumulation_steps=2))
    assert [trial["batch_size"] for trial in answer.json["trials"]][:3] == [16, 32, 64]
    assert "the config's batch, 20, is rejected on v3-8; the search began at 16" in answer.text
    # On 8 devices a group of 24 examples spans 1, 2, 3, 4 ... devices with 24, 12, 8, 6 ... examples each.
    grouped = variants(192, model__batch_norm=True, model__group_size=24)
    batches = Batches(grouped, jax.devices())
    allowed = [batch for batch in range(24, 400, 24) if not batches.rejection(batch)]
    assert allowed == [24, 48, 96, 192, 384]
    assert batches.nearest(100, 96, 400) == 192 and batches.nearest(100, 96, 192) is None


def test_pairs_stay_whole() -> None:
    batches = Batches(variants(64, task__mixup_alpha=0.2), jax.devices())
    assert batches.nearest(41, 0, 1e9) == 48 and batches.nearest(17, 0, 1e9) == 16


def test_no_allowed_batch() -> None:
    of = variants(128, model__batch_norm=True, model__group_size=0)
    with rejected("config.model.group_size", 0, "is out of range", "use None or"):
        search(Batches(of, jax.devices()), 128, "v3-8", Trials(MOST))


def test_a_recipe_with_some_batches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """If a recipe accepts only some batches, only these are planned."""
    file = tmp_path / "rows.py"
    file.write_text(
        "from lamb_tpu.config import check_argument, parse_argument\n"
        f"from runpy import run_path\nDIGITS = run_path({str(CONFIG)!r})['get_config']\n"
        "def get_config(argument=None):\n"
        "    arg = parse_argument(argument, batch=64)\n"
        "    check_argument('batch', arg.batch, (64, 128, 256))\n"
        "    return DIGITS(f'batch={arg.batch}')\n"
    )
    made = planned.instead(monkeypatch, lambda *_: (1, 1))
    config = parse(tiny.recipe_file(file).get_config())
    answer = actual(Variants(str(file), config))
    assert [each.batch_size for each in made] == [64, 128, 256]
    assert (
        "512 is rejected: the config's argument batch is 512, which is unknown; use 64,"
        in answer.text
    )
    assert answer.json["batch_size"] == 256

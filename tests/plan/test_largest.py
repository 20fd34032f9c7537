"""The search for the largest batch that fits: which batches it plans, and what it says."""

import pathlib

import jax
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.largest import MOST, Batches, search
from lamb_tpu.plan.trials import Answer, Trials
from lamb_tpu.plan.variants import Variants
from tests import tiny
from tests.plan import planned

CONFIG = tiny.ROOT / "configs" / "digits.py"


def variants(batch: int, **changes: object) -> Variants:
    config = tiny.recipe_file(CONFIG).get_config(f"batch={batch}")
    return Variants(
        f"{CONFIG}:batch={batch}",
        tiny.change(config, {key.replace("__", "."): value for key, value in changes.items()}),
    )


def found(of: Variants) -> Answer:
    batches = Batches(of, jax.devices())
    with Trials(MOST) as trials:
        return search(batches, of.config.batch_size, "v3-8", trials)


def test_doubling_and_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned.instead(
        monkeypatch, lambda config, _: (15.48 * config.batch_size / 1000, config.batch_size)
    )
    answer = found(variants(128))
    assert [config.batch_size for config in made] == [128, 256, 512, 1024, 768, 896, 960]
    # The learning rate of each is that of the recipe's own rule.
    assert made[0].optimizer == made[-1].optimizer
    assert answer.json["batch_size"] == 960
    lines = answer.text.splitlines()
    assert lines[0].split() == [
        "batch",
        "fits",
        "memory",
        "ms",
        "a",
        "step",
        "examples",
        "a",
        "second",
    ]
    assert lines[1] == "    128  yes   12.8 %  128 (122 to 141)                1,000"
    assert lines[-3] == "  1,024  no     102 %"
    assert tiny.unbroken("\n".join(lines[-2:])) == (
        "the largest batch that fits on v3-8: 960 (96 % of memory, 960 (912 to 1,056) ms a step); "
        "1,024 does not fit"
    )
    assert [trial["batch_size"] for trial in answer.json["trials"]] == [
        128,
        256,
        512,
        768,
        896,
        960,
        1024,
    ]


@pytest.mark.long
def test_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned.instead(monkeypatch, lambda config, _: (config.batch_size / 10, 1))
    answer = found(variants(1024))
    assert [config.batch_size for config in made] == [1024, 512, 256, 128, 192, 160, 144]
    assert answer.json["batch_size"] == 152 - 8 and "160 does not fit" in answer.text


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned.instead(monkeypatch, lambda *_: (100, 1))
    answer = found(variants(64))
    assert [config.batch_size for config in made] == [64, 32, 16, 8]
    assert answer.json["batch_size"] is None
    assert answer.text.splitlines()[-1] == (
        "no batch fits on v3-8, not even 8, the smallest that was tried"
    )


@pytest.mark.long
def test_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned.instead(monkeypatch, lambda *_: (1, 1))
    answer = found(variants(8))
    assert len(made) == 17 <= MOST and made[-1].batch_size == 8 * 2**16
    assert answer.text.endswith("no larger one was tried")


def test_a_run_without_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where larger batches are refused, the search ends as if they did not fit."""
    planned.instead(
        monkeypatch, lambda config, _: (1, 1) if config.batch_size < 200 else "not one update"
    )
    answer = found(variants(128))
    assert answer.json["batch_size"] == 192
    assert "\n    256  refused: not one update\n" in answer.text
    assert answer.text.endswith("208 is refused")


def test_the_config_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: "no --examples")
    with pytest.raises(UserError, match="^no --examples$"):
        found(variants(128))


@pytest.mark.long
def test_what_devices_microbatches_and_groups_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is rounded to what divides, and groups of BatchNorm stay whole."""
    planned.instead(monkeypatch, lambda *_: (1, 1))
    answer = found(variants(20, accumulation_steps=2))
    assert [trial["batch_size"] for trial in answer.json["trials"]][:3] == [16, 32, 64]
    assert "the config's own batch, 20, is refused on v3-8; the search began at 16" in answer.text
    # On 8 devices a group of 24 holds 1, 2, 3 or more parts of 24, 12, 8, 6 ... examples.
    grouped = variants(192, model__batch_norm=True, model__group_size=24)
    batches = Batches(grouped, jax.devices())
    allowed = [batch for batch in range(24, 400, 24) if not batches.refusal(batch)]
    assert allowed == [24, 48, 96, 192, 384]
    assert batches.nearest(100, 96, 400) == 192 and batches.nearest(100, 96, 192) is None


def test_pairs_stay_whole() -> None:
    batches = Batches(variants(64, task__mixup_alpha=0.2), jax.devices())
    assert batches.nearest(41, 0, 1e9) == 48 and batches.nearest(17, 0, 1e9) == 16


def test_no_batch_at_all() -> None:
    of = variants(128, model__batch_norm=True, model__group_size=0)
    with pytest.raises(UserError, match="group_size must be None or a whole number"):
        search(Batches(of, jax.devices()), 128, "v3-8", Trials(MOST))


def test_the_recipes_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A recipe that knows some batches only is asked for no other."""
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
    config = tiny.recipe_file(file).get_config()
    answer = found(Variants(str(file), config))
    assert [each.batch_size for each in made] == [64, 128, 256]
    assert "512 is refused: the config's argument batch=512 is unknown; known: 64," in answer.text
    assert answer.json["batch_size"] == 256

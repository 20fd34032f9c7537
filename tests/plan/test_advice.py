"""The table of batches: the recipe's own rates, times, prices, and the noise scale of a run."""

import json
import pathlib
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.advice import advise, noise_scale
from lamb_tpu.plan.trials import Answer, Trials
from lamb_tpu.plan.variants import Variants
from tests import tiny
from tests.plan import planned

CONFIGS = tiny.ROOT / "configs"


def found(recipe: str, batches: tuple[int, ...], **options: Any) -> Answer:
    path, _, argument = recipe.partition(":")
    config = tiny.recipe_file(CONFIGS / path).get_config(argument)
    with Trials(len(batches)) as trials:
        return advise(Variants(f"{CONFIGS}/{recipe}", config), batches, "v3-8", trials, **options)


def test_a_row_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(
        monkeypatch,
        lambda config, _: (
            "too large" if config.batch_size > 4096 else (config.batch_size / 100, 3.6e6)
        ),
        examples_there=1437,
    )
    answer = found("digits.py", (32, 512, 2048, 8192), price=2.5)
    lines = answer.text.splitlines()
    assert lines[0] == "v3-8: 8 devices"
    assert lines[1].split() == [
        "batch",
        "rate",
        "warm-up",
        "updates",
        "ms",
        "a",
        "step",
        "total",
        "device-h",
        "price",
    ]
    # LEGW: the square root of the batch, and as many updates of warm-up.
    assert lines[2].split()[:4] == ["32", "0.01", "4.491", "1,348"]
    assert lines[3].split()[:4] == ["512", "0.04", "4.491", "85"]
    # 100 updates of an hour on 8 devices, for 2.5 an hour.
    assert lines[3].split()[-4:] == ["100", "h", "800", "2,000.00"]
    assert lines[4].split()[-3:] == ["does", "not", "fit"]
    assert lines[5] == "  8,192  refused: too large"
    first = answer.json["batches"][0]
    assert first["device_hours"] == pytest.approx(800) and first["price"] == pytest.approx(2000)
    assert first["seconds"] == pytest.approx([3.42e5, 3.6e5, 3.96e5])
    assert answer.json["batches"][3]["refused"] == "too large"
    json.dumps(answer.json)


def test_a_warm_up_that_is_longer_than_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1), examples_there=1437)
    text = tiny.unbroken(found("digits.py", (512, 16_384, 65_536)).text)
    assert "THE WARM-UP IS AS LONG AS THE RUN at 16,384, 65,536: the rate never reaches" in text
    assert "WARM-UP" not in found("digits.py", (512,)).text


def test_a_recipe_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1))
    answer = found("imagenet_resnet.py:optimizer=lars", (8192, 32_768))
    assert [value["learning_rate"] for value in answer.json["batches"]] == [10.0, 32.0]
    refused = found("imagenet_resnet.py:optimizer=lars,recipe=mlperf", (32_768, 8192))
    assert "8,192 refused: the config's argument batch=8192 is unknown" in tiny.unbroken(
        refused.text
    )


def records(folder: pathlib.Path, *values: dict[str, Any]) -> str:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(folder)


def test_the_noise_scale_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1))
    run = records(
        tmp_path,
        {"step": 1, "kind": "train", "noise_scale": 9.0},
        {"step": 2, "kind": "train", "noise_scale": 600.0},
        {"step": 2, "kind": "eval"},
    )
    assert noise_scale(run) == 600
    answer = found("digits.py", (512, 1024), workdir=run)
    assert [line.split()[-1] for line in answer.text.splitlines()[2:4]] == ["within", "BEYOND"]
    assert f"the run in {run} measured a noise scale of 600 examples: BEYOND IT 1,024" in (
        tiny.unbroken(answer.text)
    )
    assert [value["is_beyond_noise_scale"] for value in answer.json["batches"]] == [False, True]


def test_a_run_that_measured_none(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1))
    run = records(tmp_path, {"step": 1, "kind": "train", "loss": 1.0})
    answer = found("digits.py", (512,), workdir=run)
    assert f"the run in {run} measured no noise scale" in tiny.unbroken(answer.text)
    assert "within" not in answer.text and answer.json["noise_scale"] is None
    with pytest.raises(UserError, match="^the config's argument batch=512 is unknown"):
        found("imagenet_resnet.py:optimizer=lars,recipe=mlperf", (512, 1024))
    with pytest.raises(UserError, match="is its folder the workdir of a run"):
        found("digits.py", (512,), workdir=str(tmp_path / "none"))

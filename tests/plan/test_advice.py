"""Comparison of batch sizes: the recipe's learning rates, times, prices, and a run's noise scale."""

import json
import pathlib
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.advice import advise, noise_scale
from lamb_tpu.plan.trials import Answer, Trials
from tests import tiny
from tests.plan import planned


def actual(recipe: str, batches: tuple[int, ...], **options: Any) -> Answer:
    with Trials(len(batches)) as trials:
        return advise(planned.variants(recipe), batches, "v3-8", trials, **options)


def test_a_row_for_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(
        monkeypatch,
        lambda config, _: (
            "is too large" if config.batch_size > 4096 else (config.batch_size / 100, 3.6e6)
        ),
        examples_there=1437,
    )
    answer = actual("digits.py", (32, 512, 2048, 8192), price=2.5)
    lines = answer.text.splitlines()
    assert lines[0] == "v3-8: 8 devices"
    head = "batch rate warm-up updates ms a step total device-h price"
    assert tiny.unbroken(lines[1]) == head
    # LEGW: the rate grows with the square root of the batch; the warm-up always has 4.491 updates.
    assert lines[2].split()[:4] == ["32", "0.01", "4.491", "1,348"]
    assert lines[3].split()[:4] == ["512", "0.04", "4.491", "85"]
    # 100 updates of one hour on 8 devices, at 2.5 per device hour.
    assert lines[3].split()[-4:] == ["100", "h", "800", "2,000.00"]
    assert lines[4].split()[-3:] == ["does", "not", "fit"]
    assert lines[5] == "  8,192  rejected: the step is too large"
    first = answer.json["batches"][0]
    assert first["device_hours"] == pytest.approx(800) and first["price"] == pytest.approx(2000)
    assert first["seconds"] == pytest.approx([3.42e5, 3.6e5, 3.96e5])
    assert answer.json["batches"][3]["rejected"] == "the step is too large"
    json.dumps(answer.json)


def test_a_warm_up_that_is_longer_than_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1), examples_there=1437)
    text = tiny.unbroken(actual("digits.py", (512, 16_384, 65_536)).text)
    assert (
        "THE WARM-UP IS AT LEAST AS LONG AS THE RUN at batch 16,384, 65,536: the learning" in text
    )
    assert "WARM-UP" not in actual("digits.py", (512,)).text


def test_a_recipe_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1))
    answer = actual("imagenet_resnet.py:optimizer=lars", (8192, 32_768))
    assert [value["learning_rate"] for value in answer.json["batches"]] == [10.0, 32.0]
    rejected = actual("imagenet_resnet.py:optimizer=lars,recipe=mlperf", (32_768, 8192))
    assert "8,192 rejected: the config's argument batch is 8192, which is unknown" in tiny.unbroken(
        rejected.text
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
    answer = actual("digits.py", (512, 1024), workdir=run)
    assert [line.split()[-1] for line in answer.text.splitlines()[2:4]] == ["within", "BEYOND"]
    assert f"the run in {run} measured a noise scale of 600 examples; BEYOND IT: 1,024" in (
        tiny.unbroken(answer.text)
    )
    assert [value["is_beyond_noise_scale"] for value in answer.json["batches"]] == [False, True]


@pytest.mark.parametrize("value", ["600", None, [600], float("nan"), float("inf"), 10**400, True])
def test_invalid_noise_scales(value: Any, tmp_path: pathlib.Path) -> None:
    run = records(tmp_path, {"step": 1, "kind": "train", "noise_scale": value})
    with pytest.raises(UserError, match="noise_scale"):
        noise_scale(run)


def test_unsupported_bucket() -> None:
    with pytest.raises(UserError, match="^--workdir s3://b/run has an unsupported URL scheme"):
        noise_scale("s3://b/run")


def test_run_without_noise_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    planned.instead(monkeypatch, lambda *_: (1, 1))
    run = records(tmp_path, {"step": 1, "kind": "train", "loss": 1.0})
    answer = actual("digits.py", (512,), workdir=run)
    assert f"the run in {run} measured no noise scale" in tiny.unbroken(answer.text)
    assert "within" not in answer.text and answer.json["noise_scale"] is None
    with pytest.raises(UserError, match="^the config's argument batch is 512, which is unknown"):
        actual("imagenet_resnet.py:optimizer=lars,recipe=mlperf", (512, 1024))
    with pytest.raises(UserError, match="does not exist; give the workdir of a run"):
        actual("digits.py", (512,), workdir=str(tmp_path / "none"))

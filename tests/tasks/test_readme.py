"""Tests that the README's custom task trains and is evaluated in another folder."""

import json
import pathlib

import pytest

from tests import package_pages


@pytest.mark.long
def test_task_trains_and_is_evaluated(tmp_path: pathlib.Path) -> None:
    lines = package_pages.run_page("tasks", tmp_path)
    assert [line[0] for line in lines] == ["lamb_tpu.train", "lamb_tpu.evaluate"]
    workdir = tmp_path / "runs" / "squares"
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    (last,) = [record for record in records if record["kind"] == "eval"]
    # Outputs that are all 0 would have an error of 1.
    assert set(last) >= {"error", "accuracy"} and last["error"] < 0.9
    assert json.loads((workdir / "config.json").read_text())["task.scale"] == 8.0

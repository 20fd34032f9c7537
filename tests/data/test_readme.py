"""Tests that runs outside the repository can train on the README's custom data sets."""

import json
import pathlib

import pytest

from tests import package_pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("own")
    package_pages.run_page("data", root)
    return root


@pytest.mark.long
@pytest.mark.parametrize(
    "name, source", [("arrays", "rings:train,512,0.2"), ("records", "rings:train,512,0.1")]
)
def test_rings_are_classified(folder: pathlib.Path, name: str, source: str) -> None:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines if '"eval"' in line][-1]
    assert last["step"] == 60 and last["accuracy"] > 0.8  # a linear model reaches about 0.6
    config = json.loads((folder / "runs" / name / "config.json").read_text())
    assert config["data.name"].startswith(f"my_{name}:")
    # The saved position names the data set.
    saved = (folder / "runs" / name / "checkpoints" / "60").rglob("*")
    assert any(source.encode() in path.read_bytes() for path in saved if path.is_file())

"""Tests that tests are skipped, with the reason, if some or all of their data are missing."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.optim import goldens
from tests.shared import ROOT, folder, shared

GOLDEN = sorted(
    str(path)
    for path in (ROOT / "tests").rglob("test_*.py")
    if "goldens" in path.read_text() and path != pathlib.Path(__file__)
)


@pytest.fixture
def partial(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A shared folder with an index of one entry; the file of this entry is missing."""
    (tmp_path / "golden").mkdir()
    entry = {"family": "lamb", "implementation": "one", "setting": "a", "file": "lamb/one.npz"}
    (tmp_path / "golden" / "index.json").write_text(json.dumps({"files": [entry]}))
    monkeypatch.setenv("LAMB_TPU_SHARED", str(tmp_path))
    monkeypatch.delenv("LAMB_TPU_REQUIRE_SHARED", raising=False)
    return tmp_path


def test_reason_names_the_missing_file(partial: pathlib.Path) -> None:
    entry = goldens.find(family="lamb", setting="a")
    goldens.need(1, [entry], "LAMB")
    with pytest.raises(pytest.skip.Exception, match="needs golden/lamb/one.npz from the folder"):
        goldens.record(entry)
    with pytest.raises(pytest.skip.Exception, match="needs the entry lgreco power_rank2 in golden"):
        goldens.find(family="lgreco", setting="power_rank2")
    with pytest.raises(pytest.skip.Exception, match="needs all 2 entries of LAMB in golden/index"):
        goldens.need(2, [entry], "LAMB")
    with pytest.raises(pytest.skip.Exception, match="needs data/mnist from"):
        shared("data", "mnist")


def test_required_data_must_exist(partial: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMB_TPU_REQUIRE_SHARED", "1")
    for absent in (lambda: shared("data", "mnist"), lambda: goldens.find(family="lgreco")):
        with pytest.raises(pytest.fail.Exception, match="set LAMB_TPU_SHARED to the folder's path"):
            absent()


def test_an_empty_variable_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMB_TPU_SHARED", "")
    assert folder() == ROOT.parent / "shared"


@pytest.mark.long
@pytest.mark.parametrize("selection", [slice(1), slice(-1, None)], ids=["first", "last"])
def test_every_golden_test_runs_with_some_entries(selection: slice, tmp_path: pathlib.Path) -> None:
    """Runs the golden tests with an index that has only the first, or only the last, entry of each family."""
    (tmp_path / "golden").mkdir()
    for path in shared("golden").iterdir():
        if path.name != "index.json":
            (tmp_path / "golden" / path.name).symlink_to(path)
    entries = goldens.entries()
    actual = [
        entry
        for family in sorted({entry["family"] for entry in entries})
        for entry in [each for each in entries if each["family"] == family][selection]
    ]
    (tmp_path / "golden" / "index.json").write_text(json.dumps({"files": actual}))
    environment = os.environ | {"LAMB_TPU_SHARED": str(tmp_path)}
    environment.pop("LAMB_TPU_REQUIRE_SHARED", None)
    done = subprocess.run(
        [sys.executable, *"-m pytest -q -n 0 -m".split(), "not long", *GOLDEN]
        + ["-k", "golden or recorded or published or simigrad or torch or rejected"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]

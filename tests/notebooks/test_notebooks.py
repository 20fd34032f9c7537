"""Tests that every notebook runs from top to bottom."""

import importlib.util
import re

import nbclient
import nbformat
import pytest

from tests.marks import some
from tests.shared import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# Notebooks that take seconds; the others are marked long.
QUICK = [FOLDER / f"{name}.ipynb" for name in ("00_first_steps", "07_reading_the_records")]
# Libraries that notebooks need and a machine may lack; the TPU compiler is for Linux on x86-64.
NEEDS = {"04_planning_a_pod": "libtpu", "07_reading_the_records": "pandas"}


def test_the_page_lists_every_notebook():
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (FOLDER / "README.md").read_text())
    assert listed == [path.name for path in NOTEBOOKS]


@pytest.mark.long
@pytest.mark.parametrize("path", some(NOTEBOOKS, QUICK), ids=lambda path: path.stem)
def test_runs(path):
    needed = NEEDS.get(path.stem)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}, which requirements.txt has for the machines that it is for")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()  # raises CellExecutionError with the traceback of the cell
    assert any(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )

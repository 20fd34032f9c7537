"""Every notebook runs from top to bottom."""

import nbclient
import nbformat
import pytest

from tests.marks import some
from tests.shared import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize(
    "path", some(NOTEBOOKS, (NOTEBOOKS[0],)), ids=lambda path: path.stem
)
def test_runs(path):
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}
    )
    client.execute()  # raises CellExecutionError with the cell's own traceback
    assert any(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )

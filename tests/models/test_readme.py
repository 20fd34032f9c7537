"""The page on networks of a user's own: Linen, NNX and plain JAX, from a folder outside."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import own_pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder in which the page's commands have run."""
    root = tmp_path_factory.mktemp("own")
    lines = own_pages.run_page("models", root)
    assert [line[0] for line in lines] == [
        *["lamb_tpu.train"] * 3,
        "lamb_tpu.evaluate",
        "lamb_tpu.export",
    ]
    return root


@pytest.mark.long
@pytest.mark.parametrize("name", ["linen", "nnx", "jax"])
def test_network_learns(folder: pathlib.Path, name: str) -> None:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (last,) = [record for record in records if record["kind"] == "eval"]
    assert last["step"] == 60 and last["accuracy"] > 0.5  # a guess has 0.1
    table = (folder / "runs" / name / "parameters.txt").read_text()
    facts = {row.split()[0]: row.split()[4:6] for row in table.splitlines()[1:-1]}
    kernel = next(path for path in facts if path.endswith("kernel"))
    assert facts[kernel] == ["yes", "yes"] and facts[kernel.replace("kernel", "bias")] == ["no"] * 2
    receipt = json.loads((folder / "runs" / name / "run.jsonl").read_text())
    (own,) = receipt["own"].values()
    assert pathlib.Path(own["file"]) == folder / f"my_{name}.py" and len(own["sha256"]) == 64


def test_exported_arrays_are_those_of_the_run(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "runs" / "jax_weights" / "model.safetensors")
    assert set(tensors) == {
        f"params/{layer}/{leaf}" for layer in ("hidden", "output") for leaf in ("kernel", "bias")
    }
    (outcome,) = own_pages.run(
        [
            [
                "lamb_tpu.evaluate",
                "--config=digits",
                "--config.init_from=runs/jax_weights",
                "--config.model={'name': 'my_jax:two_layers'}",
            ]
        ],
        folder,
    )
    assert outcome["status"] == 0, outcome["stderr"]
    lines = (folder / "runs" / "jax" / "metrics.jsonl").read_text().splitlines()
    (last,) = [json.loads(line) for line in lines if '"eval"' in line]
    found = json.loads(outcome["stdout"])
    np.testing.assert_allclose(found["accuracy"], last["accuracy"])
    np.testing.assert_allclose(found["loss"], last["loss"], rtol=1e-6)

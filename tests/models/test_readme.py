"""The README's custom networks in Linen, NNX and plain JAX, run from another folder."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import package_pages

# Evaluates the weights that the README's commands export.
EVALUATE = [
    "lamb_tpu.evaluate",
    "--config=digits",
    "--config.init_from=runs/jax_weights",
    "--config.model={'name': 'my_jax:two_layers'}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns a folder with the README's modules, in which the README's commands run."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def lines(folder: pathlib.Path) -> list[list[str]]:
    """Returns the README's commands; each fixture below runs some of them once for all tests."""
    actual = package_pages.prepare_page("models", folder)
    assert [line[0] for line in actual] == [
        *["lamb_tpu.train"] * 3,
        "lamb_tpu.evaluate",
        "lamb_tpu.export",
    ]
    return actual


@pytest.fixture(scope="module")
def exported(folder: pathlib.Path, lines: list[list[str]]) -> dict[str, Any]:
    """Runs the README's commands for plain JAX, and then returns the result of `EVALUATE`."""
    assert lines[2][2] == "--workdir=runs/jax"
    return package_pages.succeed([*lines[2:], EVALUATE], folder)[-1]


@pytest.fixture(scope="module")
def learned(folder: pathlib.Path, lines: list[list[str]], exported: dict[str, Any]) -> None:
    """Runs the README's commands for Linen and NNX."""
    package_pages.succeed(lines[:2], folder)


@pytest.mark.long
@pytest.mark.usefixtures("learned")
@pytest.mark.parametrize("name", ["linen", "nnx", "jax"])
def test_network_learns(folder: pathlib.Path, name: str) -> None:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    (last,) = [record for record in records if record["kind"] == "eval"]
    assert last["step"] == 60 and last["accuracy"] > 0.5  # chance is 0.1
    table = (folder / "runs" / name / "parameters.txt").read_text()
    metadata = {row.split()[0]: row.split()[4:6] for row in table.splitlines()[1:-1]}
    kernel = next(path for path in metadata if path.endswith("kernel"))
    assert (
        metadata[kernel] == ["yes", "yes"]
        and metadata[kernel.replace("kernel", "bias")] == ["no"] * 2
    )
    receipt = json.loads((folder / "runs" / name / "run.jsonl").read_text())
    (own,) = receipt["own"].values()
    assert pathlib.Path(own["file"]) == folder / f"my_{name}.py" and len(own["sha256"]) == 64


def test_exported_arrays_are_those_of_the_run(
    folder: pathlib.Path, exported: dict[str, Any]
) -> None:
    tensors = load_file(folder / "runs" / "jax_weights" / "model.safetensors")
    assert set(tensors) == {
        f"params/{layer}/{leaf}" for layer in ("hidden", "output") for leaf in ("kernel", "bias")
    }
    lines = (folder / "runs" / "jax" / "metrics.jsonl").read_text().splitlines()
    (last,) = [json.loads(line) for line in lines if '"eval"' in line]
    actual = json.loads(exported["stdout"])
    np.testing.assert_allclose(actual["accuracy"], last["accuracy"])
    np.testing.assert_allclose(actual["loss"], last["loss"], rtol=1e-6)

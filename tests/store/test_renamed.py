"""Checkpoints in which fields of the state have the names of earlier versions."""

import json
import pathlib
import tarfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.config import unflatten
from lamb_tpu.evaluate import evaluate_checkpoint
from lamb_tpu.store import renamed
from lamb_tpu.store.checkpoint import Checkpoints
from lamb_tpu.train import train


class Earlier(NamedTuple):
    count: Any
    mu: Any
    readings: Any


class Now(NamedTuple):
    count: Any
    mu: Any
    diagnostics: Any


def state(kind: type, diagnostics: Any) -> dict[str, Any]:
    # A parameter called readings keeps its name.
    mu = {"readings": jnp.arange(3.0)}
    return {"opt_state": (kind(jnp.int32(2), mu, diagnostics), kind(jnp.int32(3), mu, None))}


@pytest.mark.parametrize("diagnostics", [None, {"ratio": jnp.ones(2), "readings": jnp.zeros(2)}])
@pytest.mark.parametrize("kind", [Earlier, Now])
def test_both_names_are_read(kind: type, diagnostics: Any, tmp_path: pathlib.Path) -> None:
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state(kind, diagnostics), {})
        checkpoints.wait()
        wanted = state(Now, diagnostics)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted
        )
        restored, _ = checkpoints.restore(1, abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)


def test_other_trees_stay_as_they_are() -> None:
    tree = {"a": (Earlier(1, 2, 3), [4])}
    assert renamed.as_stored(tree, {}) == tree == renamed.as_now(tree, tree)


@pytest.fixture
def earlier(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run of LAMB on digits by commit f5fe2d6 (version 0.1.0): 20 updates, checkpoints 10 and 20."""
    with tarfile.open(pathlib.Path(__file__).parent / "earlier_workdir.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def records(workdir: pathlib.Path) -> list[dict[str, Any]]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    times = ("seconds", "examples_per_second")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


def test_a_run_of_an_earlier_version_resumes(earlier: pathlib.Path) -> None:
    expected = records(earlier)
    for path in sorted((earlier / "checkpoints" / "20").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (earlier / "checkpoints" / "20").rmdir()
    config = unflatten(json.loads((earlier / "config.json").read_text()))
    train(config, earlier, quiet=True)
    resumed = records(earlier)
    assert [(line["step"], line["kind"]) for line in resumed] == [
        (line["step"], line["kind"]) for line in expected
    ]
    for before, now in zip(expected, resumed, strict=True):
        assert now.pop("kind") == before.pop("kind")
        assert now == pytest.approx(before, rel=1e-5)  # rounding depends on the CPU
    # The resumed run trained.
    assert (earlier / "run.jsonl").read_text().count('"from_step": 10') == 1
    assert (earlier / "checkpoints" / "20").is_dir()


def test_a_run_of_an_earlier_version_is_evaluated(earlier: pathlib.Path) -> None:
    config = unflatten(json.loads((earlier / "config.json").read_text()))
    metrics = evaluate_checkpoint(config, earlier)
    assert metrics["loss"] == pytest.approx(records(earlier)[-1]["loss"], rel=1e-5)

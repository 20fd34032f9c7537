"""Tests packaging: dependencies cover all imports, and the wheel has the recipes and tables."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests import tiny
from tests.test_imports import imported

PROJECT = tomllib.loads((tiny.ROOT / "pyproject.toml").read_text())["project"]


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", text)[0].lower().replace("_", "-") for text in requirements}


def third_party(folder: pathlib.Path) -> set[str]:
    tops = {name.partition(".")[0] for path in folder.rglob("*.py") for name in imported(path)}
    # Many packages share the name google; only google-cloud-storage is imported.
    tops -= {*sys.stdlib_module_names, "lamb_tpu", "libtpu", "google"}
    owners = importlib.metadata.packages_distributions()
    return {owners[top][0].lower().replace("_", "-") for top in tops}


def test_optimizers_need_what_is_always_installed() -> None:
    assert declared(PROJECT["dependencies"]) == {"jax", "numpy", "optax"}
    assert third_party(tiny.ROOT / "lamb_tpu" / "optim") == {"jax", "numpy", "optax"}


@pytest.mark.long
def test_extra_train_has_what_the_package_imports() -> None:
    train = declared(PROJECT["optional-dependencies"]["train"])
    bucket = declared(PROJECT["optional-dependencies"]["gcs"])
    installed = train | bucket | declared(PROJECT["dependencies"])
    needed = third_party(tiny.ROOT / "lamb_tpu") | third_party(tiny.ROOT / "configs")
    assert needed <= installed, needed - installed
    pinned = (tiny.ROOT / "requirements.txt").read_text()
    for name in installed:
        assert re.search(rf"^{name}==", pinned, re.MULTILINE), f"{name} is not pinned"


@pytest.mark.long
def test_wheel_runs_a_recipe_by_its_name(tmp_path: pathlib.Path) -> None:
    def run(*command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    shipped = "lamb_tpu configs experiments *.py pyproject.toml MANIFEST.in README.md LICENSE"
    files = subprocess.run(
        ["git", "ls-files", "-z", *shipped.split()],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, files):  # build a copy, because a build writes files beside the source
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((tiny.ROOT / name).read_bytes())
    try:
        run("pip", "wheel", "-q", "--no-deps", "-w", "wheels", "./source")
    except subprocess.CalledProcessError as error:
        # Without a package index, pip cannot download the build backend.
        if "No matching distribution found for setuptools" not in error.stderr:
            raise
        pytest.skip("pip reaches no package index")
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    run("pip", "install", "-q", "--no-deps", "--target", "site", str(wheel))
    recipes = {path.name for path in (tmp_path / "site" / "lamb_tpu" / "configs").glob("*.py")}
    assert recipes == {path.name for path in (tiny.ROOT / "configs").glob("*.py")}
    assert (tmp_path / "site" / "bin" / "lamb_tpu").exists()
    # The papers' tables and records are in the wheel, and the code of the benchmarks is not.
    tables = {path.stem for path in (tmp_path / "site/lamb_tpu/experiments/demo").glob("*.toml")}
    assert tables == {path.stem for path in (tiny.ROOT / "experiments/demo").glob("*.toml")}
    assert not list((tmp_path / "site" / "lamb_tpu" / "experiments").rglob("*.py"))
    assert "0.9919" in run("lamb_tpu.reproduce", "show", "lamb/mnist")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run("lamb_tpu.reproduce", "run", "demo/scaling", "--seeds=4", "--cells=lamb-legw-1437")
    assert "belongs to the installed package" in caught.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run("lamb_tpu.reproduce", "report")
    assert caught.value.stderr.startswith("error: --output is missing")
    run("lamb_tpu", "demo", "--seeds=1", "--cells=lamb-legw-512")
    assert (tmp_path / "runs" / "demo" / "site" / "index.html").exists()
    run("lamb_tpu.train", "--config=digits:smoke", "--workdir=run")
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert "'bert'" in run("lamb_tpu.train", "--config=bert_pretrain:size=small", "--print-config")

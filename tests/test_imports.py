"""Imports go down only: train -> tasks -> models, data, parallel -> optim."""

import ast
import pathlib
import subprocess
import sys

import pytest

from tests.tiny import ROOT

FILES = sorted((ROOT / "lamb_tpu").rglob("*.py"))


def imported(path: pathlib.Path) -> set[str]:
    """Dotted names of what a file imports; for `from a import b` both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def offenders(folder: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    found = []
    for path in sorted((ROOT / "lamb_tpu" / folder).rglob("*.py")):
        for name in imported(path):
            inside = any(name == f or name.startswith(f + ".") for f in forbidden)
            if inside and not any(name == a or name.startswith(a + ".") for a in allowed):
                found.append(f"{path.relative_to(ROOT)} imports {name}")
    return found


TOP = tuple(
    f"lamb_tpu.{name}"
    for name in (
        "best", "checkpoint", "cli", "config", "desync", "distributed", "evaluate", "export",
        "guards", "heartbeat", "hlo", "initial", "launch", "metrics", "mlperf", "overrides",
        "phases", "plan", "plots", "predict", "preemption", "progress", "recipe", "run", "target",
        "throughput", "topology", "traffic", "train", "weights", "workdir",
    )
)


@pytest.mark.parametrize("folder, forbidden", [
    ("optim", ("flax", "ml_collections", "grain", "orbax", "absl", "tensorflow_datasets")),
    ("models", ("lamb_tpu.optim", "lamb_tpu.data", "lamb_tpu.tasks", "lamb_tpu.parallel", *TOP)),
    ("data", ("lamb_tpu.optim", "lamb_tpu.models", "lamb_tpu.tasks", "lamb_tpu.parallel", *TOP)),
    ("tasks", ("lamb_tpu.optim", "lamb_tpu.parallel", *TOP)),
    ("parallel", ("lamb_tpu.data", *TOP)),
    ("", ("tensorflow", "clu", "torch", "keras")),
])
def test_nobody_reaches_up(folder: str, forbidden: tuple[str, ...]) -> None:
    assert not offenders(folder, forbidden)


@pytest.mark.parametrize("name", ["errors", "flops"])
def test_what_all_may_import_knows_nobody(name: str) -> None:
    names = imported(ROOT / "lamb_tpu" / f"{name}.py")
    assert not [item for item in names if item.startswith("lamb_tpu")]


def test_finding_a_users_own_part_needs_no_room() -> None:
    names = imported(ROOT / "lamb_tpu" / "own.py")
    assert {name for name in names if name.startswith("lamb_tpu")} == {
        "lamb_tpu.errors", "lamb_tpu.errors.UserError"
    }


def test_steps_know_no_network() -> None:
    # Only what a step and a layer have to agree on: an example's place, a microbatch's moments.
    shared = ("lamb_tpu.models.dropout", "lamb_tpu.models.norm")
    assert not offenders("parallel", ("lamb_tpu.models",), allowed=shared)


def test_optimizers_stand_alone() -> None:
    assert not offenders("optim", ("lamb_tpu",), allowed=("lamb_tpu.optim",))
    # `from lamb_tpu import optim` is the one form that names the package itself.
    for path in (ROOT / "lamb_tpu" / "optim").glob("*.py"):
        tops = {name.partition(".")[0] for name in imported(path)}
        strangers = tops - set(sys.stdlib_module_names) - {"jax", "optax", "numpy", "lamb_tpu"}
        assert not strangers, f"{path} imports {strangers}"


def test_the_check_itself_sees_imports() -> None:
    names = imported(ROOT / "lamb_tpu" / "train.py")
    assert {"jax", "lamb_tpu.data", "lamb_tpu.run.prepare"} <= names
    assert offenders("", ("lamb_tpu.errors",))


def test_running_imports_no_tensorflow() -> None:
    code = (
        "import sys; import lamb_tpu.train, lamb_tpu.evaluate, lamb_tpu.data; "
        "print([m for m in ('tensorflow', 'torch', 'clu') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

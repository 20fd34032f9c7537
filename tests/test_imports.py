"""Imports go down only: each room of the package knows those below it."""

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


# The rooms of the package, from the ground up, and which other rooms each may import. Beside them
# any may import what serves all: `SERVES_ALL`.
ROOMS: dict[str, set[str]] = {
    "optim": set(),
    "batching": {"optim"},
    "files": set(),
    "cost": set(),
    "cluster": set(),
    "models": {"files", "cost"},
    "data": {"files", "cluster"},
    "tasks": {"models", "data"},
    "parallel": {"optim", "batching", "tasks", "models"},
    "store": {"files", "cluster", "data", "optim"},
    "run": {
        "files",
        "cost",
        "cluster",
        "optim",
        "batching",
        "models",
        "data",
        "tasks",
        "parallel",
        "store",
    },
    "watch": {
        "files",
        "cost",
        "cluster",
        "optim",
        "batching",
        "models",
        "data",
        "tasks",
        "parallel",
        "store",
        "run",
    },
    "plan": {"files", "cost", "optim", "data", "tasks", "store", "run"},
    "critical_batch": {"batching", "cluster", "optim", "data", "run", "store", "watch"},
    "reproduce": {"files", "cluster", "optim", "store", "run", "watch"},
    "launch": {"files", "cost"},
}
# Commands that a room above them runs.
COMMANDS = {"reproduce": {"train"}}
SERVES_ALL = {"cli", "config", "errors", "own", "style", "terminal", "trust", "__version__"}


def rooms_of(path: pathlib.Path) -> set[str]:
    """Returns the rooms and top-level modules of lamb_tpu that a file imports."""
    names = {name.split(".")[1] for name in imported(path) if name.startswith("lamb_tpu.")}
    return names - {path.relative_to(ROOT / "lamb_tpu").parts[0]}


def test_every_room_has_its_place() -> None:
    rooms = {path.parent.name for path in (ROOT / "lamb_tpu").glob("*/__init__.py")}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_downwards_only(room: str) -> None:
    below = list(ROOMS)[: list(ROOMS).index(room)]
    assert ROOMS[room] <= set(below)  # so there is no circle
    known = {path.stem for path in (ROOT / "lamb_tpu").iterdir()}
    for path in (ROOT / "lamb_tpu" / room).rglob("*.py"):
        strangers = (rooms_of(path) & known) - ROOMS[room] - SERVES_ALL - COMMANDS.get(room, set())
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_what_serves_all_knows_no_room_but_the_ground() -> None:
    ground = {"files", "cost", "cluster", "optim"}
    for name in SERVES_ALL - {"__version__"}:
        # The values that an override may have are known only after every room is imported.
        late = {"run"} if name == "cli" else set()
        assert rooms_of(ROOT / "lamb_tpu" / f"{name}.py") <= SERVES_ALL | ground | late, name


@pytest.mark.parametrize("name", ["tensorflow", "clu", "torch", "keras"])
def test_nobody_imports_another_framework(name: str) -> None:
    assert not offenders("", (name,))


def test_commands_are_imported_by_none() -> None:
    commands = tuple(
        f"lamb_tpu.{name}"
        for name in ("train", "evaluate", "predict", "export", "sweep", "compare")
    )
    above = tuple(f"lamb_tpu/{room}/" for room, runs in COMMANDS.items() if runs)
    assert not [line for line in offenders("", commands) if not line.startswith(above)]


def test_finding_a_users_own_part_needs_no_room() -> None:
    names = imported(ROOT / "lamb_tpu" / "own.py")
    assert {name for name in names if name.startswith("lamb_tpu")} == {
        "lamb_tpu.errors",
        "lamb_tpu.errors.Preempted",
        "lamb_tpu.errors.UserError",
    }


def test_steps_know_no_network() -> None:
    # Only what a step and a layer have to agree on: an example's place, a microbatch's moments, and
    # which convolutions a CPU computes fast in a loop.
    shared = ("lamb_tpu.models.dropout", "lamb_tpu.models.norm", "lamb_tpu.models.convolution")
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
    assert {"jax", "lamb_tpu.data", "lamb_tpu.run.build.prepare"} <= names
    assert {"run", "store", "watch", "cluster"} <= rooms_of(ROOT / "lamb_tpu" / "train.py")
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

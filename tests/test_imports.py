"""Tests that each package imports only packages below it, as `_TABLE` lists them."""

import ast
import pathlib
import subprocess
import sys

import pytest

from tests import tiny
from tests.shared import shared
from tests.tiny import ROOT

FILES = sorted((ROOT / "lamb_tpu").rglob("*.py"))


def imported(path: pathlib.Path) -> set[str]:
    """Returns the dotted names that a file imports; for `from a import b`, both a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def offenders(folder: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    actual = []
    for path in sorted((ROOT / "lamb_tpu" / folder).rglob("*.py")):
        for name in imported(path):
            inside = any(name == f or name.startswith(f + ".") for f in forbidden)
            if inside and not any(name == a or name.startswith(a + ".") for a in allowed):
                actual.append(f"{path.relative_to(ROOT)} imports {name}")
    return actual


# The subpackages, lowest first, each with those that it may import besides `SERVES_ALL`.
_TABLE = """
optim:
batching: optim
files:
cost:
cluster:
kernels:
models: files cost kernels
data: files cluster
tasks: models data
parallel: optim batching kernels models tasks
store: optim files cluster data
run: optim batching files cost cluster kernels models data tasks parallel store
watch: optim batching files cost cluster models data tasks parallel store run
plan: optim files cost cluster data tasks store run
critical_batch: optim batching cluster data parallel store run watch
launch: files cost cluster
reproduce: optim files cost cluster data parallel store run watch launch
"""
PACKAGES = {
    name: set(others.split())
    for name, others in (row.split(":") for row in _TABLE.strip().splitlines())
}
# By package: the commands that the package may import, although they are above it, because it runs them.
COMMANDS = {"reproduce": {"train"}}
_SHARED = """
cli components config config_file custom ending environment errors field_types limits
overrides spec spec_checks spec_keys style terminal trust types
"""
SERVES_ALL = {"__version__", *_SHARED.split()}


def packages_of(path: pathlib.Path) -> set[str]:
    names = {name.split(".")[1] for name in imported(path) if name.startswith("lamb_tpu.")}
    return names - {path.relative_to(ROOT / "lamb_tpu").parts[0]}


def test_the_table_has_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "lamb_tpu").glob("*/__init__.py")}
    assert packages == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards_only(package: str) -> None:
    below = list(PACKAGES)[: list(PACKAGES).index(package)]
    assert PACKAGES[package] <= set(below)  # so imports have no cycle
    known = {path.stem for path in (ROOT / "lamb_tpu").iterdir()}
    for path in (ROOT / "lamb_tpu" / package).rglob("*.py"):
        strangers = (
            (packages_of(path) & known)
            - PACKAGES[package]
            - SERVES_ALL
            - COMMANDS.get(package, set())
        )
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_shared_modules_import_only_the_lowest_packages() -> None:
    ground = {"files", "cost", "cluster", "optim"}
    for name in SERVES_ALL - {"__version__"}:
        # Overrides need all components, so these modules import `run` inside functions.
        late = {"run"} if name in ("cli", "config_file", "overrides") else set()
        assert packages_of(ROOT / "lamb_tpu" / f"{name}.py") <= SERVES_ALL | ground | late, name


@pytest.mark.parametrize("name", ["tensorflow", "clu", "torch", "keras"])
def test_nobody_imports_another_framework(name: str) -> None:
    assert not offenders("", (name,))


def test_commands_are_imported_by_none() -> None:
    commands = tuple(
        f"lamb_tpu.{name}"
        for name in ("train", "evaluate", "predict", "export", "sweep", "compare")
    )
    above = tuple(f"lamb_tpu/{package}/" for package, runs in COMMANDS.items() if runs)
    assert not [line for line in offenders("", commands) if not line.startswith(above)]


def test_custom_imports_no_package() -> None:
    names = imported(ROOT / "lamb_tpu" / "custom.py")
    assert {name for name in names if name.startswith("lamb_tpu")} == {
        "lamb_tpu.errors",
        "lamb_tpu.errors.Preempted",
        "lamb_tpu.errors.UserError",
    }


def test_steps_know_no_network() -> None:
    # The step and the layers share only an example's index and a microbatch's moments.
    shared = ("lamb_tpu.models.dropout", "lamb_tpu.models.norm")
    assert not offenders("parallel", ("lamb_tpu.models",), allowed=shared)


def test_optimizers_import_no_other_package() -> None:
    assert not offenders("optim", ("lamb_tpu",), allowed=("lamb_tpu.optim",))
    # Besides the standard library, the optimizers import only JAX, Optax and NumPy.
    for path in (ROOT / "lamb_tpu" / "optim").glob("*.py"):
        tops = {name.partition(".")[0] for name in imported(path)}
        strangers = tops - set(sys.stdlib_module_names) - {"jax", "optax", "numpy", "lamb_tpu"}
        assert not strangers, f"{path} imports {strangers}"


def test_a_central_name_is_that_of_one_class() -> None:
    names = ["Row", "Plan", "Start", "Request", "Layout", "Options"]
    actual = [
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name in names
    ]
    assert {name for name in actual if actual.count(name) > 1} == set()
    assert {"Plan", "Layout"} <= set(actual)


def test_constructors_of_many_fields_are_called_with_keywords() -> None:
    # Optimizers and steps may call constructors by position, so that code looks like its formulas.
    free = ("lamb_tpu/optim/", "lamb_tpu/parallel/", "lamb_tpu/run/updating.py")
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in FILES}
    classes = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    } - {"Progress"}  # rich has a class of the same name, which takes its columns by position
    calls = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if not path.startswith(free)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and len(node.args) > 6
        and ast.unparse(node.func).rpartition(".")[2] in classes
    ]
    assert not calls


def test_the_check_itself_sees_imports() -> None:
    names = imported(ROOT / "lamb_tpu" / "training.py")
    assert {"jax", "lamb_tpu.data", "lamb_tpu.run.build.prepare"} <= names
    assert {"run", "store", "watch", "cluster"} <= packages_of(ROOT / "lamb_tpu" / "train.py")
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


_ENVIRONMENT = """
import importlib, os, pkgutil
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # as JAX sets it on a machine that has libtpu and no TPU
import jax
before = dict(os.environ)
import lamb_tpu
names = [module.name for module in pkgutil.walk_packages(lamb_tpu.__path__, "lamb_tpu.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
changed = {name for name, value in os.environ.items() if before.get(name) != value}
# OpenCV sets the path of libraries.
print(len(names), sorted(changed - {"LD_LIBRARY_PATH"}))
"""


def test_imports_do_not_change_the_environment() -> None:
    done = tiny.python(_ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    number, changed = done.stdout.split(maxsplit=1)
    assert (int(number) > 300, changed.strip()) == (True, "[]")


_REJECTING = """
import sys

HEAVY = %r

class Reject:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Reject())
"""
# Packages that a machine with only ml_collections, msgspec and simplejpeg lacks.
_HEAVY = ("tensorflow_datasets", "grain", "array_record", "tensorboardX", "dm_tree", "promise")


def run_without(code: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program in which the packages of `_HEAVY` cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", _REJECTING % (_HEAVY,) + code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_needs_neither_tfds_nor_grain_nor_tensorboard(tmp_path: pathlib.Path) -> None:
    done = run_without(
        "import pathlib\n"
        "from lamb_tpu.train import train\n"
        "from tests import tiny\n"
        "config = tiny.digits()\n"
        "config.log.tensorboard = False\n"
        f"train(config, pathlib.Path({str(tmp_path)!r}), quiet=True)\n"
        "from lamb_tpu.reproduce import running\n"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "metrics.jsonl").exists()


def test_original_files_and_jpegs_need_no_tfds() -> None:
    done = run_without(
        "from lamb_tpu import data\n"
        f"mnist = data.load('mnist', 'test', source_dir={str(shared('data', 'mnist'))!r})\n"
        f"jpeg = data.load('cifar10_jpeg', 'test', source_dir={str(shared('data', 'cifar10'))!r})\n"
        "print(len(mnist), len(jpeg))\n"
    )
    assert done.stdout.split() == ["10000", "10000"], done.stderr


@pytest.mark.parametrize(
    "code, named",
    [
        ("data.load('cifar10', 'test')", "cifar10 needs the package tensorflow_datasets"),
        (
            "data.load('digits', 'test[:9%]')",
            "split 'test[:9%]' of data set digits needs the package tensorflow_datasets",
        ),
        ("MetricsWriter(pathlib.Path(folder), 0, True)", "config.log.tensorboard=True needs the"),
    ],
)
def test_a_missing_package_is_named(code: str, named: str, tmp_path: pathlib.Path) -> None:
    done = run_without(
        "import pathlib\n"
        "from lamb_tpu import data\n"
        "from lamb_tpu.errors import UserError\n"
        "from lamb_tpu.store.metrics import MetricsWriter\n"
        f"folder = {str(tmp_path)!r}\n"
        f"try:\n    {code}\nexcept UserError as error:\n    print(error)\n"
    )
    assert named in done.stdout and "install the extra train" in done.stdout, done.stderr


# Modules of the command line, and the one that parses configs. All other modules get typed values.
SEE_CONFIGS = {"cli.py", "config.py", "config_file.py", "overrides.py", "spec.py"}


def names_config_dict(tree: ast.AST) -> bool:
    """Returns whether code refers to ConfigDict; messages and docstrings do not count."""
    return any(
        "ConfigDict" in (getattr(node, "id", ""), getattr(node, "attr", ""))
        or (isinstance(node, ast.alias) and node.name == "ConfigDict")
        for node in ast.walk(tree)
    )


def test_below_the_command_line_configs_are_parsed() -> None:
    folder = ROOT / "lamb_tpu"
    actual = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if names_config_dict(ast.parse(path.read_text()))
    }
    assert actual == SEE_CONFIGS

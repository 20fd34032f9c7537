"""The shape of the source: short files, each with its test, none with a path of some machine."""

import pathlib
import re
import subprocess

from tests.tiny import ROOT

FOLDERS = ("lamb_tpu", "configs", "experiments", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Modules without a test file of their own name, and where they are tested instead.
TESTED_ELSEWHERE = {
    "lamb_tpu/errors.py": "without code; tests of mistakes and of preemption raise them",
    "lamb_tpu/critical_batch/__main__.py": "tests/critical_batch/test_main.py runs it",
    "lamb_tpu/launch/__main__.py": "tests/launch/test_commands.py runs it",
    "lamb_tpu/models/__main__.py": "tests/models/test_costs.py runs it",
    "lamb_tpu/models/bert_network.py": "tests/models/test_bert.py, by the names of bert.py",
    "lamb_tpu/parallel/layout.py": "tests/parallel/test_state.py and test_step.py lay out with it",
    "lamb_tpu/optim/muon.py": "tests/optim/test_baselines.py compares it with Optax's",
    "lamb_tpu/optim/placement.py": "tests/optim/test_sharding.py asks for it by its former name",
    "lamb_tpu/optim/schedule_free.py": "tests/optim/test_baselines.py, and in runs "
    "tests/test_schedule_free.py",
    "lamb_tpu/parallel/backends.py": "tests/parallel/test_step.py compares the two of them",
    "lamb_tpu/data/stream.py": "tests/data/test_loader.py and test_evaluation.py read through it",
    "lamb_tpu/plan/__main__.py": "tests/plan/test_main.py runs it",
    "lamb_tpu/reproduce/__main__.py": "tests/reproduce/test_running.py runs it",
    "lamb_tpu/reproduce/tables.py": "tests/reproduce/test_loading.py reads them",
    "lamb_tpu/data/splits.py": "tests/data/test_digits.py and test_registry.py slice with it",
}


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    assert len(lengths) > 40
    assert not {path: length for path, length in lengths.items() if length >= 500}


def test_lines_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 100
    ]
    assert not long


def test_every_module_has_its_test() -> None:
    missing = []
    for path in sorted((ROOT / "lamb_tpu").rglob("*.py")):
        name = path.relative_to(ROOT)
        twin = ROOT / "tests" / path.relative_to(ROOT / "lamb_tpu").with_name(f"test_{path.name}")
        if path.name != "__init__.py" and not twin.exists() and str(name) not in TESTED_ELSEWHERE:
            missing.append(str(name))
    assert not missing


def test_exceptions_are_needed() -> None:
    for name, reason in TESTED_ELSEWHERE.items():
        path = pathlib.Path(name)
        twin = pathlib.Path("tests", *path.parts[1:]).with_name(f"test_{path.name}")
        assert (ROOT / path).exists() and not (ROOT / twin).exists(), name
        for mentioned in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / mentioned).exists(), mentioned


def test_every_module_says_what_it_is() -> None:
    for path in FILES:
        text = path.read_text().lstrip()
        assert not text or text.startswith(('"""', 'r"""')), path


def test_no_path_of_a_machine_and_nothing_unfinished() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = {".py", ".md", ".toml", ".txt", ".ipynb", ".sh", ".yml", ""}
    found = []
    for name in listed:
        path = ROOT / name
        if path.suffix not in texts or not path.is_file():
            continue
        # The base64 of a notebook's pictures can spell anything.
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text(errors="replace"))
        for match in re.finditer(
            r"(?<![\w.~$}])/(?:work|root|home|tmp)/\w+|\b(?:TODO|FIXME|XXX)\b", text
        ):
            found.append(f"{name}: {match[0]}")
    assert not [item for item in found if not item.startswith("tests/test_files.py")]

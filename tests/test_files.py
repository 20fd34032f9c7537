"""Tests that source files are short, have tests, and contain no path of a particular machine."""

import pathlib
import re
import subprocess

from tests.tiny import ROOT

FOLDERS = ("lamb_tpu", "configs", "experiments", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# Modules without a mirrored test file, and the tests that cover them.
TESTED_ELSEWHERE = {
    "lamb_tpu/__main__.py": "tests/test_command.py runs it",
    "lamb_tpu/check_images.py": "tests/test_command.py runs it",
    "lamb_tpu/prepare_text.py": "tests/test_command.py runs it",
    "lamb_tpu/critical_batch/__main__.py": "tests/critical_batch/test_main.py runs it",
    "lamb_tpu/cluster/signals.py": "tests/test_cli.py and tests/launch/test_local.py send signals",
    "lamb_tpu/ending.py": "tests/test_cli.py and tests/test_terminal.py end commands with it",
    "lamb_tpu/limits.py": "numbers; tests/test_spec_checks.py and tests/test_terminal.py exceed "
    "them",
    "lamb_tpu/reproduce/schema.py": "tests/reproduce/test_loading.py reads tables by it",
    "lamb_tpu/run/categories.py": "tests/test_components.py goes over all registries",
    "lamb_tpu/training.py": "tests/test_train.py trains with it",
    "lamb_tpu/types.py": "mypy checks the signatures that use it",
    "lamb_tpu/run/settings.py": "tests/run/test_build.py makes the settings of runs",
    "lamb_tpu/field_types.py": "tests/test_overrides.py converts all values with it",
    "lamb_tpu/store/schema.py": "tests/store/test_metrics.py and tests/reproduce/test_records.py",
    "lamb_tpu/launch/host_steps.py": "tests/launch/test_tpu_vm.py and tests/launch/test_compute.py",
    "lamb_tpu/launch/local_steps.py": "tests/launch/test_tpu_vm.py, tests/launch/test_compute.py",
    "lamb_tpu/launch/__main__.py": "tests/launch/test_commands.py runs it",
    "lamb_tpu/models/__main__.py": "tests/models/test_costs.py runs it",
    "lamb_tpu/models/bert_network.py": "tests/models/test_bert.py, by the names of bert.py",
    "lamb_tpu/parallel/layout.py": "tests/parallel/test_state.py and test_step.py lay out with it",
    "lamb_tpu/optim/muon.py": "tests/optim/test_baselines.py compares it with Optax's",
    "lamb_tpu/optim/schedule_free.py": "tests/optim/test_baselines.py, and in runs "
    "tests/test_schedule_free.py",
    "lamb_tpu/parallel/backends.py": "tests/parallel/test_step.py compares the two of them",
    "lamb_tpu/data/stream.py": "tests/data/test_loader.py and test_evaluation.py read through it",
    "lamb_tpu/plan/__main__.py": "tests/plan/test_main.py runs it",
    "lamb_tpu/reproduce/__main__.py": "tests/reproduce/test_running.py runs it",
    "lamb_tpu/reproduce/tables.py": "tests/reproduce/test_loading.py reads them",
    "lamb_tpu/data/prepared.py": "tests/data/test_registry.py and test_originals.py read by it",
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
        if len(line) > 110
    ]
    assert not long


def test_every_module_has_its_test() -> None:
    missing = []
    for path in sorted((ROOT / "lamb_tpu").rglob("*.py")):
        name = path.relative_to(ROOT)
        mirrored = (
            ROOT / "tests" / path.relative_to(ROOT / "lamb_tpu").with_name(f"test_{path.name}")
        )
        if (
            path.name != "__init__.py"
            and not mirrored.exists()
            and str(name) not in TESTED_ELSEWHERE
        ):
            missing.append(str(name))
    assert not missing


def test_exceptions_are_needed() -> None:
    for name, reason in TESTED_ELSEWHERE.items():
        path = pathlib.Path(name)
        mirrored = pathlib.Path("tests", *path.parts[1:]).with_name(f"test_{path.name}")
        assert (ROOT / path).exists() and not (ROOT / mirrored).exists(), name
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
    actual = []
    for name in listed:
        path = ROOT / name
        if path.suffix not in texts or not path.is_file():
            continue
        # The base64 of a notebook's images can contain any letters.
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text(errors="replace"))
        for match in re.finditer(
            r"(?<![\w.~$}])/(?:work|root|home|tmp)/\w+|\b(?:TODO|FIXME|XXX)\b", text
        ):
            actual.append(f"{name}: {match[0]}")
    assert not [item for item in actual if not item.startswith("tests/test_files.py")]

"""Tests the Dockerfile: libraries are pinned, the user is not root, and the files to copy exist."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.tiny import ROOT

TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
STEPS = [line.split(maxsplit=1) for line in TEXT.replace("\\\n", " ").splitlines() if line.strip()]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = {
    re.sub(r"[-_.]+", "-", name.lower())
    for name in re.findall(
        r"^([\w.-]+)(?:\[[\w,]+\])?==", (ROOT / "requirements.txt").read_text(), re.MULTILINE
    )
}


def of(instruction: str) -> list[str]:
    return [text for name, text in STEPS if name == instruction]


def test_python_is_one_that_the_package_takes() -> None:
    (base,) = of("FROM")
    major, minor = re.fullmatch(r"python:(\d+)\.(\d+)-slim-bookworm", base).groups()
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
    assert major == "3" and int(low) <= int(minor) < int(high)
    assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]


def test_every_library_is_pinned() -> None:
    (command,) = (text for text in of("RUN") if "--constraint=requirements.txt" in text)
    extras = re.search(r'"\.\[([\w,]+)\]"', command)[1].split(",")
    assert {"train", "tpu", "gcs"} == set(extras)
    needed = [
        *PROJECT["dependencies"],
        *(name for extra in extras for name in PROJECT["optional-dependencies"][extra]),
    ]
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", need)[0].lower()) for need in needed}
    assert names <= PINNED, names - PINNED
    assert {"jaxlib", "libtpu"} <= PINNED


def test_code_is_installed_last_and_by_another_user_than_root() -> None:
    names = [name for name, _ in STEPS]
    # The libraries come first, so that a change of the code does not invalidate their layer.
    assert names == ["FROM", "ENV", "WORKDIR", "COPY", "COPY", "RUN", "COPY", "RUN", "USER", "CMD"]
    (user,) = of("USER")
    assert user != "root" and f"useradd --create-home --uid=1000 {user}" in of("RUN")[0]
    assert all("--no-cache-dir" in text for text in of("RUN"))


def test_files_exist_and_none_of_them_is_ignored() -> None:
    *copied, target = of("COPY")[0].split()
    assert target == "./" and all((ROOT / name).is_file() for name in copied)
    assert of("COPY")[1] == "lamb_tpu/__init__.py lamb_tpu/"  # this file has the version
    ignored = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"
    ]
    assert ".*" in ignored and not {*copied, "lamb_tpu", "configs", "experiments"} & set(ignored)


@pytest.mark.long
def test_libraries_can_be_installed_before_the_code(tmp_path: pathlib.Path) -> None:
    """pip can build the package with only the files that the first layer contains."""
    *copied, _ = of("COPY")[0].split()
    for name in copied:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "lamb_tpu").mkdir()
    shutil.copy(ROOT / "lamb_tpu" / "__init__.py", tmp_path / "lamb_tpu")
    words = shlex.split(of("RUN")[0].partition("&&")[0])
    assert words[0] == "mkdir"
    subprocess.run(words, cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    # Without a package index, pip cannot download the build backend.
    if "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("pip reaches no package index")
    assert done.returncode == 0 and list(tmp_path.glob("wheels/*.whl")), done.stderr

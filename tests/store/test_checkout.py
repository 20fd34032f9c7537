"""The commit of a checkout, marked if the code has changed since that commit."""

import pathlib
import shutil
import subprocess

import pytest

from lamb_tpu.store import checkout
from tests.raising import rejected
from tests.tiny import ROOT


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a package in a temporary checkout."""
    folder = tmp_path / "tree" / "lamb_tpu" / "store"
    folder.mkdir(parents=True)
    monkeypatch.setattr(checkout, "__file__", str(folder / "checkout.py"))
    monkeypatch.delenv(checkout.VARIABLE, raising=False)
    return folder


def git(folder: pathlib.Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def commit_all(tree: pathlib.Path) -> None:
    """Turns a folder into a git checkout, and commits its files."""
    git(tree, "init")
    git(tree, "add", "--all")
    git(tree, "commit", "--message=first")


def test_commit_is_marked_if_code_has_changed(package: pathlib.Path) -> None:
    code, records = package / "checkout.py", package / "records.jsonl"
    assert checkout.commit() is None and not checkout.is_changed(None)
    code.write_text("a = 1\n")
    records.write_text("1\n")
    commit_all(package.parents[1])
    clean = checkout.commit()
    assert clean is not None and len(clean) >= 12 and clean.isalnum()
    assert not checkout.is_changed(clean)
    records.write_text("2\n")
    assert checkout.commit() == clean
    code.write_text("a = 2\n")
    assert checkout.commit() == f"{clean}+" and checkout.is_changed(f"{clean}+")


def test_a_new_file_of_the_package_is_a_change(package: pathlib.Path) -> None:
    (package / "checkout.py").write_text("a = 1\n")
    commit_all(package.parents[1])
    clean = checkout.commit()
    (package.parents[1] / "my_script.py").write_text("")  # a file of the user
    (package / "records.jsonl").write_text("")
    assert clean is not None and checkout.commit() == clean
    (package / "models").mkdir()
    (package / "models" / "new.py").write_text("")
    assert checkout.commit() == f"{clean}+"


def test_an_archive_knows_its_commit(
    package: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the code on a TPU VM or in a container has no git, but its runs must record a commit."""
    tree, name = package.parents[1], "archived.txt"
    (tree / ".gitattributes").write_text(f"lamb_tpu/store/{name} export-subst\n")
    (package / name).write_text((ROOT / "lamb_tpu" / "store" / name).read_text())
    (package / "checkout.py").write_text("")
    assert checkout.commit() is None  # there is no commit yet
    commit_all(tree)
    commit, there = checkout.commit(), tree / "there"
    there.mkdir()
    git(tree, "archive", "--output=code.tar", "HEAD")
    subprocess.run(["tar", "-xf", tree / "code.tar", "-C", there], check=True)
    monkeypatch.setattr(checkout, "__file__", str(there / "lamb_tpu" / "store" / "checkout.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tree))
    assert commit is not None and checkout.commit() == commit
    # A copy inside the checkout of another project does not take that project's commit.
    monkeypatch.delenv("GIT_CEILING_DIRECTORIES")
    assert checkout.commit() == commit


def test_the_archive_settings_of_the_package() -> None:
    assert "lamb_tpu/store/archived.txt export-subst" in (ROOT / ".gitattributes").read_text()
    assert (ROOT / "lamb_tpu" / "store" / "archived.txt").read_text() == "$Format:%H$\n"


def test_a_copy_without_git_has_the_commit_of_its_file(
    package: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, file = package.parents[1], tmp_path / "commit.json"
    code, records = package / "checkout.py", package / "records.jsonl"
    code.write_text("a = 1\n")
    with rejected(tree, problem="is not a git checkout", remedy="start from a checkout"):
        checkout.stamp(file)
    commit_all(tree)
    clean = checkout.stamp(file)
    monkeypatch.setenv(checkout.VARIABLE, str(file))
    shutil.rmtree(tree / ".git")
    records.write_text("1\n")
    assert checkout.commit() == clean
    code.write_text("a = 2\n")
    assert checkout.commit() == f"{clean}+"
    code.write_text("a = 1\n")
    (package / "new.py").write_text("")
    assert checkout.commit() == f"{clean}+"
    monkeypatch.delenv(checkout.VARIABLE)
    assert checkout.commit() is None


def test_changed_code_gets_no_stamp(package: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (package / "checkout.py").write_text("a = 1\n")
    commit_all(package.parents[1])
    (package / "checkout.py").write_text("a = 2\n")
    with rejected("the code", problem="has changed since", remedy="commit the changes first"):
        checkout.stamp(tmp_path / "commit.json")
    assert not (tmp_path / "commit.json").exists()


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"commit": "a b", "code": "c"}'])
def test_a_damaged_file_is_named(
    package: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | None,
) -> None:
    file = tmp_path / "commit.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv(checkout.VARIABLE, str(file))
    with rejected(checkout.VARIABLE, str(file), "is not a file that contains a commit"):
        checkout.commit()

"""The commit of a checkout, marked where code has changed since."""

import pathlib
import subprocess

import pytest

from lamb_tpu.store import checkout


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of a package whose commit is looked up."""
    folder = tmp_path / "lamb_tpu"
    folder.mkdir()
    monkeypatch.setattr(checkout, "__file__", str(folder / "checkout.py"))
    return folder


def git(folder: pathlib.Path, *arguments: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_commit_is_marked_where_code_has_changed(package: pathlib.Path) -> None:
    code, records = package / "checkout.py", package / "records.jsonl"
    assert checkout.commit() is None and not checkout.is_changed(None)
    git(package.parent, "init")
    code.write_text("a = 1\n")
    records.write_text("1\n")
    git(package, "add", "--all")
    git(package, "commit", "--message=first")
    clean = checkout.commit()
    assert clean is not None and len(clean) >= 12 and clean.isalnum()
    assert not checkout.is_changed(clean)
    records.write_text("2\n")
    assert checkout.commit() == clean
    code.write_text("a = 2\n")
    assert checkout.commit() == f"{clean}+" and checkout.is_changed(f"{clean}+")


def test_a_new_file_of_the_package_is_a_change(package: pathlib.Path) -> None:
    git(package.parent, "init")
    (package / "checkout.py").write_text("a = 1\n")
    git(package, "add", "--all")
    git(package, "commit", "--message=first")
    clean = checkout.commit()
    (package.parent / "my_script.py").write_text("")  # a user's
    (package / "records.jsonl").write_text("")
    assert clean is not None and checkout.commit() == clean
    (package / "models").mkdir()
    (package / "models" / "new.py").write_text("")
    assert checkout.commit() == f"{clean}+"

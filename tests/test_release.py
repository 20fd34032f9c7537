"""Tests that all files have the same version, and that the changelog's fragments are well formed."""

import re
import tomllib

import lamb_tpu
from tests.shared import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TYPES = {entry["directory"]: entry["name"] for entry in PROJECT["tool"]["towncrier"]["type"]}
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_every_file_has_the_version_of_the_package() -> None:
    assert "version" not in PROJECT["project"]
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert dynamic == {"attr": "lamb_tpu.__version__"}
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {lamb_tpu.__version__}\n" in citation
    date = re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)
    assert date is not None
    newest = re.search(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert newest is not None and newest[1] == f"{lamb_tpu.__version__} ({date[1]})"


def test_the_changelog_has_the_sections_of_the_types() -> None:
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= set(TYPES.values())
    start = PROJECT["tool"]["towncrier"]["start_string"]
    assert start in CHANGELOG


def test_fragments_are_named_and_say_what_changed() -> None:
    folder = ROOT / PROJECT["tool"]["towncrier"]["directory"]
    assert (ROOT / PROJECT["tool"]["towncrier"]["template"]).is_file()
    for path in folder.iterdir():
        if path.name in ("README.md", "template.md.j2"):
            continue
        match = re.fullmatch(r"[\w-]+\.(\w+)\.md", path.name)
        assert match is not None and match[1] in TYPES, path.name
        if match[1] != "added":
            assert re.search(r"\b[Pp]reviously\b", path.read_text()), path.name

"""The commit of the running code, marked if the code has changed since that commit.

The commit comes from the package's git checkout. In a copy of the code without git, it comes from
the file that `LAMB_TPU_COMMIT_FILE` names and `stamp` wrote, or from `archived.txt`, into which
`git archive` writes the commit.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess

from lamb_tpu.errors import ABSENT, UserError
from lamb_tpu.files import reading, writing

VARIABLE = "LAMB_TPU_COMMIT_FILE"
_FOLDERS, _SUFFIXES = ("lamb_tpu", "configs", "experiments"), ("py", "toml")
# Untracked files that count as changed code. Other files of a user do not change the package.
_CODE = tuple(f":(top){folder}/*.{suffix}" for folder in _FOLDERS for suffix in _SUFFIXES)


def commit() -> str | None:
    """Returns the commit of the package's code, with '+' if the code has changed; None if unknown.

    Only changed code counts; changed measurement records do not.
    """
    return _of_git() or _of_file(os.environ.get(VARIABLE)) or _archived()


def stamp(path: pathlib.Path) -> str:
    """Writes the commit and the code's digest to `path`, for a copy without git; returns the commit.

    Rejects code that has changed since the commit.
    """
    head = _of_git()
    if head is None:
        problem = "is not a git checkout, so its code has no commit"
        raise UserError(_root(), ABSENT, problem, "start from a checkout")
    if is_changed(head):
        problem = f"has changed since commit {head[:-1]}, and tables reject records of changed code"
        raise UserError("the code", ABSENT, problem, "commit the changes first")
    writing.replace(path, json.dumps({"commit": head, "code": _digest()}) + "\n")
    return head


def _root() -> pathlib.Path:
    return pathlib.Path(__file__).resolve().parents[2]


def _digest() -> str:
    root, digest = _root(), hashlib.sha256()
    paths = (
        path.relative_to(root)
        for folder in _FOLDERS
        for suffix in _SUFFIXES
        for path in (root / folder).rglob(f"*.{suffix}")
    )
    for path in sorted(paths):
        content = hashlib.sha256((root / path).read_bytes()).hexdigest()
        digest.update(f"{path.as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _of_file(file: str | None) -> str | None:
    if not file:
        return None
    try:
        stored = reading.parse_json(reading.read_text(pathlib.Path(file)))
        known, code = stored["commit"], stored["code"]
        if not (isinstance(known, str) and isinstance(code, str) and known.isalnum()):
            raise ValueError("it has no valid commit and digest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"is not a file that contains a commit ({error})"
        remedy = "make it again in the checkout, or unset the variable"
        raise UserError(VARIABLE, file, problem, remedy) from None
    return known if code == _digest() else f"{known}+"


def _of_git() -> str | None:
    def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["git", *arguments],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )

    try:
        # An installed package may be inside the checkout of another project.
        if git("ls-files", "--error-unmatch", pathlib.Path(__file__).name).returncode:
            return None
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", ":(top)*.py", ":(top)*.toml").returncode
        added = git("ls-files", "--others", "--exclude-standard", "--", *_CODE).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return None if head.returncode else head.stdout.strip() + ("+" if changed or added else "")


def _archived() -> str | None:
    """Returns the commit that `git archive` wrote (see .gitattributes); None without an archive."""
    try:
        text = (pathlib.Path(__file__).parent / "archived.txt").read_text().strip()
    except OSError:
        return None
    return text[:12] if re.fullmatch("[0-9a-f]{40,64}", text) else None


def is_changed(commit: str | None) -> bool:
    """Returns whether `commit` marks a tree with uncommitted changes."""
    return commit is not None and commit.endswith("+")

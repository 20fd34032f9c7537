"""The checkout that the package lies in, if it lies in one: its commit, and changes since."""

import pathlib
import subprocess

# Code that may be new. Elsewhere in a checkout a user's files do not change what the package does.
_CODE = tuple(
    f":(top){folder}/*.{suffix}"
    for folder in ("lamb_tpu", "configs", "experiments")
    for suffix in ("py", "toml")
)


def commit() -> str | None:
    """Returns the commit of the package's checkout, with '+' if code has changed, or None.

    Ignores committed measurement records; only code marks the tree as changed.
    """

    def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["git", *arguments],
            cwd=pathlib.Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
        )

    try:
        # An installed package may lie inside the checkout of another project.
        if git("ls-files", "--error-unmatch", pathlib.Path(__file__).name).returncode:
            return None
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("diff", "--quiet", "HEAD", "--", ":(top)*.py", ":(top)*.toml").returncode
        added = git("ls-files", "--others", "--exclude-standard", "--", *_CODE).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return None if head.returncode else head.stdout.strip() + ("+" if changed or added else "")


def is_changed(commit: str | None) -> bool:
    """Returns whether `commit` is of a tree with uncommitted changes."""
    return commit is not None and commit.endswith("+")

"""Checksums of a folder's files, kept inside it: Orbax has none for the values of arrays."""

import hashlib
import json
import pathlib

NAME = "sha256.json"


def write(folder: pathlib.Path) -> None:
    """Writes the SHA-256 of every file in the folders below `folder` into `folder`/sha256.json."""
    sums = {str(path.relative_to(folder)): _sha256(path) for path in _files(folder)}
    (folder / NAME).write_text(json.dumps(sums, indent=1) + "\n")


def find_damage(folder: pathlib.Path) -> str | None:
    """What is wrong with the files of `folder`, or None if they are as they were written."""
    try:
        sums = json.loads((folder / NAME).read_text())
        for name, expected in sums.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _sha256(folder / name) != expected:
                return f"{name} is not as it was written"
    except FileNotFoundError:
        return f"{NAME} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    # Not those of the folder itself: Orbax still changes them as it commits a checkpoint.
    return sorted(path for path in folder.glob("*/**/*") if path.is_file())


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Checksums of a checkpoint's files, kept inside it; Orbax has none for the values of arrays."""

import fnmatch
import hashlib
import json
import pathlib
from collections.abc import Collection

NAME = "sha256.json"
# Files of a complete checkpoint. Orbax first writes each process' part of the state; the merge
# creates the manifest and d/.
_NEEDED = ("position/data.json", "state/_METADATA", "state/manifest.ocdbt", "state/d/*")


def write(folder: pathlib.Path) -> None:
    """Writes the SHA-256 of every file in the folders below `folder` into `folder`/sha256.json.

    Raises:
      ValueError: a file that is needed to read the checkpoint is missing.
    """
    # Checksums of an incomplete checkpoint would fit it perfectly, so it is refused first.
    names = _names(folder)
    if (missing := _missing(names)) is not None:
        raise ValueError(f"{missing} is missing: it was not written whole")
    sums = {name: _sha256(folder / name) for name in names}
    (folder / NAME).write_text(json.dumps(sums, indent=1) + "\n")


def find_damage(folder: pathlib.Path, contents: bool = True) -> str | None:
    """Returns the damage to the files of `folder`, or None if they are as they were written.

    Args:
      folder: folder of the checkpoint.
      contents: False only checks that all files exist.
    """
    try:
        sums = json.loads((folder / NAME).read_text())
        # In the order of cost: names first, then the contents of each file.
        there = _names(folder)
        for name in sums.keys() - set(there):
            return f"{name} is missing"
        for name in there:
            if name not in sums:
                return f"{name} is not in {NAME}"
            if contents and _sha256(folder / name) != sums[name]:
                return f"{name} is not as it was written"
        if (missing := _missing(there)) is not None:
            return f"{missing} is missing"
    except FileNotFoundError:
        return f"{NAME} is missing"
    # The file of checksums may be damaged itself: no JSON, or JSON that is no object.
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _missing(names: Collection[str]) -> str | None:
    return next((needed for needed in _NEEDED if not fnmatch.filter(names, needed)), None)


def _names(folder: pathlib.Path) -> list[str]:
    # Files directly in the folder are left out: Orbax still changes them when it commits.
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.glob("*/**/*") if path.is_file()
    )


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

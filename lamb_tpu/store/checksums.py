"""Checksums of a checkpoint's files, stored in the checkpoint; Orbax has none for array values.

On a disk they are SHA-256 sums. In a bucket they are the MD5 sums that the bucket computes, so that
nothing is read back. Both types are accepted on a disk and in a bucket, so a checkpoint may be copied.
"""

import fnmatch
import hashlib
import json
import pathlib
from collections.abc import Collection

from lamb_tpu.files import buckets, reading

NAME = "sha256.json"
IN_BUCKET = "md5.json"
_COMMITTED = "commit_success.txt"  # written last by Orbax
# Files of a complete checkpoint. Orbax first writes the shards of each process; merging them
# creates the manifest and d/.
_NEEDED = ("position/data.json", "state/_METADATA", "state/manifest.ocdbt", "state/d/*")


def write(folder: pathlib.Path) -> None:
    """Writes the checksums of a checkpoint's files; raises a ValueError if the checkpoint is incomplete."""
    # The checksums of an incomplete checkpoint would match its files, so reject it first.
    there = _files(folder)
    if (missing := _missing(there)) is not None:
        raise ValueError(f"{missing} is missing: the checkpoint is incomplete")
    if buckets.is_remote(folder):
        name, sums = IN_BUCKET, {n: md5 or _digest(folder / n, "md5") for n, md5 in there.items()}
    else:
        name, sums = NAME, {n: _digest(folder / n, "sha256") for n in there}
    (folder / name).write_text(json.dumps(sums, indent=1) + "\n")


def find_damage(folder: pathlib.Path, contents: bool = True) -> str | None:
    """Returns a description of damage to a checkpoint; None if it is intact.

    Without `contents`, checks only that all files exist.
    """
    try:
        if buckets.is_remote(folder) and not is_committed(folder):
            return f"{_COMMITTED} is missing"
        kind = "md5" if (folder / IN_BUCKET).exists() else "sha256"
        file = IN_BUCKET if kind == "md5" else NAME
        try:
            sums = reading.read_json(folder / file)
        except ValueError as error:
            return f"{file} cannot be read: {error}"
        if not isinstance(sums, dict):
            return f"{file} is not a JSON object"
        # Cheapest first: names, then the contents of each file.
        there = _files(folder)
        for name in sums.keys() - set(there):
            return f"{name} is missing"
        for name, md5 in there.items():
            if name not in sums:
                return f"{name} is not in {file}"
            known = md5 if kind == "md5" else None
            if contents and (known or _digest(folder / name, kind)) != sums[name]:
                return f"{name} has changed since it was written"
        if (missing := _missing(there)) is not None:
            return f"{missing} is missing"
    except FileNotFoundError:
        return f"{file} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _missing(names: Collection[str]) -> str | None:
    return next((needed for needed in _NEEDED if not fnmatch.filter(names, needed)), None)


def is_committed(folder: pathlib.Path) -> bool:
    """Returns whether a folder in a bucket is a complete checkpoint.

    On a disk, renaming marks a complete checkpoint, but an object store cannot rename.
    """
    return folder.name.isdecimal() and (folder / _COMMITTED).exists()


def _files(folder: pathlib.Path) -> dict[str, str | None]:
    """Returns the files in subfolders of `folder`, with their MD5 sums if known."""
    # Files directly in the folder are omitted: Orbax still changes them when it commits.
    if buckets.is_remote(folder):
        return {name: md5 for name, md5 in sorted(buckets.sums(folder).items()) if "/" in name}
    return dict.fromkeys(
        sorted(
            path.relative_to(folder).as_posix() for path in folder.glob("*/**/*") if path.is_file()
        )
    )


def _digest(path: pathlib.Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()

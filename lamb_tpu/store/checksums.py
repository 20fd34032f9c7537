"""Checksums of a checkpoint's files, kept inside it; Orbax has none for the values of arrays.

On a disk they are SHA-256, computed from what was written. In a bucket they are the MD5 that the
bucket has computed itself, so that no checkpoint is read back. A checkpoint may be copied from one
to the other: either file serves in both.
"""

import fnmatch
import hashlib
import json
import pathlib
from collections.abc import Collection

from lamb_tpu.files import buckets

NAME = "sha256.json"
IN_BUCKET = "md5.json"
_COMMITTED = "commit_success.txt"  # which Orbax writes last
# Files of a complete checkpoint. Orbax first writes each process' part of the state; the merge
# creates the manifest and d/.
_NEEDED = ("position/data.json", "state/_METADATA", "state/manifest.ocdbt", "state/d/*")


def write(folder: pathlib.Path) -> None:
    """Writes the checksum of every file in the folders below `folder` into a file there.

    That is sha256.json, and md5.json in a bucket.

    Raises:
      ValueError: a file that is needed to read the checkpoint is missing.
    """
    # Checksums of an incomplete checkpoint would fit it perfectly, so it is refused first.
    there = _files(folder)
    if (missing := _missing(there)) is not None:
        raise ValueError(f"{missing} is missing: it was not written whole")
    if buckets.is_remote(folder):
        name, sums = IN_BUCKET, {n: md5 or _digest(folder / n, "md5") for n, md5 in there.items()}
    else:
        name, sums = NAME, {n: _digest(folder / n, "sha256") for n in there}
    (folder / name).write_text(json.dumps(sums, indent=1) + "\n")


def find_damage(folder: pathlib.Path, contents: bool = True) -> str | None:
    """Returns the damage to the files of `folder`, or None if they are as they were written.

    Args:
      folder: folder of the checkpoint.
      contents: False only checks that all files exist.
    """
    try:
        if buckets.is_remote(folder) and not is_committed(folder):
            return f"{_COMMITTED} is missing"
        kind = "md5" if (folder / IN_BUCKET).exists() else "sha256"
        file = IN_BUCKET if kind == "md5" else NAME
        sums = json.loads((folder / file).read_text())
        # In the order of cost: names first, then the contents of each file.
        there = _files(folder)
        for name in sums.keys() - set(there):
            return f"{name} is missing"
        for name, md5 in there.items():
            if name not in sums:
                return f"{name} is not in {file}"
            known = md5 if kind == "md5" else None
            if contents and (known or _digest(folder / name, kind)) != sums[name]:
                return f"{name} is not as it was written"
        if (missing := _missing(there)) is not None:
            return f"{missing} is missing"
    except FileNotFoundError:
        return f"{file} is missing"
    # The file of checksums may be damaged itself: no JSON, or JSON that is no object.
    except (OSError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _missing(names: Collection[str]) -> str | None:
    return next((needed for needed in _NEEDED if not fnmatch.filter(names, needed)), None)


def is_committed(folder: pathlib.Path) -> bool:
    """Returns whether a folder in a bucket is a checkpoint that was saved to its end.

    On a disk the name of the folder tells, but an object store cannot rename.
    """
    return folder.name.isdecimal() and (folder / _COMMITTED).exists()


def _files(folder: pathlib.Path) -> dict[str, str | None]:
    """Returns the files in the folders below `folder`, with their MD5 where it is known."""
    # Files directly in the folder are left out: Orbax still changes them when it commits.
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

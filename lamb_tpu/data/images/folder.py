"""Images in a plain folder: DIR/SPLIT/CLASS/NAME.JPEG, or listed in DIR/labels.tsv."""

import functools
import hashlib
import os
import pathlib
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lamb_tpu.data.images import headers, layout
from lamb_tpu.data.images.records import Record
from lamb_tpu.data.splits import slices
from lamb_tpu.errors import UserError, listed, reason, unreadable
from lamb_tpu.files import reading

LABELS = "labels.tsv"
_SHOWN = 5  # names in a message
_SAMPLED = 1000  # files whose rotation tag is read at the start
_HEAD_BYTES = 2**18  # bytes read from the start of these files; only in WebP may the tag come later
_MAX_FILE_BYTES = 2**29  # bytes of an encoded image
_Splits = dict[str, list[tuple[str, int]]]  # split -> (path below the folder, label) of each image


class FolderRecords:
    """`Records` of the images in a folder DIR.

    If DIR/labels.tsv exists, it lists the examples in order: a line of column names, then a line
    for each example. Columns are separated by tabs. The columns `file` (path below DIR) and `label` (class
    index) are required, `split` is optional, and other columns are ignored. Without the column
    `split`, all examples are in the split `train`. A list may be untrusted, so every file must be
    in DIR after links are resolved.

    Otherwise the folders in DIR are the splits, and the folders in a split are the classes. If the
    folders in DIR contain no folders, they are the classes of the only split, `train`. An image may
    be in a subfolder of its class, see `layout`. Classes are numbered by their sorted names over
    all splits together, so that labels do not shift in a split that lacks a class. Images are the
    files with a usual suffix of JPEG, PNG, WebP or BMP, and files with another suffix whose content
    begins like one of these formats; they are sorted by name.

    Args:
      root: the folder DIR.
      split: TFDS split syntax, such as `train` or `train[:10%]`.
      num_classes: number of classes; 0 counts them (with labels.tsv: the largest label plus one).
      skip: whether to leave out wrong lines of the list and to accept classes without an image, with
        a note; if False, they raise a UserError.
      holdout: if above 0, the fraction of the split, less than 1, that is used for evaluation and
        not for training. The choice depends only on the paths of the images.
      training: whether the split is for training.

    Attributes, besides those of `Records`:
      faults: the notes about wrong lines of the list and classes without an image. The other notes are about
        skipped files, rotation tags and an unusual layout.

    Raises:
      UserError: the folder, the split or the list is not as described.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str,
        num_classes: int = 0,
        skip: bool = False,
        holdout: float = 0.0,
        training: bool = True,
    ) -> None:
        self._root = pathlib.Path(root)
        if not self._root.is_dir():
            problem = "is not a folder"
            raise UserError("config.data.dir", self._root, problem, "give a folder of images")
        # Ends with a separator, so that DIR2 is not taken for a folder in DIR.
        self._real_root = os.path.join(os.path.realpath(self._root), "")
        self._listed = (self._root / LABELS).exists()
        self._skip = skip
        self._faults, self._remarks = list[str](), list[str]()
        read = self._read_list if self._listed else self._list_folders
        splits, self.num_classes = read(split, num_classes)
        if "all" in splits:
            problem = "has a split called 'all', which in TFDS syntax means all splits together"
            raise UserError(self._root, ..., problem, "rename the split")
        for name, rows in splits.items():
            if not rows and not self._listed:
                remedy = "; ".join([*self._remarks, "use another split"])
                raise UserError(self._root, ..., f"has no image in its split {name!r}", remedy)
        ranges = slices(str(self._root), split, {name: len(rows) for name, rows in splits.items()})
        chosen = [row for name, start, stop in ranges for row in splits[name][start:stop]]
        # Training uses the rows outside the holdout, evaluation uses the rows in the holdout.
        if holdout:
            chosen = [row for row in chosen if (_uniform_hash(row[0]) < holdout) != training]
            if not chosen:
                use = "training" if training else "evaluation"
                problem = f"leaves no image of {self._root} for {use}"
                remedy = "use another fraction, or a split for evaluation"
                raise UserError("config.data.options.holdout", holdout, problem, remedy)
        self._paths = [path for path, _ in chosen]
        self._labels = np.array([label for _, label in chosen], np.int32)
        self._remark_rotated()
        self.faults = tuple(self._faults)
        self.notes = (*self._faults, *self._remarks)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads examples, see `Records`; a file that cannot be read gives a record with a problem."""
        return [self._read(self._paths[index], int(self._labels[index])) for index in indices]

    def name(self, index: int) -> str:
        return str(self._root / self._paths[index])

    def _read(self, path: str, label: int) -> Record:
        try:
            return Record(reading.read_bytes(self._file(path), _MAX_FILE_BYTES), label)
        except (OSError, ValueError) as error:  # ValueError: a pipe or a device, for example
            return Record(b"", label, reason(error))

    def _file(self, path: str) -> str:
        """Returns a file's full path; raises a ValueError if a listed link leads out of the folder."""
        full = os.path.join(self._root, path)
        if self._listed and os.path.islink(full) and not self._holds(os.path.realpath(full)):
            raise ValueError("it is a link to a file outside the folder")
        return full

    def _read_list(self, split: str, num_classes: int) -> tuple[_Splits, int]:
        del split
        path = self._root / LABELS
        splits: _Splits = {}
        wrong, outside, greatest = [], [], -1
        # Cached, because many files are in the same folder.
        is_inside = functools.cache(self._is_inside)
        for row in _rows(path):
            text = row["label"].strip()
            # `int` alone would accept signs, underscores and digits of other scripts.
            label = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
            rows = splits.setdefault(row.get("split", layout.ONLY_SPLIT), [])
            if label < 0 or (num_classes and label >= num_classes):
                wrong.append(f"{row['file']} has {text!r}")
                continue
            # Only folders are checked here, because a list can have a million files in a few
            # folders. Files that are links are checked when they are read.
            if not is_inside(os.path.dirname(row["file"])) or "\0" in row["file"]:
                outside.append(repr(row["file"]))
                continue
            greatest = max(greatest, label)
            rows.append((row["file"], label))
        classes = num_classes or greatest + 1
        valid = (
            f"in the range 0 to {num_classes - 1}" if num_classes else "whole numbers of at least 0"
        )
        for bad, problem in (
            (wrong, f"has {len(wrong):,} label(s) that are not {valid}"),
            (outside, f"names {len(outside):,} file(s) that are not in {self._root}"),
        ):
            self._object(bad, f"{path} {problem}", "these examples are left out")
        return splits, classes

    def _is_inside(self, folder: str) -> bool:
        try:
            return self._holds(os.path.realpath(os.path.join(self._root, folder)))
        except (OSError, ValueError):  # the name has a NUL, or is too long
            return False

    def _holds(self, path: str) -> bool:
        return os.path.join(path, "").startswith(self._real_root)

    def _list_folders(self, split: str, num_classes: int) -> tuple[_Splits, int]:
        # Lists only the requested splits in full: ImageNet has over a million files. The split
        # 'train[:10%]+val' in TFDS syntax requests train and val.
        names = list(dict.fromkeys(each.partition("[")[0].strip() for each in split.split("+")))
        dir_layout = layout.find_layout(self._root)
        missing = [name for name in names if name not in dir_layout.classes]
        if missing:
            problem = f"has no folder {missing[0]!r} for the split {split!r}, and no {LABELS}"
            known = sorted(dir_layout.classes) or ["a folder with images"]
            remedy = f"use {listed(known)}{layout.where_images_are(self._root)}"
            raise UserError(self._root, ..., problem, remedy)
        classes = self._classes(dir_layout, names)
        if num_classes and num_classes < len(classes):
            problem = f"is less than the {len(classes)} class folders in {self._root}"
            remedy = f"use 0 or at least {len(classes)}"
            raise UserError("config.data.options.num_classes", num_classes, problem, remedy)
        splits = {}
        for name in names:
            folder = dir_layout.folders[name]
            files = [layout.list_files(folder / each) for each in classes]
            prefix = "" if folder == self._root else f"{name}/"
            splits[name] = [
                (f"{prefix}{each}/{file}", label)
                for label, each in enumerate(classes)
                for file in files[label].images
            ]
            self._remark_files(folder, classes, files)
            empty = [each for each, listing in zip(classes, files) if not listing.images]
            # If all classes are empty, the caller raises a better error.
            self._object(
                empty if splits[name] else [],
                f"{folder} has no image of {len(empty):,} of {len(classes):,} classes",
                "the other classes keep their labels",
            )
        return splits, num_classes or len(classes)

    def _classes(self, dir_layout: layout.FolderLayout, names: list[str]) -> list[str]:
        """Returns the classes of all splits, sorted; `names` are the requested splits."""
        unsorted = {name: layout.unsorted_folder(dir_layout, name) for name in dir_layout.classes}
        for name, folder in unsorted.items():
            if folder is None:
                continue
            problem = f"the split {name!r} has no image"
            if layout.has_image(folder):
                problem = f"the images of the split {name!r} are in {folder}, which is not a class"
            if name in names:
                listing = self._root / LABELS
                remedy = f"move the images to {folder.parent}/CLASS, or list them in {listing}"
                raise UserError(self._root, ..., f": {problem}", remedy)
            self._remarks.append(f"{self._root}: {problem}, so this split is not read")
        with_classes = [name for name, folder in unsorted.items() if folder is None]
        # Sorted, because the order of a folder's entries varies between machines.
        classes = sorted({each for name in with_classes for each in dir_layout.classes[name]})
        if not classes:
            has = ", ".join(sorted(dir_layout.classes))
            remedy = f"use DIR/SPLIT/CLASS or DIR/CLASS{layout.where_images_are(self._root)}"
            raise UserError(self._root, ..., f"has no class folders in {has}", remedy)
        if len(classes) == 1:
            self._remarks.append(
                f"{self._root}: all images are of one class, {classes[0]!r}; config.data.dir may "
                f"be one level too high or too low: {layout.LAYOUTS}"
            )
        return classes

    def _remark_files(
        self, folder: pathlib.Path, classes: list[str], files: list[layout.Files]
    ) -> None:
        """Adds remarks on skipped files, and on images deep in or outside the class folders."""
        skipped = sum((each.skipped for each in files), Counter[str]())
        if skipped:
            self._remarks.append(
                f"{folder}: skipped {skipped.total():,} file(s) that are not "
                f"{listed(headers.FORMATS)}: {layout.describe_skipped(skipped)}"
            )
        deep = [
            f"{name}/{image}"
            for name, each in zip(classes, files)
            for image in each.images
            if "/" in image
        ]
        if deep:
            self._remarks.append(
                f"{folder}: {len(deep):,} image(s) are in subfolders of their class, "
                f"such as {deep[0]}; each belongs to the class of its outermost folder in {folder}"
            )
        if outside := layout.direct_images(folder):
            self._remarks.append(f"{folder}: skipped {outside:,} image(s) outside class folders")

    def _remark_rotated(self) -> None:
        # Reading a million headers would delay the start, so a sample is checked here. The run
        # counts the rotated images that it reads, and `images.check` counts all rotated images.
        sampled = np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int)).tolist()
        rotated = sum(headers.is_rotated(self._head(self._paths[index])) for index in sampled)
        if rotated:
            of = "" if len(sampled) == len(self) else f" sampled from {len(self):,}"
            self._remarks.append(
                f"{self._root}: {rotated:,} of {len(sampled):,} images{of} have an EXIF "
                "rotation tag, which is ignored: images are not rotated"
            )

    def _head(self, path: str) -> bytes:
        """Returns the first bytes of a file, or all of a WebP file; b"" if the file cannot be read."""
        try:
            with reading.open_file(self._file(path)) as file:
                head = file.read(_HEAD_BYTES)
                is_webp = headers.image_format(head[: headers.NUM_BYTES]) == "WebP"
                return head + file.read(_MAX_FILE_BYTES) if is_webp else head
        except (OSError, ValueError):
            return b""

    def _object(self, wrong: list[str], problem: str, consequence: str) -> None:
        """Raises a UserError if there are wrong entries; with `skip`, adds a note instead."""
        if not wrong:
            return
        more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        names = f"{', '.join(wrong[:_SHOWN])}{more}"
        if not self._skip:
            remedy = "correct this, or set config.data.options.on_bad_record='skip'"
            raise UserError(problem, ..., f": {names}", remedy)
        self._faults.append(f"{problem}: {names}; {consequence}")


def split_names(root: str | os.PathLike[str]) -> list[str]:
    """Returns the splits of a folder for `FolderRecords`, in the order of labels.tsv or by name."""
    path = pathlib.Path(root)
    if not (path / LABELS).exists():
        return sorted(layout.find_layout(path).classes)
    return list(dict.fromkeys(row.get("split", layout.ONLY_SPLIT) for row in _rows(path / LABELS)))


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns column -> text for each example that labels.tsv lists."""
    try:
        # File names may have any bytes. Only "\n" ends a line, because a name may contain another
        # Unicode line separator.
        text = reading.read_text(path, errors="surrogateescape")
    except ValueError as error:
        raise unreadable(path, error, "correct the list") from None
    lines = text.split("\n")
    columns = lines[0].split("\t") if lines[0] else []
    for wanted in ("file", "label"):
        if wanted not in columns:
            has = ", ".join(columns) or "none"
            problem = f"has no column {wanted!r} in its first line, which has {has}"
            raise UserError(path, ..., problem, "add this column")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        row = dict(zip(columns, line.split("\t")))
        if len(row) < len(columns):
            problem = f"has {len(row)} columns, but the first line has {len(columns)}"
            raise UserError(f"{path}, line {number},", ..., problem, "give every line all columns")
        rows.append(row)
    return rows


def _uniform_hash(path: str) -> float:
    """Returns a pseudo-random number in [0, 1) that depends only on the path."""
    # A float64 holds 48 bits exactly.
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:6], "big") / 2**48

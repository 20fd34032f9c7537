"""Pictures in a plain folder: DIR/SPLIT/CLASS/NAME.JPEG, or listed in DIR/labels.tsv."""

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
from lamb_tpu.errors import UserError
from lamb_tpu.files import reading

LABELS = "labels.tsv"
_SHOWN = 5  # names in a message
_LOOKED_AT = 1000  # files whose rotation tag is read at the start
_HEAD_BYTES = 2**18  # of these files, which hold the tag except in a WebP


class FolderRecords:
    """`Records` of files in a folder.

    If DIR/labels.tsv exists, it lists the examples in order: a line of column names, then a line
    for each example, separated by tabs. The columns `file` (below DIR) and `label` (class index)
    are required, `split` is optional, and others are ignored. Without the column `split` all
    examples are in the split `train`. A list may be untrusted, so every file must lie in DIR after
    links are followed.

    Otherwise the folders in DIR are the splits, and their folders are the classes. If they have no
    folders, they are the classes of the only split, `train`. An image may lie deeper and belongs to
    the class of the first folder, see `layout`. Class indices follow the sorted names over all
    splits together, so that labels do not shift in a split that lacks a class. Files are those with
    a usual ending of JPEG, PNG, WebP or BMP, and all others that begin as one, sorted by name.

    Args:
      root: the folder DIR.
      split: TFDS split syntax, such as `train` or `train[:10%]`.
      num_classes: number of classes; 0 counts those that are found (in labels.tsv: the largest
        label plus one).
      skip: leave out labels out of range and classes without a file, with a note, instead of
        rejecting them.
      holdout: share of the split, in [0, 1), that is excluded from training and evaluated; 0
        excludes nothing. The choice depends on the names only.
      training: whether the split is for training.

    Attributes, besides those of `Records`:
      faults: those of the notes that are about wrong labels and classes without an image. Others
        are about skipped files, rotation tags and an unusual layout.

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
            raise UserError(f"config.data.dir={self._root} is no folder")
        # With a separator at the end, so that DIR does not hold DIR2.
        self._real_root = os.path.join(os.path.realpath(self._root), "")
        self._listed = (self._root / LABELS).exists()
        self._skip = skip
        self._faults: list[str] = []
        self._remarks: list[str] = []
        read = self._read_list if self._listed else self._list_folders
        splits, self.num_classes = read(split, num_classes)
        if "all" in splits:
            raise UserError(
                f"{self._root} has a split called 'all', which in TFDS syntax means all splits "
                "together; call it something else"
            )
        for name, part in splits.items():
            if not part and not self._listed:
                raise UserError(
                    f"{self._root} has no image in its split {name!r}"
                    f"{'; '.join(['', *self._remarks])}"
                )
        parts = slices(str(self._root), split, {name: len(part) for name, part in splits.items()})
        chosen = [row for name, start, stop in parts for row in splits[name][start:stop]]
        # Training takes the rows outside of the holdout, evaluation those in it.
        if holdout:
            chosen = [row for row in chosen if (_place(row[0]) < holdout) != training]
            if not chosen:
                raise UserError(
                    f"config.data.options.holdout={holdout} leaves no picture of {self._root} to "
                    f"{'train on' if training else 'evaluate'}; give another share, or a split"
                )
        self._paths = [path for path, _ in chosen]
        self._labels = np.array([label for _, label in chosen], np.int32)
        self._remark_rotated()
        self.faults = tuple(self._faults)
        self.notes = (*self._faults, *self._remarks)

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads examples, see `Records`; a file that cannot be read is a record with a problem."""
        return [self._read(self._paths[index], int(self._labels[index])) for index in indices]

    def name(self, index: int) -> str:
        """Returns the file's path."""
        return str(self._root / self._paths[index])

    def _read(self, path: str, label: int) -> Record:
        full = os.path.join(self._root, path)
        try:
            if self._listed and os.path.islink(full) and not self._holds(os.path.realpath(full)):
                return Record(b"", label, "it is a link to a file outside of the folder")
            with open(full, "rb") as file:
                return Record(file.read(), label)
        except OSError as error:
            return Record(b"", label, error.strerror or str(error))

    def _read_list(
        self, split: str, num_classes: int
    ) -> tuple[dict[str, list[tuple[str, int]]], int]:
        del split
        path = self._root / LABELS
        splits: dict[str, list[tuple[str, int]]] = {}
        wrong, outside, greatest = [], [], -1
        # Each folder is looked up once.
        is_inside = functools.cache(self._is_inside)
        for row in _rows(path):
            text = row["label"].strip()
            # `int` by itself would accept signs, underscores and digits of other scripts.
            label = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
            rows = splits.setdefault(row.get("split", layout.WHOLE), [])
            if label < 0 or (num_classes and label >= num_classes):
                wrong.append(f"{row['file']} has {text!r}")
                continue
            # Only folders are checked here, because a list can have a million files in a few
            # folders. Links among the files are checked when they are read.
            if not is_inside(os.path.dirname(row["file"])) or "\0" in row["file"]:
                outside.append(repr(row["file"]))
                continue
            greatest = max(greatest, label)
            rows.append((row["file"], label))
        classes = num_classes or greatest + 1
        self._object(
            wrong,
            f"{path} has {len(wrong):,} labels out of the range 0 to {classes - 1}",
            "these examples are left out",
        )
        self._object(
            outside,
            f"{path} names {len(outside):,} files that do not lie in {self._root}",
            "these examples are left out",
        )
        return splits, classes

    def _is_inside(self, folder: str) -> bool:
        try:
            return self._holds(os.path.realpath(os.path.join(self._root, folder)))
        except (OSError, ValueError):  # a name with a NUL, or too long a name
            return False

    def _holds(self, path: str) -> bool:
        return os.path.join(path, "").startswith(self._real_root)

    def _list_folders(
        self, split: str, num_classes: int
    ) -> tuple[dict[str, list[tuple[str, int]]], int]:
        # Only requested splits are listed completely: ImageNet has over a million files.
        # Names of the splits in TFDS syntax: 'train[:10%]+val' has train and val.
        names = list(dict.fromkeys(part.partition("[")[0].strip() for part in split.split("+")))
        found = layout.find_layout(self._root)
        missing = [name for name in names if name not in found.classes]
        if missing:
            raise UserError(
                f"{self._root} has no folder {missing[0]!r} for the split {split!r}; it has "
                f"{', '.join(sorted(found.classes)) or 'none'}, and no {LABELS}"
                f"{layout.where_images_are(self._root)}"
            )
        classes = self._classes(found, names)
        if num_classes and num_classes < len(classes):
            raise UserError(
                f"config.data.options.num_classes is {num_classes}, {self._root} has folders of "
                f"{len(classes)} classes"
            )
        splits = {}
        for name in names:
            folder = found.folders[name]
            files = [
                layout.list_files(folder / each)
                if (folder / each).is_dir()
                else layout.Files([], Counter())
                for each in classes
            ]
            prefix = "" if folder == self._root else f"{name}/"
            splits[name] = [
                (f"{prefix}{each}/{file}", label)
                for label, each in enumerate(classes)
                for file in files[label].images
            ]
            self._remark_files(folder, classes, files)
            empty = [each for each, inside in zip(classes, files) if not inside.images]
            # If all are, the caller says more.
            self._object(
                empty if splits[name] else [],
                f"{folder} has no picture of {len(empty):,} of {len(classes):,} classes",
                "the other classes keep their labels",
            )
        return splits, num_classes or len(classes)

    def _classes(self, found: layout.Layout, names: list[str]) -> list[str]:
        """Returns the classes of all splits, sorted; `names` are the requested splits."""
        apart = {name: layout.unsorted_folder(found, name) for name in found.classes}
        for name, folder in apart.items():
            if folder is None:
                continue
            told = f"the split {name!r} has no image"
            if layout.has_image(folder):
                told = f"the images of the split {name!r} lie in {folder}, which names no class"
            if name in names:
                raise UserError(
                    f"{self._root}: {told}; move images to {folder.parent}/CLASS, or list them "
                    f"with their labels in {self._root / LABELS}, or choose another split"
                )
            self._remarks.append(f"{self._root}: {told}, so this split is not read")
        # Sorted, because the order of a folder's entries differs between machines.
        classes = sorted(
            {
                each
                for name, inside in found.classes.items()
                if apart[name] is None
                for each in inside
            }
        )
        if not classes:
            listed = ", ".join(sorted(found.classes))
            raise UserError(
                f"{self._root} has no folders of classes in {listed}"
                f"{layout.where_images_are(self._root)}"
            )
        if len(classes) == 1:
            self._remarks.append(
                f"{self._root}: all images are of one class, {classes[0]!r}; config.data.dir may "
                f"be one level too high or too low: {layout.LAYOUTS}"
            )
        return classes

    def _remark_files(
        self, folder: pathlib.Path, classes: list[str], files: list[layout.Files]
    ) -> None:
        """Remarks on skipped files, and on images that lie deeper than in their class or outside.

        Args:
          folder: the folder of the classes.
          classes, files: names and files of the classes.
        """
        skipped = sum((each.skipped for each in files), Counter[str]())
        if skipped:
            self._remarks.append(
                f"{folder}: skipped {skipped.total():,} file(s) that are not "
                f"{', '.join(headers.FORMATS[:-1])} or {headers.FORMATS[-1]}: "
                f"{layout.describe_skipped(skipped)}"
            )
        deep = [
            f"{name}/{image}"
            for name, each in zip(classes, files)
            for image in each.images
            if "/" in image
        ]
        if deep:
            self._remarks.append(
                f"{folder}: {len(deep):,} image(s) lie deeper than in the folder of their class, "
                f"such as {deep[0]}; each belongs to the class of the first folder in {folder}"
            )
        if outside := layout.direct_images(folder):
            self._remarks.append(
                f"{folder}: skipped {outside:,} image(s) that lie outside of the folders of classes"
            )

    def _remark_rotated(self) -> None:
        # Reading a million headers would delay the start, so many files are sampled; the run
        # counts those that it reads, and `images.check` all.
        looked_at = np.unique(np.linspace(0, len(self) - 1, _LOOKED_AT).astype(int)).tolist()
        rotated = sum(headers.is_rotated(self._head(self._paths[index])) for index in looked_at)
        if rotated:
            of = "" if len(looked_at) == len(self) else f" (of {len(self):,}) that were looked at"
            self._remarks.append(
                f"{self._root}: {rotated:,} of {len(looked_at):,} images{of} have an EXIF "
                "rotation tag, which is ignored: the stored rows are read as they are"
            )

    def _head(self, path: str) -> bytes:
        """Returns the first bytes of a file; none if it cannot be read."""
        full = os.path.join(self._root, path)
        try:
            if self._listed and os.path.islink(full) and not self._holds(os.path.realpath(full)):
                return b""
            with open(full, "rb") as file:
                head = file.read(_HEAD_BYTES)
                is_webp = headers.image_format(head[: headers.NUM_BYTES]) == "WebP"
                return head + file.read() if is_webp else head
        except (OSError, ValueError):  # a name with a NUL
            return b""

    def _object(self, wrong: list[str], told: str, consequence: str) -> None:
        """Refuses wrong entries, or with `skip` notes them; does nothing if there are none."""
        if not wrong:
            return
        more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
        text = f"{told}: {', '.join(wrong[:_SHOWN])}{more}"
        if not self._skip:
            raise UserError(
                f"{text}; mend that, or go on without with config.data.options.on_bad_record='skip'"
            )
        self._faults.append(f"{text}; {consequence}")


def split_names(root: str | os.PathLike[str]) -> list[str]:
    """Returns the splits of a folder for `FolderRecords`, in the order of its list or of names.

    Raises:
      UserError: labels.tsv is malformed, see `FolderRecords`.
    """
    path = pathlib.Path(root)
    if not (path / LABELS).exists():
        return sorted(layout.find_layout(path).classes)
    return list(dict.fromkeys(row.get("split", layout.WHOLE) for row in _rows(path / LABELS)))


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns column -> text for each line of a labels.tsv."""
    try:
        lines = reading.read_text(path, errors="replace").splitlines()
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    columns = lines[0].split("\t") if lines else []
    for wanted in ("file", "label"):
        if wanted not in columns:
            raise UserError(
                f"{path} has no column {wanted!r} in its first line, which has "
                f"{', '.join(columns) or 'none'}"
            )
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        row = dict(zip(columns, line.split("\t")))
        if len(row) < len(columns):
            raise UserError(
                f"{path}, line {number}, has {len(row)} columns, the first has {len(columns)}"
            )
        rows.append(row)
    return rows


def _place(path: str) -> float:
    """Returns a pseudo-random number in [0, 1) that depends on the name only."""
    # 48 bits, which a float64 holds exactly.
    return int.from_bytes(hashlib.sha256(os.fsencode(path)).digest()[:6], "big") / 2**48

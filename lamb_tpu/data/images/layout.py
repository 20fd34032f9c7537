"""Layouts of a folder of images: its splits, its classes, and the files of each class.

Two layouts are supported: DIR/SPLIT/CLASS/... and DIR/CLASS/... with the only split `train`. As in
torchvision and timm, the outermost folder within the split is an image's class, however deep the
image is: Tiny ImageNet has train/CLASS/images/*.JPEG.
"""

import os
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from lamb_tpu.data.images import headers
from lamb_tpu.errors import UserError, listed, unreadable
from lamb_tpu.files import reading

ONLY_SPLIT = "train"  # the only split of a folder without splits
# Common names of splits, the most likely first.
TRAINED = ("train", "training")
EVALUATED = ("val", "valid", "validation", "eval", "dev", "test", "testing")
# Files with these suffixes are not opened for a check: ImageNet would need a million reads.
_SUFFIXES = (".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib")
# Folders that hold all images of a class or split, and are not classes themselves.
_CONTAINERS = ("images", "image", "imgs", "img", "jpegimages", "photos", "pictures", "data")
# System folders, which may hold copies and thumbnails of images.
_OF_SYSTEMS = ("__MACOSX", "@eaDir", "lost+found")
_NO_SUFFIX = "without an extension"
LAYOUTS = "the supported layouts are DIR/SPLIT/CLASS/... and DIR/CLASS/..."


class FolderLayout(NamedTuple):
    """The splits of a folder."""

    classes: dict[str, list[str]]  # split -> names of its class folders
    folders: dict[str, pathlib.Path]  # split -> the folder that contains its class folders


class Files(NamedTuple):
    """The files of a class."""

    images: list[str]  # paths below the class's folder, sorted
    skipped: Counter[str]  # suffix -> number of files that are not supported images


def find_layout(root: pathlib.Path) -> FolderLayout:
    """Finds the splits and classes of a folder.

    Raises a UserError if the folder has files but no image, or if the splits are one level too deep.
    """
    if not has_image(root) and (skipped := list_files(root).skipped):
        problem = f"has no image that can be read, only {describe_skipped(skipped)}"
        raise UserError(root, ..., problem, f"use {listed(headers.FORMATS)}")
    tree = {name: folders(root / name) for name in folders(root)}
    inner = {name for names in tree.values() for name in names}
    if not any(map(_is_split, tree)):
        if inner and all(map(_is_split, inner)):
            deep = root / min(name for name in tree if tree[name])
            problem = f"has the splits {', '.join(sorted(inner))} one level deeper, in {deep}"
            raise UserError(root, ..., problem, f"give config.data.dir={deep}, because {LAYOUTS}")
        # Classes have images, either directly or in a folder that is not a class.
        leaves = [root / name for name, names in tree.items() if not names]
        flat = all(map(_is_container, inner)) and any(has_image(root / name) for name in tree)
        if flat or any(map(has_image, leaves)):
            return FolderLayout({ONLY_SPLIT: list(tree)}, {ONLY_SPLIT: root})
    elif not inner and not all(map(_is_split, tree)) and any(has_image(root / n) for n in tree):
        return FolderLayout({ONLY_SPLIT: list(tree)}, {ONLY_SPLIT: root})  # one class may be "test"
    return FolderLayout(tree, {name: root / name for name in tree})


def unsorted_folder(layout: FolderLayout, split: str) -> pathlib.Path | None:
    """Returns a split's only folder if it is not a class, such as val/images; otherwise None."""
    names = layout.classes[split]
    if len(names) == 1 and _is_container(names[0]):
        others = [other for name, other in layout.classes.items() if name != split]
        if not any(names[0] in other for other in others if len(other) > 1):
            return layout.folders[split] / names[0]
    return None


def list_files(folder: pathlib.Path) -> Files:
    """Lists the images of a class and counts the other files; includes subfolders."""
    found = list(_walk(folder)) if folder.is_dir() else []
    others = (os.path.splitext(name)[1].lower() for name, is_image in found if not is_image)
    images = sorted(name for name, is_image in found if is_image)
    return Files(images, Counter(suffix or _NO_SUFFIX for suffix in others))


def has_image(folder: pathlib.Path) -> bool:
    """Returns whether a folder or one of its subfolders has an image."""
    return first_image(folder) is not None


def first_image(folder: pathlib.Path) -> str | None:
    """Returns the path of any image in a folder or its subfolders; None if there is none."""
    if not folder.is_dir():
        return None
    return next((str(folder / name) for name, is_image in _walk(folder) if is_image), None)


def where_images_are(root: pathlib.Path) -> str:
    """Returns the end of an error message: the path of an image, and the supported layouts."""
    image = first_image(root)
    return "" if image is None else f"; an image is at {image}, and {LAYOUTS}"


def direct_images(folder: pathlib.Path) -> int:
    """Returns the number of images directly in the folder."""
    return sum(e.name.lower().endswith(_SUFFIXES) and not e.is_dir() for e in _scan(folder))


def describe_skipped(skipped: Counter[str]) -> str:
    """Formats the counts, most frequent first: '8 .webp, 4 .bmp'."""
    # Equal counts are sorted by name, because the order of a folder's entries varies.
    ordered = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {suffix}" for suffix, count in ordered)


def folders(path: pathlib.Path) -> list[str]:
    """Returns the names of the folders in a folder."""
    return [entry.name for entry in _scan(path) if entry.is_dir()]


def _scan(path: str | pathlib.Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder, without hidden entries and system folders."""
    try:
        with os.scandir(path) as entries:
            return [
                entry
                for entry in entries
                if not entry.name.startswith(".") and entry.name not in _OF_SYSTEMS
            ]
    except OSError as error:
        raise unreadable(f"the folder {path}", error, "make it readable") from None


def _walk(folder: pathlib.Path) -> Iterator[tuple[str, bool]]:
    """Yields (path below the folder, whether it is an image) of each file, in arbitrary order."""
    # Links to folders are followed, but each folder is listed only once, so a loop of links ends.
    seen, pending = {os.path.realpath(folder)}, [""]
    while pending:
        below = pending.pop()
        for entry in _scan(os.path.join(folder, below)):
            name = below + entry.name
            # Links to files are not resolved here: that would take a system call for each link.
            is_known = entry.name.lower().endswith(_SUFFIXES)
            # A pipe or device with such a suffix is listed too: reading it gives a bad record.
            if is_known and not entry.is_dir(follow_symlinks=False):
                yield name, True
            elif entry.is_dir():
                real = os.path.realpath(entry.path)
                if real not in seen:
                    seen.add(real)
                    pending.append(f"{name}/")
            else:
                yield name, _is_image(entry)


def _is_image(entry: os.DirEntry[str]) -> bool:
    try:
        with reading.open_file(entry.path) as file:
            return headers.image_format(file.read(headers.NUM_BYTES)) in headers.FORMATS
    except (OSError, ValueError):  # it is a pipe, or cannot be read
        return False


def _is_split(name: str) -> bool:
    return name.lower() in TRAINED + EVALUATED


def _is_container(name: str) -> bool:
    return name.lower() in _CONTAINERS

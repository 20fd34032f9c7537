"""Layouts of a folder of images: its splits, its classes, and the files of each class.

Two layouts are read: DIR/SPLIT/CLASS/... and DIR/CLASS/... with the only split `train`. As in
torchvision and timm, an image belongs to the class of the first folder, however deep it lies in
there: Tiny ImageNet has train/CLASS/images/*.JPEG.
"""

import os
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from lamb_tpu.data.images import headers
from lamb_tpu.errors import UserError

WHOLE = "train"  # the only split of a folder without splits
# Common names of splits, the likelier first.
TRAINED = ("train", "training")
EVALUATED = ("val", "valid", "validation", "eval", "dev", "test", "testing")
# Files with these endings are taken without a look inside, which would cost a million reads.
_SUFFIXES = (".jpeg", ".jpg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".dib")
# Folders that hold the images of one class or split, and are no classes themselves.
_CONTAINERS = ("images", "image", "imgs", "img", "jpegimages", "photos", "pictures", "data")
# Folders of systems, which may hold copies and thumbnails.
_OF_SYSTEMS = ("__MACOSX", "@eaDir", "lost+found")
_NO_SUFFIX = "without an extension"
LAYOUTS = "DIR/SPLIT/CLASS/... and DIR/CLASS/... are read"


class Layout(NamedTuple):
    """The splits of a folder.

    Attributes:
      classes: split -> names of its class folders.
      folders: split -> the folder that has them.
    """

    classes: dict[str, list[str]]
    folders: dict[str, pathlib.Path]


class Files(NamedTuple):
    """The files of a class.

    Attributes:
      images: paths below the class's folder, sorted.
      skipped: extension -> number of files that are not images that can be read.
    """

    images: list[str]
    skipped: Counter[str]


def find_layout(root: pathlib.Path) -> Layout:
    """Finds the splits and classes of a folder.

    Raises:
      UserError: the folder has files but no image, the splits lie one level deeper, or a folder
        cannot be read.
    """
    if not has_image(root) and (skipped := list_files(root).skipped):
        raise UserError(
            f"{root} has no image that can be read ({', '.join(headers.FORMATS)}); its files are "
            f"{describe_skipped(skipped)}"
        )
    found = {name: folders(root / name) for name in folders(root)}
    inner = {name for names in found.values() for name in names}
    if not any(map(_is_split, found)):
        if inner and all(map(_is_split, inner)):
            deep = root / min(name for name in found if found[name])
            raise UserError(
                f"{root} has the splits {', '.join(sorted(inner))} one level deeper, in {deep}; "
                f"{LAYOUTS}, so give config.data.dir={deep}"
            )
        # Classes have images in them, or in a folder that is no class.
        leaves = [root / name for name, names in found.items() if not names]
        flat = all(map(_is_container, inner)) and any(has_image(root / name) for name in found)
        if flat or any(map(has_image, leaves)):
            return Layout({WHOLE: list(found)}, {WHOLE: root})
    elif not inner and not all(map(_is_split, found)) and any(has_image(root / n) for n in found):
        return Layout({WHOLE: list(found)}, {WHOLE: root})  # a class may be called test
    return Layout(found, {name: root / name for name in found})


def unsorted_folder(layout: Layout, split: str) -> pathlib.Path | None:
    """Returns the only folder of a split if it is no class, such as val/images; else None."""
    names = layout.classes[split]
    if len(names) == 1 and _is_container(names[0]):
        others = [other for name, other in layout.classes.items() if name != split]
        if not any(names[0] in other for other in others if len(other) > 1):
            return layout.folders[split] / names[0]
    return None


def list_files(folder: pathlib.Path) -> Files:
    """Lists the images of a class and counts the other files, in its folders too.

    Raises:
      UserError: a folder cannot be read.
    """
    images, skipped = [], Counter[str]()
    for name, is_image in _walk(folder):
        if is_image:
            images.append(name)
        else:
            skipped[os.path.splitext(name)[1].lower() or _NO_SUFFIX] += 1
    return Files(sorted(images), skipped)


def has_image(folder: pathlib.Path) -> bool:
    """Returns whether a folder or one below it has an image."""
    return first_image(folder) is not None


def first_image(folder: pathlib.Path) -> str | None:
    """Returns the path of some image in a folder or below it; None if there is none."""
    if not folder.is_dir():
        return None
    return next((str(folder / name) for name, is_image in _walk(folder) if is_image), None)


def where_images_are(root: pathlib.Path) -> str:
    """Returns the path of an image and the layouts, for the end of an error message."""
    found = first_image(root)
    return "" if found is None else f"; an image was found at {found}, and {LAYOUTS}"


def direct_images(folder: pathlib.Path) -> int:
    """Returns the number of images that lie in the folder itself."""
    return sum(
        entry.name.lower().endswith(_SUFFIXES) and not entry.is_dir() for entry in _scan(folder)
    )


def describe_skipped(skipped: Counter[str]) -> str:
    """Returns the counts as text, most frequent first: '8 .webp, 4 .bmp'."""
    # Equal counts by name, because folders are listed in no order.
    ordered = sorted(skipped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {suffix}" for suffix, count in ordered)


def folders(path: pathlib.Path) -> list[str]:
    """Returns the names of the folders in a folder."""
    return [entry.name for entry in _scan(path) if entry.is_dir()]


def _scan(path: str | pathlib.Path) -> list[os.DirEntry[str]]:
    """Returns the entries of a folder, but for those of tools and systems."""
    try:
        with os.scandir(path) as entries:
            return [
                entry
                for entry in entries
                if not entry.name.startswith(".") and entry.name not in _OF_SYSTEMS
            ]
    except OSError as error:
        raise UserError(f"the folder {path} cannot be read ({error.strerror})") from None


def _walk(folder: pathlib.Path) -> Iterator[tuple[str, bool]]:
    """Yields (path below the folder, whether it is an image) of each file, in no order."""
    # Links to folders are followed, but each folder is listed once, so a loop of links ends.
    seen, pending = {os.path.realpath(folder)}, [""]
    while pending:
        below = pending.pop()
        for entry in _scan(os.path.join(folder, below)):
            name = below + entry.name
            # Links to files are not followed here: that would cost a look at each file.
            is_known = entry.name.lower().endswith(_SUFFIXES)
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
    """Returns whether a file begins as an image that can be read."""
    if not entry.is_file():  # a pipe may block
        return False
    try:
        with open(entry.path, "rb", buffering=0) as file:
            return headers.image_format(file.read(headers.NUM_BYTES)) in headers.FORMATS
    except OSError:
        return False


def _is_split(name: str) -> bool:
    return name.lower() in TRAINED + EVALUATED


def _is_container(name: str) -> bool:
    return name.lower() in _CONTAINERS

"""Survey of a folder of images: its splits, its classes and the size of the images."""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from lamb_tpu.data.images.folder import FolderRecords, split_names
from lamb_tpu.data.images.jpeg import BadImage, image_size
from lamb_tpu.data.images.layout import EVALUATED, TRAINED, has_image, where_images_are
from lamb_tpu.errors import UserError, listed

_SAMPLED = 200  # images whose size is read


class Survey(NamedTuple):
    """A summary of a folder of images."""

    train_split: str
    eval_split: str  # the training split if there is no other split
    num_examples: int  # of the training split
    num_classes: int  # as `folder.FolderRecords` counts them
    side: int  # median of the images' shorter sides, in pixels


def survey(root: str | os.PathLike[str]) -> Survey:
    """Surveys a folder of images for `folder.FolderRecords`.

    Raises a UserError if the splits cannot be chosen by name, or if no sampled image can be read.
    """
    root = pathlib.Path(root)
    names = split_names(root)
    # A split without images cannot be evaluated; `FolderRecords` reports it.
    used = [name for name in names if not (root / name).is_dir() or has_image(root / name)]
    names = used or names
    train = _chosen(names, TRAINED) or (names[0] if len(names) == 1 else "")
    # The split for evaluation has a common name, or is the only other split.
    others = [name for name in names if name != train]
    evaluated = _chosen(others, EVALUATED) or (others[0] if len(others) == 1 else "")
    if not train or (others and not evaluated):
        wanted = listed(EVALUATED if train else TRAINED)
        problem = f"has no split called {wanted}{', only ' * bool(names)}{', '.join(names)}"
        raise UserError(root, ..., problem, f"rename or add a folder{where_images_are(root)}")
    records = FolderRecords(root, train, skip=True)
    # The sample is spread over the full list, because neighbours belong to the same class.
    sampled = np.unique(np.linspace(0, len(records) - 1, _SAMPLED).astype(int))
    sides = []
    for record in (records.read([index])[0] for index in sampled.tolist()):
        try:
            sides.append(min(image_size(record.content)))
        except BadImage:
            continue  # the run will report it by name
    if not sides:
        raise UserError(root, ..., f"has no image in {train} that can be read", "add images")
    return Survey(
        train_split=train,
        eval_split=evaluated or train,
        num_examples=len(records),
        num_classes=records.num_classes,
        side=int(np.median(sides)),
    )


def _chosen(names: list[str], known: tuple[str, ...]) -> str:
    # Reversed, so that the first of several names that differ only in case is used.
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in known if name in lower), "")

"""Survey of a folder of pictures: its splits, its classes and the size of the pictures."""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from lamb_tpu.data.images.folder import FolderRecords, split_names
from lamb_tpu.data.images.jpeg import BadImage, picture_size
from lamb_tpu.data.images.layout import EVALUATED, TRAINED, has_image, where_images_are
from lamb_tpu.errors import UserError

_LOOKED_AT = 200  # pictures whose size is read


class Survey(NamedTuple):
    """A folder of pictures.

    Attributes:
      train_split: name of the split for training.
      eval_split: name of the split for evaluation; the same if there is only one split.
      num_examples: number of pictures in the split for training.
      num_classes: number of classes, as `folder.FolderRecords` counts them.
      side: median of the pictures' shorter sides, in pixels.
    """

    train_split: str
    eval_split: str
    num_examples: int
    num_classes: int
    side: int


def survey(root: str | os.PathLike[str]) -> Survey:
    """Surveys a folder of pictures for `folder.FolderRecords`.

    Raises:
      UserError: it is not such a folder, the split for training or evaluation cannot be chosen by
        name, or none of the sampled pictures can be read.
    """
    root = pathlib.Path(root)
    names = split_names(root)
    # A split without an image cannot be evaluated; `FolderRecords` remarks on it.
    used = [name for name in names if not (root / name).is_dir() or has_image(root / name)]
    names = used or names
    train = _chosen(names, TRAINED) or (names[0] if len(names) == 1 else "")
    # The split for evaluation has a common name, or is the only other one.
    others = [name for name in names if name != train]
    held = _chosen(others, EVALUATED) or (others[0] if len(others) == 1 else "")
    if not train or (others and not held):
        raise UserError(
            f"{root} has the splits {', '.join(names) or 'none'}, of which none is called "
            f"{' or '.join(EVALUATED if train else TRAINED)}; name them so, or make one of them"
            f"{where_images_are(root)}"
        )
    records = FolderRecords(root, train, skip=True)
    # Spread over the whole list, because neighbours are of one class.
    looked_at = np.unique(np.linspace(0, len(records) - 1, _LOOKED_AT).astype(int))
    sides = []
    for record in (records.read([index])[0] for index in looked_at.tolist()):
        try:
            sides.append(min(picture_size(record.content)))
        except BadImage:
            continue  # the run will report it by name
    if not sides:
        raise UserError(f"{root} has no picture in {train} that can be read")
    side = int(np.median(sides))
    return Survey(train, held or train, len(records), records.num_classes, side)


def _chosen(names: list[str], known: tuple[str, ...]) -> str:
    # Reversed, so that of names that differ only in case the first one is taken.
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in known if name in lower), "")

"""Survey of a folder of pictures: its splits, its classes and the size of the pictures."""

import os
from typing import NamedTuple

import numpy as np

from lamb_tpu.data.images.folder import FolderRecords, split_names
from lamb_tpu.data.images.jpeg import BadImage, picture_size
from lamb_tpu.errors import UserError

# What people call the pictures that a network is measured on, the likelier first.
_EVALUATED = ("val", "valid", "validation", "eval", "dev", "test", "testing")
_TRAINED = ("train", "training")
_LOOKED_AT = 200  # pictures whose size is read


class Survey(NamedTuple):
    """A folder of pictures.

    Attributes:
      train_split: the name of the split to train on.
      eval_split: of that to evaluate; the same where there is one split alone.
      num_examples: pictures of the first.
      num_classes: as `folder.FolderRecords` counts them.
      side: the median length of the shorter sides of its pictures, in pixels.
    """

    train_split: str
    eval_split: str
    num_examples: int
    num_classes: int
    side: int


def survey(root: str | os.PathLike[str]) -> Survey:
    """Looks at a folder such as `folder.FolderRecords` reads.

    Raises:
      UserError: it is none, it does not tell which split is to be trained on, or which of several
        others is to be evaluated, or none of the pictures looked at is one.
    """
    names = split_names(root)
    train = _chosen(names, _TRAINED) or (names[0] if len(names) == 1 else "")
    others = [name for name in names if name != train]
    held = _chosen(others, _EVALUATED) or (others[0] if len(others) == 1 else "")
    if not train or (others and not held):
        raise UserError(
            f"{root} has the splits {', '.join(names) or 'none'}, of which none is called "
            f"{' or '.join(_EVALUATED if train else _TRAINED)}; name them so, or make one of them"
        )
    records = FolderRecords(root, train, skip=True)
    looked_at = np.unique(np.linspace(0, len(records) - 1, _LOOKED_AT).astype(int))
    sides = []
    for record in (records.read([index])[0] for index in looked_at.tolist()):
        try:
            sides.append(min(picture_size(record.content)))
        except BadImage:
            continue  # the run tells it, by its name
    if not sides:
        raise UserError(f"{root} has no picture in {train} that can be read")
    side = int(np.median(sides))
    return Survey(train, held or train, len(records), records.num_classes, side)


def _chosen(names: list[str], known: tuple[str, ...]) -> str:
    lower = {name.lower(): name for name in reversed(names)}
    return next((lower[name] for name in known if name in lower), "")

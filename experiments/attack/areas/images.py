"""Image folders: damaged images, odd image sizes, odd names, and damaged lists of labels."""

import pathlib
import random

from experiments.attack.bases import SHORT, png
from experiments.attack.inputs import FOLDER, Input, damages

_CHECK = ["--dir=@/images"]
_TRAIN = [
    "--config=image_folder:dir=@/images,model=resnet18,batch=8",
    "--workdir=@/new",
    *SHORT,
    "--config.data.options.image_size=32",
    "--config.eval.batch_size=8",
]
_SIZES = (
    (0, 0),
    (1, 1),
    (2**31 - 1, 1),
    (1, 2**31 - 1),
    (9_999, 10_000),
    (40_000, 40_000),
    (2**31, 2**31),
    (3, 3),
    (65_535, 65_535),
)
_NAMES = (
    "images/train/cats/a\x1b[31mb\n.png",
    "images/train/cats/\udcff.png",
    "images/train/cats/" + "x" * 200 + ".png",
    "images/train/cats/..png",
    "images/train/cats/a\tb.png",
    "images/train/\x1b[2J/x.png",
    "images/train/cats/.hidden.png",
    "images/train/empty class/note.txt",
    "images/all/cats/x.png",
    "images/train/x.png",
)
_LISTS = {
    "byte-order mark": "\ufefffile\tlabel\ntrain/cats/00.png\t0\n",
    "no label": "file\ntrain/cats/00.png\n",
    "label that is a word": "file\tlabel\ntrain/cats/00.png\tcat\n",
    "label of 4,500 digits": f"file\tlabel\ntrain/cats/00.png\t{'9' * 4_500}\n",
    "10**12": "file\tlabel\ntrain/cats/00.png\t1000000000000\n",
    "negative": "file\tlabel\ntrain/cats/00.png\t-1\n",
    "path upward": "file\tlabel\n../../etc/passwd\t0\n",
    "absolute path": "file\tlabel\n/dev/zero\t0\n",
    "control characters": "file\tlabel\na\x1b[31mb\x00.png\t0\n",
    "missing file": "file\tlabel\ntrain/none.png\t0\n",
    "folder": "file\tlabel\ntrain/cats\t0\n",
    "no rows": "file\tlabel\n",
    "spaces": "file label\ntrain/cats/00.png 0\n",
    "further column": "file\tlabel\ntrain/cats/00.png\t0\t5\n",
    "twice": "file\tlabel\n" + "train/cats/00.png\t0\n" * 2,
    "split 'all'": "file\tlabel\tsplit\ntrain/cats/00.png\t0\tall\n",
    "digits that are not ASCII": "file\tlabel\ntrain/cats/00.png\t\u0661\n",
}


def draw(rng: random.Random, prepared: pathlib.Path) -> Input:
    """Damages an image or the list of labels, or adds an oddly named file."""
    number = rng.random()
    # Draw the image check more often than training, which compiles a network and decodes only crops.
    module, arguments = rng.choice([("data.images.check", _CHECK)] * 6 + [("train", _TRAIN)])
    ending = rng.choice(("00.png", "01.jpg"))
    if number < 0.5:
        name = f"images/train/cats/{ending}"
        change, content = damages(rng)
        location = ending
    elif number < 0.65:
        size = rng.choice(_SIZES)
        name, change, location = "images/train/cats/00.png", f"size {size[0]}x{size[1]}", "00.png"
        content = png(*size, bytes(min(size[0] * size[1] * 3 + size[1], 10**6)))
    elif number < 0.78:
        name = rng.choice(_NAMES)
        change, location = "odd name", ascii(name)[14:54]
        content = rng.choice((png(4, 4, bytes(52)), b"not an image", FOLDER))
    else:
        name, location = "images/labels.tsv", "labels.tsv"
        change, content = rng.choice([*_LISTS.items(), damages(rng)])
    return Input(
        "images",
        change,
        f"{module.partition('.')[0]} {location}",
        f"lamb_tpu.{module}",
        arguments,
        ["images"],
        {name: content},
        # If there are bad images, the image check lists them and ends with status 1.
        statuses=frozenset({1}) if arguments is _CHECK else frozenset(),
    )

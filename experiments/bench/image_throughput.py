"""Throughput of photographs on a core, from JPEG files to batches of uint8, beside other libraries.

  python -m experiments.bench.image_throughput --images=FOLDER --write

FOLDER holds JPEG files, at any depth. All routes (image_routes.py) take turns on one core in one
process; what counts is the time which that core works for this process, so that what else runs on
the machine matters little. Ours resizes bilinearly; with resize='bicubic', which the configs for
ImageNet have as their sources do, a core reads 0.6 times as many (on the photographs of the record,
both in one run: 0.58 to 0.64 in training, 0.62 to 0.70 in evaluation). Rows of PyTorch need
torchvision, those of tf.data TensorFlow; neither is a dependency of lamb_tpu.

The second table says how many cores of a host feed the eight cores of TPU v3 that it has. Sources
of their appetite, divided by the number of such hosts: EfficientNet-B2 and B5, 451.35
and 77.44 images/ms of 1,024 cores (arXiv:2011.00071, table 1, recalled and not read). ResNet-50,
480,000 images/s of 512 cores, told of a run of Google's code for MLPerf v0.6
(threadreaderapp.com/thread/1223395022814339073). EfficientNet-B0, 16,384 images in 23.6 ms on 1,024
cores by the TPU compiler's estimate, without the network, of a plain step: an upper bound.
"""

import functools
import importlib.metadata
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from absl import flags

from experiments.bench import image_routes
from experiments.bench.image_routes import NotInstalled, Route
from experiments.bench.text_throughput import core_seconds
from lamb_tpu import cli
from lamb_tpu.cluster.host import processor
from lamb_tpu.errors import UserError

_PIXELS = 224
# Model -> pixels, images a second of eight cores of TPU v3.
APPETITES = {
    "ResNet-50": (224, 480_000 / 64),
    "EfficientNet-B0": (224, 16_384 / 0.0236 / 128),
    "EfficientNet-B2": (260, 451_350 / 128),
    "EfficientNet-B5": (456, 77_440 / 128),
}
_PACKAGES = (
    "simplejpeg",
    "opencv-python-headless",
    "numpy",
    "Pillow",
    "torch",
    "torchvision",
    "tensorflow-cpu",
    "tensorflow",
)


def find_images(folder: str, most: int) -> list[str]:
    """JPEG files below a folder, in the order of their names, at most so many.

    Raises:
      UserError: there is none.
    """
    paths = sorted(
        str(path)
        for path in pathlib.Path(folder).expanduser().rglob("*")
        if path.suffix.lower() in (".jpeg", ".jpg")
    )
    if not paths:
        raise UserError(f"--images={folder} holds no JPEG files, which end in .JPEG or .jpg")
    return paths[:most]


def start(route: Route, *arguments: Any) -> Iterator[Any] | None:
    """The batches of a route after a first one, or None where a package is missing."""
    try:
        batches = route(*arguments)
        next(batches)
    except NotInstalled:
        return None
    return batches


def rates(
    routes: dict[Any, Iterator[Any] | None], batch: int, batches: int, rounds: int
) -> dict[Any, float | None]:
    """Images a second a core: the median over rounds in which the routes take turns."""

    def take(iterator: Iterator[Any]) -> None:
        for _ in range(batches):
            next(iterator)
        settle()

    settle()

    seconds: dict[Any, list[float]] = {key: [] for key, found in routes.items() if found}
    for _ in range(rounds):
        for key, times in seconds.items():
            times.append(core_seconds(lambda: take(routes[key])))
    return {
        key: batch * batches / statistics.median(seconds[key]) if found else None
        for key, found in routes.items()
    }


def settle() -> None:
    """Waits until no thread works: tf.data makes a batch ahead, which belongs to its own turn."""
    while core_seconds(lambda: time.sleep(0.05)) > 0.002:
        pass


def main() -> None:
    """Measures, prints the tables and writes them if asked."""
    values = flags.FLAGS
    paths = find_images(values.images, values.most)
    if hasattr(os, "sched_setaffinity"):  # before TensorFlow counts the cores
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    measured = values.batch, values.batches, values.rounds
    with tempfile.TemporaryDirectory() as folder:
        routes = {
            "ours, files": image_routes.ours,
            "ours, ArrayRecord": image_routes.ours_prepared(folder),
            "torchvision and Pillow, DataLoader": image_routes.torchvision,
            "tf.data": image_routes.tf_data,
            "tf.data, pictures decoded whole": functools.partial(image_routes.tf_data, whole=True),
        }
        compared = rates(
            {
                (name, training): start(route, paths, _PIXELS, values.batch, training)
                for name, route in routes.items()
                for training in (True, False)
            },
            *measured,
        )
        sizes = rates(
            {
                pixels: start(image_routes.ours, paths, pixels, values.batch, True)
                for pixels in sorted({pixels for pixels, _ in APPETITES.values()})
            },
            *measured,
        )
    lines = [
        f"{len(paths)} photographs, {sum(map(os.path.getsize, paths)) / len(paths) / 1e3:.1f} kB "
        f"on average; Python {platform.python_version()}, {_versions()}; {processor()}, one core "
        f"of {os.cpu_count()}. Medians of {values.rounds} rounds of {values.batches} batches of "
        f"{values.batch}, in time of the core.",
        "Command: `python -m experiments.bench.image_throughput --images=FOLDER "
        f"--batch={values.batch} --batches={values.batches} --rounds={values.rounds}`",
        *([values.note] if values.note else []),
        "",
        f"| images/s a core, {_PIXELS} pixels | training | of tf.data | evaluation | of tf.data |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in routes:
        cells = []
        for training in (True, False):
            rate, theirs = compared[name, training], compared["tf.data", training]
            cells.append(f"{rate:,.0f}" if rate else "not installed")
            cells.append(f"{rate / theirs:.2f}" if rate and theirs else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "| training | pixels | images/s of 8 cores of TPU v3 | images/s a core, ours | cores |",
        "|---|--:|--:|--:|--:|",
    ]
    for model, (pixels, wanted) in APPETITES.items():
        cores = wanted / sizes[pixels]
        lines.append(f"| {model} | {pixels} | {wanted:,.0f} | {sizes[pixels]:,.0f} | {cores:.1f} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


def _versions() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


if __name__ == "__main__":
    flags.DEFINE_string("images", None, "Folder with JPEG files.")
    flags.DEFINE_integer("most", 400, "Files to take.", lower_bound=1)
    flags.DEFINE_integer("batch", 64, "Images of a batch.", lower_bound=1)
    flags.DEFINE_integer("batches", 13, "Batches of a turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Turns of each route.", lower_bound=1)
    flags.DEFINE_string("note", "", "What else ran on the machine, for the table.")
    flags.DEFINE_bool("write", False, "Whether to write image_throughput.md beside this file.")
    cli.run_main(main, required=("images",))

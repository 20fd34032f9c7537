"""Throughput of photographs on one core, from JPEG files to uint8 batches: ours and other libraries'.

  python -m experiments.bench.image_throughput --images=FOLDER --write

FOLDER holds JPEG files at any depth. All routes (image_routes.py) alternate on one core in one process.
Times are CPU times of this process, so other load matters little. Our route resizes bilinearly. With
resize='bicubic', as in the ImageNet configs and their sources, a core reads 0.6 times as many images:
0.58 to 0.64 in training and 0.62 to 0.70 in evaluation. These ratios were measured by one run with the
two methods on the page's photographs. PyTorch's rows need torchvision, and tf.data's rows need
TensorFlow; lamb_tpu depends on neither.

The second table gives the number of CPU cores that feed a host's eight cores of TPU v3. Each
training rate is the rate of a slice, divided by the number of the slice's hosts:

- EfficientNet-B2 and B5: 451.35 and 77.44 images/ms on 1,024 cores (arXiv:2011.00071, table 1;
  quoted from memory);
- ResNet-50: 480,000 images/s on 512 cores, reported for a run of Google's MLPerf v0.6 code
  (threadreaderapp.com/thread/1223395022814339073);
- EfficientNet-B0: 16,384 images in 23.6 ms on 1,024 cores, the TPU compiler's estimate for a step
  without communication, and therefore an upper bound.
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
# Model -> (pixels, images per second that eight cores of TPU v3 train on).
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
    """Returns at most `most` JPEG files below a folder, sorted by path.

    Raises:
      UserError: the folder has no JPEG file.
    """
    paths = sorted(
        str(path)
        for path in pathlib.Path(folder).expanduser().rglob("*")
        if path.suffix.lower() in (".jpeg", ".jpg")
    )
    if not paths:
        remedy = "give a folder with photographs"
        raise UserError(f"--images={folder}", problem="has no .jpeg or .jpg files", remedy=remedy)
    return paths[:most]


def start(route: Route, *arguments: Any) -> Iterator[Any] | None:
    """Returns a route's batches after the first one, or None if a package is missing."""
    try:
        batches = route(*arguments)
        next(batches)
    except NotInstalled:
        return None
    return batches


def rates(
    routes: dict[Any, Iterator[Any] | None], batch: int, batches: int, rounds: int
) -> dict[Any, float | None]:
    """Returns each route's images per second on one core: the median of rounds; the routes alternate."""

    def take(iterator: Iterator[Any]) -> None:
        for _ in range(batches):
            next(iterator)
        settle()

    settle()

    seconds: dict[Any, list[float]] = {key: [] for key, route in routes.items() if route}
    for _ in range(rounds):
        for key, times in seconds.items():
            times.append(core_seconds(lambda: take(routes[key])))
    return {
        key: batch * batches / statistics.median(seconds[key]) if route else None
        for key, route in routes.items()
    }


def settle() -> None:
    """Waits until no thread works, so that the batch that tf.data prefetches counts in tf.data's turn."""
    while core_seconds(lambda: time.sleep(0.05)) > 0.002:
        pass


def main() -> None:
    """Measures, prints the tables, and writes them if --write is given."""
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
            "tf.data, images decoded in full": functools.partial(
                image_routes.tf_data, full_size=True
            ),
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
        f"of {os.cpu_count()}. Medians of {values.rounds} rounds with {values.batches} batches of "
        f"{values.batch} images each, in CPU time. The columns `/ tf.data` divide a rate by tf.data's.",
        "Command: `python -m experiments.bench.image_throughput --images=FOLDER "
        f"--batch={values.batch} --batches={values.batches} --rounds={values.rounds}`",
        *([values.note] if values.note else []),
        "",
        f"| images/s per core, {_PIXELS} pixels | training | / tf.data | evaluation | / tf.data |",
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
        "| model | pixels | images/s that 8 TPU v3 cores train on | images/s per CPU core, ours | "
        "CPU cores |",
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
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


if __name__ == "__main__":
    flags.DEFINE_string("images", None, "Folder with JPEG files.")
    flags.DEFINE_integer("most", 400, "Maximum number of files.", lower_bound=1)
    flags.DEFINE_integer("batch", 64, "Images per batch.", lower_bound=1)
    flags.DEFINE_integer("batches", 13, "Batches per turn.", lower_bound=1)
    flags.DEFINE_integer("rounds", 5, "Rounds; each route takes one turn per round.", lower_bound=1)
    flags.DEFINE_string("note", "", "Note for the page, such as other load on the machine.")
    flags.DEFINE_bool("write", False, "Whether to write image_throughput.md beside this file.")
    cli.run_main(main, required=("images",))

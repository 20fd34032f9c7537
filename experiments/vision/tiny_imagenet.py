"""ResNet-18 on 20 classes of Tiny ImageNet: LAMB against SGD with momentum, of the same length.

  python -m experiments.vision.tiny_imagenet --data_dir=DATA --runs=DIR
  python -m experiments.vision.tiny_imagenet --runs=DIR --train=false

DATA holds tiny_imagenet20.tar.xz, 10,000 pictures to train on and 1,000 to validate of 64x64, and
labels.tsv, which lists them; they are unpacked into DIR once. Each optimizer's rate is the best of
several in short runs of seed 0; the long runs have every seed. Both have the project's recipe of
their optimizer for ResNet (configs/imagenet_resnet.py), with one schedule, label smoothing and
group of BatchNorm for the two. Rates are chosen by the same validation pictures as are reported,
for both optimizers alike. Every cell is a resumable run in a workdir of its own below DIR. Records
go into tiny_imagenet.jsonl, the table and the picture into tiny_imagenet.md and tiny_imagenet.png,
in experiments/vision.

The defaults are for two cores of a CPU. On an accelerator --stem=cifar --pixels=56 --epochs=60 is
nearer to what these pictures deserve.
"""

import pathlib
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from configs import imagenet_resnet
from experiments import records as records_lib
from experiments.records import Record, Records
from experiments.vision import tiny_imagenet_page
from lamb_tpu import cli
from lamb_tpu.config import base_config
from lamb_tpu.data.images.folder import LABELS
from lamb_tpu.errors import UserError
from lamb_tpu.models.resnet import STEMS
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
ARCHIVE = "tiny_imagenet20.tar.xz"
NUM_CLASSES = 20
# Tried in short runs; the long ones go on with the one that won. Of momentum's first three the
# largest did, hence a fourth.
GRIDS = {"lamb": (0.005, 0.01, 0.02), "momentum": (0.05, 0.1, 0.2, 0.4)}


class Cell(NamedTuple):
    """One run of the study."""

    optimizer: str
    rate: float
    epochs: int
    batch: int
    pixels: int
    stem: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def tuning_cells(epochs: int, batch: int, pixels: int, stem: str) -> list[Cell]:
    """The short runs that choose the rates."""
    return [
        Cell(optimizer, rate, epochs, batch, pixels, stem, 0)
        for optimizer, grid in GRIDS.items() for rate in grid
    ]


def cells(
    rates: Mapping[str, float], epochs: int, batch: int, pixels: int, stem: str,
    seeds: Iterable[int],
) -> list[Cell]:
    """The long runs; the optimizers take turns, so that a study broken off can be compared."""
    return [
        Cell(optimizer, rate, epochs, batch, pixels, stem, seed)
        for seed in seeds for optimizer, rate in rates.items()
    ]


def unpack(source: pathlib.Path, target: pathlib.Path) -> None:
    """Unpacks the archive in `source` and puts its list beside the pictures, where not yet done.

    Raises:
      UserError: the archive or the list is not there, or damaged.
    """
    if target.exists():
        return
    for name in (ARCHIVE, LABELS):
        if not (source / name).is_file():
            raise UserError(f"--data_dir {source} has no {name}; give the folder that has")
    # By rename, so that what is there is whole.
    unfinished = target.with_name(target.name + ".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with tarfile.open(source / ARCHIVE) as archive:
            archive.extractall(unfinished, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{source / ARCHIVE} cannot be unpacked: {error}") from error
    shutil.copy(source / LABELS, unfinished / LABELS)
    unfinished.rename(target)


def make_config(cell: Cell, pictures: str | None) -> ConfigDict:
    """The recipe of one cell, on the folder that `unpack` has made."""
    config = imagenet_resnet.get_config(
        f"size=18,optimizer={cell.optimizer},batch={cell.batch}"
    )
    config.seed = cell.seed
    config.duration = f"{cell.epochs} epochs"
    config.data.name, config.data.dir = "image_folder", pictures
    config.data.options.update({
        "size": cell.pixels, "min_area": 0.25, "min_covered": 0.1, "resize": "bilinear",
    })
    config.task.label_smoothing = 0.1
    config.model.update({
        "num_classes": NUM_CLASSES, "stem": cell.stem, "dtype": "float32",
        "group_size": min(128, cell.batch),
    })
    config.optimizer.learning_rate = cell.rate
    config.schedule = base_config().schedule
    config.schedule.update({"warmup": "10 percent", "decay": "polynomial"})
    config.eval.batch_size = 500
    config.eval.every = "1 epochs"
    config.checkpoint.every, config.checkpoint.keep = "20 percent", 1
    config.log.every = "10 steps"
    return config


def collect(runs: pathlib.Path, wanted: Iterable[Cell]) -> list[Record]:
    """One record for each complete run of `wanted` below `runs`."""
    found = []
    for cell in wanted:
        evaluations = records_lib.evaluations(runs / cell.name)
        if not evaluations or evaluations[-1]["epoch"] < cell.epochs:
            continue
        last = evaluations[-1]
        found.append({
            **cell._asdict(),
            "updates": last["step"],
            "accuracy": last["accuracy"],
            "top5_accuracy": last["top5_accuracy"],
            "loss": last["loss"],
            "curve": [[round(e["epoch"], 2), e["accuracy"]] for e in evaluations],
            **records_lib.facts(runs / cell.name),
        })
    return found


def main() -> None:
    """Runs the missing cells and writes the page."""
    values = flags.FLAGS
    runs, seeds = pathlib.Path(values.runs).expanduser(), records_lib.integers("seeds")
    pictures = runs / "pictures"
    if values.train:
        if values.data_dir is None:
            raise UserError(f"--data_dir is missing; give the folder with {ARCHIVE}")
        unpack(pathlib.Path(values.data_dir).expanduser(), pictures)

    def run(cell: Cell, folder: pathlib.Path) -> None:
        train(make_config(cell, str(pictures)), folder, label=cell.name)

    def run_missing(wanted: list[Cell]) -> None:
        records_lib.run_missing(wanted, records, runs, collect, run if values.train else None)

    records = Records(FOLDER / "tiny_imagenet.jsonl", Cell._fields)
    size = values.batch, values.pixels, values.stem
    tuning = tuning_cells(values.tuning_epochs, *size)
    run_missing(tuning)
    rates = records_lib.best_rates(records, tuning, lambda record: -record["accuracy"])
    wanted = cells(rates, values.epochs, *size, seeds)
    run_missing(wanted)
    shown = records.of(wanted)
    if {record["optimizer"] for record in shown} != set(GRIDS):
        raise UserError(f"--runs {runs} lacks complete long runs; run them without --train=false")
    text = tiny_imagenet_page.page(shown, records.of(tuning), GRIDS)
    (FOLDER / "tiny_imagenet.md").write_text(text)
    tiny_imagenet_page.draw(shown, FOLDER / "tiny_imagenet.png")
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/tiny_imagenet", "Folder with one workdir a run.")
    flags.DEFINE_string("data_dir", None, f"Folder with {ARCHIVE} and {LABELS}.")
    flags.DEFINE_integer("batch", 256, "Pictures an update.", lower_bound=2)
    flags.DEFINE_integer("pixels", 64, "Height and width of a crop.", lower_bound=8)
    flags.DEFINE_enum("stem", "imagenet", STEMS, "First layers, see lamb_tpu.models.resnet.")
    flags.DEFINE_integer("epochs", 10, "Of the long runs.", lower_bound=1)
    flags.DEFINE_integer("tuning_epochs", 2, "Of the runs that choose the rates.", lower_bound=1)
    flags.DEFINE_list("seeds", ["0", "1"], "Seeds of the long runs.")
    flags.DEFINE_bool("train", True, "Whether to train what is missing before collecting.")
    cli.run_main(main)

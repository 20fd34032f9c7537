"""EfficientNet-B0 and ResNet-50 memorise 400 photographs of ImageNet, from JPEGs to top-1.

  python -m experiments.vision.photographs --data_dir=DATA --runs=DIR
  python -m experiments.vision.photographs --runs=DIR --train=false

So few pictures, one for each class, say nothing about ImageNet. A run shows that the whole path
works on real photographs: files, decoding, random crops and flips, uint8 to the device,
normalisation there, the networks, RMSProp for EfficientNet and LAMB for ResNet-50, BatchNorm's
running averages and evaluation. DATA has the JPEGs and labels.tsv with their ImageNet labels. A run
ends at the first evaluation with over 90 % of the 400 central crops right among 1,000 classes, or
after its epochs. Everything else is as in the project's recipes for the networks, except what
hinders memorising: label smoothing, dropout, stochastic depth, AutoAugment, averages of weights,
crops of less than half a picture. Each network is a resumable run in a workdir of its own below
DIR. Records go into photographs.jsonl, the table and the picture into photographs.md and
photographs.png, in experiments/vision.
"""

import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from configs import imagenet_efficientnet, imagenet_resnet
from experiments import records as records_lib
from experiments.records import Record, Records
from experiments.vision import photographs_page
from lamb_tpu import cli
from lamb_tpu.config import base_config
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
NUM_PHOTOGRAPHS = 400
# Peak rates, of RMSProp and of LAMB. The first is that of the network's recipe, 0.016 for 256
# examples, carried to 25 of them.
RATES = {"efficientnet_b0": 0.0016, "resnet50": 0.01}
TARGET = 361 / NUM_PHOTOGRAPHS  # the first accuracy above 0.9
EPOCHS_BETWEEN_EVALUATIONS = 4


class Cell(NamedTuple):
    """One run of the study."""

    network: str
    pixels: int
    batch: int
    rate: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def make_config(cell: Cell, data_dir: str | None) -> ConfigDict:
    """The recipe of one cell."""
    if cell.network == "resnet50":
        config = imagenet_resnet.get_config("size=50")
        config.optimizer = ConfigDict({
            "name": "lamb", "weight_decay": 0.01, "rules": "no_bias_no_norm",
        })
    else:
        config = imagenet_efficientnet.get_config("size=b0,augment=none")
        config.model.update({"dropout_rate": 0.0, "stochastic_depth_rate": 0.0})
        config.ema.decay = 0.0
    config.seed = cell.seed
    config.batch_size = cell.batch
    config.duration = f"{cell.epochs} epochs"
    config.data.name, config.data.dir = "image_folder", data_dir
    config.data.train_split = config.data.eval_split = "train"
    # The TPU code's centre for EfficientNet would be 0.69 of the side at 72 pixels, much less than
    # the training sees.
    config.data.options.update({
        "resize": "bilinear",
        "size": cell.pixels, "min_area": 0.5, "central_fraction": 0.875, "num_classes": 1000,
    })
    config.task.label_smoothing = 0.0
    # The running averages have to keep up with few updates.
    config.model.update({"dtype": "float32", "group_size": cell.batch, "momentum": 0.9})
    config.optimizer.learning_rate = cell.rate
    config.schedule = base_config().schedule
    config.schedule.update({"warmup": "5 percent", "decay": "polynomial"})
    config.eval.batch_size = 100
    config.eval.every = f"{EPOCHS_BETWEEN_EVALUATIONS} epochs"
    config.target.metric, config.target.value = "accuracy", TARGET
    config.checkpoint.every, config.checkpoint.keep = config.eval.every, 1
    config.log.every = "1 epochs"
    return config


def collect(runs: pathlib.Path, wanted: Iterable[Cell]) -> list[Record]:
    """One record for each complete run of `wanted` below `runs`."""
    found = []
    for cell in wanted:
        folder = runs / cell.name
        evaluations = records_lib.evaluations(folder)
        if not evaluations:
            continue
        last = evaluations[-1]
        reached = read_records(folder / "metrics.jsonl", "target")
        if not reached and last["epoch"] < cell.epochs:
            continue
        trained = read_records(folder / "metrics.jsonl", "train")
        pictures = read_records(folder / "metrics.jsonl", "pictures")
        found.append({
            **cell._asdict(),
            "updates": last["step"],
            "ended_epoch": round(last["epoch"], 2),
            "accuracy": last["accuracy"],
            "top5_accuracy": last["top5_accuracy"],
            "loss": last["loss"],
            "train_accuracy": trained[-1]["accuracy"],
            "reached": bool(reached),
            "grey": pictures[-1].get("train_grey", 0) if pictures else None,
            "curve": [[round(e["epoch"], 2), e["accuracy"]] for e in evaluations],
            "train_curve": [[round(t["epoch"], 2), round(t["accuracy"], 4)] for t in trained],
            **records_lib.facts(folder),
        })
    return found


def main() -> None:
    """Runs the missing cells and writes the page."""
    values = flags.FLAGS
    networks = records_lib.choices("networks", RATES)
    if values.train and values.data_dir is None:
        raise UserError("--data_dir is missing; give the folder with the JPEGs and labels.tsv")
    wanted = [
        Cell(network, values.pixels, values.batch, RATES[network], values.epochs, values.seed)
        for network in networks
    ]

    def run(cell: Cell, folder: pathlib.Path) -> None:
        train(make_config(cell, values.data_dir), folder, label=cell.name)

    records = Records(FOLDER / "photographs.jsonl", Cell._fields)
    runs = pathlib.Path(values.runs).expanduser()
    records_lib.run_missing(wanted, records, runs, collect, run if values.train else None)
    shown = records.of(wanted)
    if not shown:
        raise UserError(f"--runs {runs} holds no complete run of this kind, and no record is there")
    text = photographs_page.page(shown)
    (FOLDER / "photographs.md").write_text(text)
    photographs_page.draw(shown, FOLDER / "photographs.png")
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/photographs", "Folder with one workdir a run.")
    flags.DEFINE_string("data_dir", None, "Folder with the JPEGs and labels.tsv.")
    flags.DEFINE_list("networks", list(RATES), "Networks to train.")
    flags.DEFINE_integer("pixels", 72, "Height and width of a crop.", lower_bound=32)
    flags.DEFINE_integer("batch", 25, "Photographs an update.", lower_bound=2)
    flags.DEFINE_integer("epochs", 60, "At most.", lower_bound=EPOCHS_BETWEEN_EVALUATIONS)
    flags.DEFINE_integer("seed", 0, "Seed.")
    flags.DEFINE_bool("train", True, "Whether to train what is missing before collecting.")
    cli.run_main(main)

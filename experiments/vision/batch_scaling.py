"""Batch scaling of DavidNet on CIFAR-10: LAMB, LARS and momentum from batch 512 to 16,384.

  python -m experiments.vision.batch_scaling --runs=DIR
  python -m experiments.vision.batch_scaling --runs=DIR --data=cifar10_jpeg --data_dir=FOLDER \
      --width=8 --epochs=5 --batches=512,2048,16384
  python -m experiments.vision.batch_scaling --runs=DIR --train=false

All runs have the same number of epochs, by configs/cifar10.py: its warm-up's share of the run, its
decay and its rule for carrying the rate from batch 512 to larger ones, in microbatches of 512. The
rate at 512 is the best of three, the recipe's and half and twice that, by runs of a quarter of the
length on nine tenths of the training pictures, measured on the other tenth. A smaller --width is
for machines without an accelerator. Every cell is a resumable run in a workdir of its own below
DIR; those with a record are not run again. Records go into batch_scaling.jsonl, the table and the
picture into batch_scaling.md and batch_scaling.png, in experiments/vision. The page shows the study
of one network and length, that of the flags.
"""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict

from configs import cifar10 as recipe
from experiments.records import Record, Records, best_rates, choices, integers, run_missing
from experiments.vision import batch_scaling_page, cifar10
from lamb_tpu import cli
from lamb_tpu.errors import UserError

FOLDER = pathlib.Path(__file__).parent
BATCHES = (512, 1024, 2048, 4096, 8192, 16_384)
BASE_BATCH = 512  # of the recipe's rates; and a microbatch, which is a group of BatchNorm there
FACTORS = (0.5, 1.0, 2.0)  # times the recipe's rate
WIDTH = 64  # of both networks' first convolution, as published
SPLITS = {"test": ("train", "test"), "held_out": ("train[:90%]", "train[90%:]")}


class Setting(NamedTuple):
    """Settings that all runs of a study share."""

    data: str
    model: str
    width: int
    epochs: float


class Cell(NamedTuple):
    """One run of the study; `measured_on` is a key of SPLITS."""

    data: str
    model: str
    width: int
    epochs: float
    optimizer: str
    batch: int
    rate: float
    measured_on: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def tuning_cells(setting: Setting, optimizers: Iterable[str]) -> list[Cell]:
    """The runs at the base batch that choose the rates."""
    short = setting._replace(epochs=setting.epochs / 4)
    return [
        Cell(*short, optimizer, BASE_BATCH, factor * rate, "held_out", 0)
        for optimizer in optimizers
        for rate in [recipe.OPTIMIZERS[optimizer][0]["learning_rate"]]
        for factor in FACTORS
    ]


def cells(
    setting: Setting, rates: Mapping[str, float], batches: Iterable[int], seeds: Iterable[int]
) -> list[Cell]:
    """Returns all runs of the study, with each optimizer's rate at the base batch."""
    found = [
        Cell(*setting, optimizer, batch, rate, "test", seed)
        for seed in seeds for optimizer, rate in rates.items() for batch in batches
    ]
    # The large batches first: they are what the study is about, and none waits for another.
    return sorted(found, key=lambda cell: (cell.seed, -cell.batch))


def make_config(cell: Cell, data_dir: str | None) -> ConfigDict:
    """The recipe of one cell."""
    argument = f"model={cell.model},optimizer={cell.optimizer},batch={cell.batch}"
    config = cifar10.make_config(argument, cell.data, data_dir, cell.epochs, cell.seed)
    config.data.train_split, config.data.eval_split = SPLITS[cell.measured_on]
    config.accumulation_steps = cell.batch // BASE_BATCH
    config.optimizer.learning_rate = cell.rate
    if "width" in config.model:
        config.model.width = cell.width
    config.eval.every = "25 percent"
    return config


def cost(record: Record) -> float:
    """Returns the number that the chosen rate minimises."""
    return math.inf if record["accuracy"] is None else -record["accuracy"]


def study(
    setting: Setting,
    optimizers: Sequence[str],
    batches: Sequence[int],
    seeds: Sequence[int],
    runs: pathlib.Path,
    data_dir: str | None,
    training: bool = True,
) -> str:
    """Runs the missing cells, writes records, page and picture; returns the page.

    Raises:
      UserError: a batch, the width or the data is wrong, or without `training` there is nothing to
        show.
    """
    for batch in batches:
        if batch < 1 or batch % BASE_BATCH:
            raise UserError(f"--batches has {batch}; each must be a multiple of {BASE_BATCH}")
    if setting.model != "davidnet" and setting.width != WIDTH:
        raise UserError(
            f"--width is {setting.width}, and only --model=davidnet has one; leave it out"
        )

    def run(cell: Cell, folder: pathlib.Path) -> None:
        cifar10.run(make_config(cell, data_dir), folder)

    records = Records(FOLDER / "batch_scaling.jsonl", Cell._fields)
    how = records, runs, cifar10.collect, run if training else None
    tuning = tuning_cells(setting, optimizers)
    run_missing(tuning, *how)
    rates = best_rates(records.of(tuning), tuning, cost)
    wanted = cells(setting, rates, batches, seeds)
    run_missing(wanted, *how)
    found = records.of(wanted)
    if not found:
        raise UserError(
            f"--runs {runs} holds no complete run of the study; run it without --train=false"
        )
    text = batch_scaling_page.page(found, records.of(tuning))
    (FOLDER / "batch_scaling.md").write_text(text)
    batch_scaling_page.draw(found, FOLDER / "batch_scaling.png")
    return text


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    print(study(
        Setting(values.data, values.model, values.width, values.epochs),
        choices("optimizers", batch_scaling_page.LINES), integers("batches"), integers("seeds"),
        pathlib.Path(values.runs).expanduser(), values.data_dir, values.train,
    ))


if __name__ == "__main__":
    cifar10.define_flags("runs/cifar10_scaling")
    flags.DEFINE_enum("model", "davidnet", list(recipe.MODELS), "The network.")
    flags.DEFINE_integer("width", WIDTH, "Channels of its first convolution.", lower_bound=1)
    flags.DEFINE_list("batches", list(map(str, BATCHES)), "Batches to train at.")
    flags.DEFINE_list("optimizers", list(batch_scaling_page.LINES), "Optimizers to train.")
    cli.run_main(main)

"""Tunes every optimizer's rate at every batch, then measures the remaining differences.

  python -m experiments.demo.tuned

The fair comparison beside experiments.demo.batch_scaling: the same network, epochs and batches, but
no rule of scaling. At each batch each optimizer's rates are tried in steps of 2, trained on the
first 80 % of the training scans and judged by the mean accuracy of the seeds on the other 20 %; the
grid goes on until the best rate has a worse one on both sides. With that rate it is trained on all
training scans, and the test scans are looked at for the first time. Under ten minutes on two cores.
"""

import math
import pathlib
from collections.abc import Mapping, Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from configs import digits
from experiments.demo import command, tune
from experiments.demo.study import Record, Trial, cell, run_trials
from experiments.records import Records
from lamb_tpu import data, style
from lamb_tpu.store.metrics import read_records

KEPT = command.HERE / "tuned.jsonl"
PLOT = "tuned.png"
BATCHES = (32, 128, 512, 1437)
OPTIMIZERS = ("momentum", "adamw", "lamb")
# The same for all, so that the rate alone is tuned: a sixth of the run.
WARMUP = "5 epochs"
TITLE = "Handwritten digits, a network of 64-128-64-10: each rate tuned at each batch"


def first_grid(optimizer: str, batch: int) -> list[float]:
    """Five rates around the one tuned at batch 32 times about the square root of the growth."""
    base = digits.OPTIMIZERS[optimizer][0]["learning_rate"]
    middle = round(math.log2(batch / 32) / 2)
    return [base * 2.0 ** (middle + step) for step in (-2, -1, 0, 1, 2)]


def make_trial(optimizer: str, batch: int, rate: float, seed: int, held_out: bool) -> Trial:
    """A run that helps to choose the rate (`held_out`), or one that measures on the test scans.

    The largest batch is all the scans that it trains on: fewer where some are held out.
    """
    config = digits.get_config(f"optimizer={optimizer}")
    if held_out:
        config.data.train_split, config.data.eval_split = tune.TRAINED, tune.HELD_OUT
        config.eval.every = "100 percent"
    config.batch_size = min(batch, len(data.load("digits", config.data.train_split)))
    config.seed = seed
    config.schedule.scaling = "identity"
    config.schedule.warmup = WARMUP
    config.optimizer.learning_rate = rate
    config.log.tensorboard = False
    part = "tune" if held_out else "test"
    return Trial(f"{part}-{optimizer}-batch{batch}-rate{rate:g}-seed{seed}", config)


def next_rate(means: Mapping[float, tuple[float, float]], tried: Sequence[float]) -> float | None:
    """The rate beyond the edge of the grid, where the best of it lies; None where it lies inside.

    Args:
      means: of the rates at which no run diverged, see `tune.mean_results`.
      tried: all rates, those at which one diverged too.
    """
    if not means:
        return min(tried) / 2
    best = tune.choose(means)
    if best == max(tried):
        return 2 * best
    return best / 2 if best == min(tried) else None


class Study:
    """The runs of the study, in a folder, and their records.

    Args:
      out: the folder.
      seeds: of each setting.
    """

    def __init__(self, out: pathlib.Path, seeds: int) -> None:
        self._out, self._seeds = out, range(seeds)
        self.records: list[Record] = []

    def choose(self, optimizer: str, batch: int) -> float:
        """Runs the grid of rates, and goes on beyond its edge until the best lies inside."""
        due, found = first_grid(optimizer, batch), []
        tried: list[float] = []
        while due:
            found += self._run(optimizer, batch, due, held_out=True)
            tried += due
            means = tune.mean_results(found)[optimizer]
            beyond = next_rate(means, tried)
            due = [] if beyond is None else [beyond]
        return tune.choose(means)

    def measure(self, optimizer: str, batch: int, rate: float) -> None:
        """Trains on all training scans."""
        self._run(optimizer, batch, [rate], held_out=False)

    def _run(
        self, optimizer: str, batch: int, rates: Sequence[float], held_out: bool
    ) -> list[Record]:
        trials = [
            make_trial(optimizer, batch, rate, seed, held_out)
            for rate in rates for seed in self._seeds
        ]
        found = [
            {"part": "tune" if held_out else "test", "batch": batch} | record
            for record in run_trials(trials, self._out, lambda _: f"{optimizer}, batch {batch:,}")
        ]
        self.records += found
        return found


def kept() -> list[Record]:
    """The committed records."""
    return read_records(KEPT) if KEPT.exists() else []


def chosen(records: Sequence[Record], optimizer: str, batch: int) -> list[Record]:
    """The runs on the test scans, at the rate that was chosen."""
    return [
        record for record in records
        if (record["part"], record["optimizer"], record["batch"]) == ("test", optimizer, batch)
    ]


def make_table(records: Sequence[Record]) -> Table:
    """Test accuracy and the chosen rate, a row for each optimizer and a column for each batch."""
    seeds = len({record["seed"] for record in records})
    table = Table(
        title=f"Test accuracy, %, mean ± standard deviation of {seeds} seeds, and rate",
        caption="30 epochs; each rate tuned at each batch, on held-out training scans",
        title_justify="left", caption_justify="left", min_width=72,
    )
    table.add_column("optimizer")
    for batch in BATCHES:
        table.add_column(f"{batch:,}", justify="right", no_wrap=True)
    for optimizer in OPTIMIZERS:
        cells = []
        for batch in BATCHES:
            found = chosen(records, optimizer, batch)
            cells.append(f"{cell(found)}\n{found[0]['learning_rate']:g}" if found else "")
        table.add_row(style.OPTIMIZERS[optimizer].name, *cells)
    return table


def rows(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The runs on the test scans, by optimizer."""
    return {
        style.OPTIMIZERS[optimizer].name: [
            record for batch in BATCHES for record in chosen(records, optimizer, batch)
        ]
        for optimizer in OPTIMIZERS
    }


def main() -> None:
    """Entry point of the command line."""
    study = Study(command.out_folder(), flags.FLAGS.seeds)
    for optimizer in OPTIMIZERS:
        for batch in BATCHES:
            study.measure(optimizer, batch, study.choose(optimizer, batch))
    Console(highlight=False).print(make_table(study.records))
    if flags.FLAGS.write:
        from experiments.demo import page  # which needs the records of all three studies

        Records(KEPT, ("part", "optimizer", "batch", "learning_rate", "seed")).add(study.records)
        page.write()


if __name__ == "__main__":
    command.define_flags(out="demo_tuned", seeds=3)
    command.run_main(main)

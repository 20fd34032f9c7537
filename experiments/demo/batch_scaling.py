"""Batch scaling of momentum, AdamW and LAMB on handwritten digits, tuned once at batch 32.

  python -m experiments.demo.batch_scaling

About a minute on two cores. Trains a small network on the embedded handwritten digits, for the same
number of epochs at batch 32, 128, 512 and the whole training set. The rates are those of
configs/digits.py, chosen at batch 32 by experiments/demo/tune.py; each rule of scaling carries them
to the larger batches, and nothing is tuned there. Prints a table; writes a plot, a record of each
run, and the runs' own metrics. The same command resumes a stopped study. A second table, from the
records of experiments.demo.tuned, has the accuracy with every rate tuned at every batch.
"""

import pathlib
import time
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from configs import digits
from experiments.demo import command, tuned
from experiments.demo.plot import draw
from experiments.demo.study import RECORDS, Record, Trial, cell, run_trials
from experiments.records import Records
from lamb_tpu import data
from lamb_tpu.watch.progress import format_seconds

# Optimizer, scaling rule, and what the table calls them. AdamW under LAMB's own rule tells apart
# what the layerwise ratio does and what the rule does.
LINES = (
    ("momentum", "linear", "momentum, linear"),
    ("adamw", "identity", "AdamW, not scaled"),
    ("adamw", "legw", "AdamW, LEGW"),
    ("lamb", "legw", "LAMB, LEGW"),
)
PLOT = "batch_scaling.png"
KEPT = command.HERE / "batch_scaling.jsonl"
TITLE = (
    "Handwritten digits, a network of 64-128-64-10: rates tuned at batch 32, then scaled by a rule"
)
# Below the table, for at first sight it says that momentum cannot learn from large batches.
STRAWMAN = """\
Momentum fails by the rule: its best rate at batch 32 is next to the largest
that is stable at all, and the rule multiplies it by 4 at batch 128. With each
rate tuned at each batch (recorded; again by python -m experiments.demo.tuned):
"""


def default_batch_sizes() -> list[int]:
    """32, 128, 512 and the number of training examples."""
    return [32, 128, 512, len(data.load("digits", "train"))]


def make_trials(
    batch_sizes: Sequence[int], seeds: int, epochs: float, rate_factor: float = 1.0
) -> list[Trial]:
    """Every line at every batch size, with seeds 0, 1, ...; base rates times `rate_factor`."""
    trials = []
    for optimizer, scaling, _ in LINES:
        for batch_size in batch_sizes:
            for seed in range(seeds):
                config = digits.get_config(
                    f"optimizer={optimizer},batch={batch_size},epochs={epochs}"
                )
                config.seed = seed
                config.schedule.scaling = scaling
                config.optimizer.learning_rate *= rate_factor
                config.log.tensorboard = False
                name = f"{optimizer}-{scaling}-batch{batch_size}-seed{seed}"
                trials.append(Trial(name, config))
    return trials


def run_study(
    out: pathlib.Path,
    batch_sizes: Sequence[int],
    seeds: int = 3,
    epochs: float = 30.0,
    rate_factor: float = 1.0,
) -> list[Record]:
    """Runs what is not yet run, prints the table, and writes plot and records into `out`.

    Raises:
      UserError: `out` cannot be written, or holds runs of other configs.
    """
    start = time.monotonic()

    def show(records: Sequence[Record]) -> Table:
        return make_table(records, batch_sizes, seeds, caption)

    base = "each rate tuned at batch 32 alone"
    if rate_factor != 1:
        base = f"each rate {rate_factor:g} times the one tuned at batch 32"
    caption = f"{epochs:g} epochs; {base}, then scaled by the rule"
    trials = make_trials(batch_sizes, seeds, epochs, rate_factor)
    records = run_trials(trials, out, show)
    draw(rows(records), out / PLOT, TITLE)
    console = Console(highlight=False, soft_wrap=True)
    console.print(show(records))
    console.print(STRAWMAN)
    console.print(tuned.make_table(tuned.kept()))
    console.print(
        f"{len(trials)} runs in {format_seconds(time.monotonic() - start)}.\n"
        f"plot:    {out / PLOT}\n"
        f"records: {out / RECORDS}\n"
        f"runs:    {out / 'runs'}",
        markup=False,
    )
    return records


def make_table(
    records: Sequence[Record], batch_sizes: Sequence[int], seeds: int, caption: str
) -> Table:
    """Test accuracy, a row for each line and a column for each batch size; empty where not run."""
    spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    table = Table(
        title=f"Test accuracy, %{spread}",
        caption=caption,
        title_justify="left",
        caption_justify="left",
        min_width=72,
    )
    table.add_column("optimizer, scaling")
    for batch_size in batch_sizes:
        table.add_column(f"{batch_size:,}", justify="right", no_wrap=True)
    for label, line in rows(records).items():
        table.add_row(label, *(cell(at(line, size)) for size in batch_sizes))
    return table


def at(line: Sequence[Record], batch_size: int) -> list[Record]:
    """The records of a line at one batch size."""
    return [record for record in line if record["batch_size"] == batch_size]


def rows(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each of `LINES`, by its label."""
    return {
        label: [
            record
            for record in records
            if (record["optimizer"], record["scaling"]) == (optimizer, scaling)
        ]
        for optimizer, scaling, label in LINES
    }


def main() -> None:
    """Entry point of the command line."""
    given, out = flags.FLAGS, command.out_folder()
    records = run_study(
        out, default_batch_sizes(), given.seeds, given.epochs, given.rate_factor
    )
    if given.write:
        from experiments.demo import page  # which needs the records of all three studies

        factor = {"rate_factor": given.rate_factor}
        Records(KEPT, ("rate_factor", "name")).add(factor | record for record in records)
        page.write()


if __name__ == "__main__":
    command.define_flags(out="demo", seeds=3)
    flags.DEFINE_float("epochs", 30.0, "Length of every run.")
    flags.DEFINE_float(
        "rate_factor",
        1.0,
        "Multiplies every base rate, to see how much depends on it; needs an --out of its own.",
    )
    command.run_main(main)

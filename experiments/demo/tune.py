"""Chooses the base learning rates of configs/digits.py: at batch 32, without the test set.

  python -m experiments.demo.tune

Every optimizer gets the same effort: seven rates, each twice the one before, the same seeds.
Networks train on the first 80 % of the training scans; the mean accuracy on the other 20 % decides.
"""

import statistics
from collections.abc import Sequence

from absl import flags
from rich.console import Console
from rich.table import Table

from configs import digits
from experiments.demo import command
from experiments.demo.study import Record, Trial, run_trials
from experiments.records import Records
from lamb_tpu import data

NUM_RATES = 7
TRAINED, HELD_OUT = "train[:80%]", "train[80%:]"
KEPT = command.HERE / "tune.jsonl"
# The smallest rate of each optimizer's grid.
FIRST_RATES = {"momentum": 0.01, "adamw": 0.0005, "lamb": 0.00125}


def make_trials(seeds: int) -> list[Trial]:
    """Every rate of every optimizer's grid, with seeds 0, 1, ..."""
    trials = []
    for optimizer, first in FIRST_RATES.items():
        for rate in (first * 2**power for power in range(NUM_RATES)):
            for seed in range(seeds):
                config = digits.get_config(f"optimizer={optimizer}")
                config.seed = seed
                config.optimizer.learning_rate = rate
                config.data.train_split = TRAINED
                config.data.eval_split = HELD_OUT
                config.eval.every = "100 percent"
                config.log.tensorboard = False
                trials.append(Trial(f"{optimizer}-rate{rate:g}-seed{seed}", config))
    return trials


def mean_results(records: Sequence[Record]) -> dict[str, dict[float, tuple[float, float]]]:
    """{optimizer: {rate: (mean accuracy, mean loss)}}, without rates at which a run diverged."""
    groups: dict[str, dict[float, list[Record]]] = {optimizer: {} for optimizer in FIRST_RATES}
    for record in records:
        groups[record["optimizer"]].setdefault(record["learning_rate"], []).append(record)
    return {
        optimizer: {
            rate: (
                statistics.fmean(record["accuracy"] for record in group),
                statistics.fmean(record["loss"] for record in group),
            )
            for rate, group in by_rate.items()
            if all(record["accuracy"] is not None for record in group)
        }
        for optimizer, by_rate in groups.items()
    }


def choose(means: dict[float, tuple[float, float]]) -> float:
    """The rate with the highest mean accuracy; of equals the one with the lowest mean loss."""
    return max(means, key=lambda rate: (means[rate][0], -means[rate][1]))


def make_table(records: Sequence[Record]) -> Table:
    """Mean accuracy and loss for each rate; the chosen one of each optimizer has a star."""
    num_held_out = len(data.load("digits", HELD_OUT))
    table = Table(title=f"Batch 32, {num_held_out} held-out scans, mean over seeds")
    for heading in ("optimizer", "rate", "accuracy, %", "loss", "chosen"):
        table.add_column(heading, justify="left" if heading == "optimizer" else "right")
    for optimizer, means in mean_results(records).items():
        chosen = choose(means) if means else None
        for rate, (accuracy, loss) in means.items():
            star = "*" if rate == chosen else ""
            table.add_row(optimizer, f"{rate:g}", f"{100 * accuracy:.2f}", f"{loss:.4f}", star)
        table.add_section()
    return table


def main() -> None:
    """Entry point of the command line."""
    records = run_trials(make_trials(flags.FLAGS.seeds), command.out_folder(), make_table)
    Console().print(make_table(records))
    if flags.FLAGS.write:
        from experiments.demo import page  # which needs the records of all three studies

        Records(KEPT, ("optimizer", "learning_rate", "seed")).add(records)
        page.write()


if __name__ == "__main__":
    command.define_flags(out="demo_tuning", seeds=10)
    command.run_main(main)

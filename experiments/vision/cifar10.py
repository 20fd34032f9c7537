"""The CIFAR-10 table of the LAMB paper's appendix: runs its cells, writes them beside the paper's.

  python -m experiments.vision.cifar10 --runs=DIR
  python -m experiments.vision.cifar10 --runs=DIR --data=cifar10_jpeg --data_dir=FOLDER \
      --optimizers=lamb,momentum --epochs=2
  python -m experiments.vision.cifar10 --runs=DIR --train=false

DavidNet at batch 512 by configs/cifar10.py, each optimizer as it stands there. The first two train
every cell asked for that has no record yet (each in its own workdir, resumable); all collect the
complete runs of the cells asked for into experiments/vision/cifar10.jsonl, one record a run, and
write the table experiments/vision/cifar10.md from all records in that file. With fewer epochs the
whole schedule shrinks, and the table says so.
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from configs import cifar10 as recipe
from experiments.records import (
    Record,
    Records,
    choices,
    evaluations,
    facts,
    integers,
    run_missing,
    seed_columns,
    versions,
)
from lamb_tpu import cli
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.guards import Diverged

FOLDER = pathlib.Path(__file__).parent

# Test accuracy after 24 epochs at batch 512: arXiv:1904.00962, appendix.
PAPER = {"lamb": 0.9408, "momentum": 0.9372, "adamw": 0.9271, "adam": 0.9225, "adagrad": 0.9074}
OPTIMIZERS = (*PAPER, "lars")

DATA = {
    "cifar10": "the original pictures",
    "cifar10_jpeg": "the same pictures as JPEGs of quality 75, which costs accuracy",
}
_DIVERGED = "diverged.txt"  # in the workdir of a run that did, with the reason


class Cell(NamedTuple):
    """One run of the table."""

    data: str
    optimizer: str
    epochs: float
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def make_config(
    argument: str, data: str, data_dir: str | None, epochs: float, seed: int
) -> ConfigDict:
    """The recipe with an argument such as 'optimizer=lamb', as the studies of CIFAR-10 run it."""
    config = recipe.get_config(f"{argument},data={data},epochs={epochs}")
    config.seed = seed
    config.data.dir = data_dir
    config.checkpoint.every = "5 percent"
    config.checkpoint.keep = 1
    return config


def run(config: ConfigDict, folder: pathlib.Path) -> None:
    """Trains in a workdir; a run that diverges leaves a note there and counts as a result.

    Raises:
      UserError: the config or the data has a mistake.
    """
    if config.data.name == "cifar10_jpeg" and config.data.dir is None:
        raise UserError("--data_dir is missing; give the folder with cifar10_jpeg_q75.npz")
    try:
        train(config, folder, label=folder.name)
    except Diverged as error:
        (folder / _DIVERGED).write_text(f"{error}\n")
        print(error, flush=True)


def outcome(folder: pathlib.Path, epochs: float) -> Record | None:
    """Returns the outcome of a workdir's run; None if it is not complete.

    Accuracy and loss are the last evaluation's, None if the run diverged; the curve has [epoch,
    accuracy] of all evaluations.
    """
    evals, diverged = evaluations(folder), (folder / _DIVERGED).exists()
    if not diverged and (not evals or evals[-1]["epoch"] < epochs):
        return None
    trained = read_records(folder / "metrics.jsonl", "train")
    last = {"accuracy": None, "loss": None} if diverged else evals[-1]
    return {
        "accuracy": last["accuracy"],
        "loss": last["loss"],
        "updates": trained[-1]["step"] if trained else 0,
        "curve": [[round(e["epoch"], 4), round(e["accuracy"], 4)] for e in evals],
        **facts(folder),
    }


def collect(runs: pathlib.Path, wanted: Iterable[Any]) -> list[Record]:
    """One record for each complete run of `wanted`, cells with `epochs`, below `runs`."""
    found = ((cell, outcome(runs / cell.name, cell.epochs)) for cell in wanted)
    return [cell._asdict() | result for cell, result in found if result is not None]


def page(records: Iterable[Record]) -> str:
    """The Markdown page."""
    records = list(records)
    lines = [
        "# CIFAR-10: DavidNet at batch 512",
        "",
        "Test accuracy after the last update on all 10,000 test pictures. The paper's column is",
        "from the appendix of arXiv:1904.00962 (recalled, not read from the paper itself), after",
        f"{recipe.EPOCHS} epochs on the original pictures; LARS is not in that table. Rates and",
        "schedules are those of configs/cifar10.py; nothing was tuned here.",
        "",
    ]
    if any(record["epochs"] < recipe.EPOCHS for record in records):
        lines += [
            f"Rows marked as shorter have fewer than {recipe.EPOCHS} epochs, with the whole",
            "schedule shrunk to that length: they say nothing about the paper's numbers.",
            "",
        ]
    for data in sorted({record["data"] for record in records}):
        lines += [
            f"## {data}: {DATA[data]}",
            "",
            "| optimizer | learning rate | paper | epochs | mean | lowest to highest | by seed | "
            "minutes a run | machine |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for optimizer in OPTIMIZERS:
            of_row = [r for r in records if (r["data"], r["optimizer"]) == (data, optimizer)]
            rate = recipe.OPTIMIZERS[optimizer][0]["learning_rate"]
            paper = f"{PAPER[optimizer]:.4f}" if optimizer in PAPER else "-"
            for epochs in sorted({recipe.EPOCHS, *(r["epochs"] for r in of_row)}, reverse=True):
                cell = [record for record in of_row if record["epochs"] == epochs]
                lines.append(
                    f"| {optimizer} | {rate:.4g} | {paper} | {epochs:g}{_mark(epochs)} | "
                    f"{seed_columns(cell, 'accuracy')} |"
                )
        folder = " --data_dir=FOLDER" if data == "cifar10_jpeg" else ""
        lines += ["", "Commands, by the length of the runs:", ""]
        for epochs in sorted({r["epochs"] for r in records if r["data"] == data}, reverse=True):
            cell = [r for r in records if (r["data"], r["epochs"]) == (data, epochs)]
            optimizers = [name for name in OPTIMIZERS if name in {r["optimizer"] for r in cell}]
            seeds = map(str, sorted({r["seed"] for r in cell}))
            lines.append(
                f"- `python -m experiments.vision.cifar10 --data={data}{folder} --optimizers="
                f"{','.join(optimizers)} --epochs={epochs:g} --seeds={','.join(seeds)}`"
            )
        lines.append("")
    lines += [f"Versions: {versions(records)}. Records: cifar10.jsonl.", ""]
    return "\n".join(lines)


def _mark(epochs: float) -> str:
    if epochs == recipe.EPOCHS:
        return ""
    return ", shorter" if epochs < recipe.EPOCHS else ", longer"


def define_flags(runs: str) -> None:
    """Defines the flags that both studies of CIFAR-10 have."""
    flags.DEFINE_string("runs", runs, "Folder with one workdir a run.")
    flags.DEFINE_enum("data", "cifar10", list(DATA), "The original pictures, or JPEGs of them.")
    flags.DEFINE_string(
        "data_dir", None,
        "Folder with the original archive (else it is downloaded), or with cifar10_jpeg_q75.npz.",
    )
    flags.DEFINE_float("epochs", recipe.EPOCHS, "Of every run.", lower_bound=0.01)
    flags.DEFINE_list("seeds", ["0"], "Seeds to train.")
    flags.DEFINE_bool("train", True, "Whether to train what is missing before collecting.")


def study(
    wanted: Sequence[Cell], runs: pathlib.Path, data_dir: str | None, training: bool = True
) -> str:
    """Runs the missing cells, writes records and page; returns the page.

    Raises:
      UserError: the data is not there, or without `training` there is nothing to show.
    """

    def run_cell(cell: Cell, folder: pathlib.Path) -> None:
        argument = f"optimizer={cell.optimizer}"
        run(make_config(argument, cell.data, data_dir, cell.epochs, cell.seed), folder)

    records = Records(FOLDER / "cifar10.jsonl", Cell._fields)
    run_missing(wanted, records, runs, collect, run_cell if training else None)
    if not list(records):
        raise UserError(f"--runs {runs} holds no complete run, and there are no records yet")
    text = page(records)
    (FOLDER / "cifar10.md").write_text(text)
    return text


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    wanted = [
        Cell(values.data, optimizer, values.epochs, seed)
        for optimizer in choices("optimizers", OPTIMIZERS) for seed in integers("seeds")
    ]
    runs = pathlib.Path(values.runs).expanduser()
    print(study(wanted, runs, values.data_dir, values.train))


if __name__ == "__main__":
    define_flags("runs/cifar10")
    flags.DEFINE_list("optimizers", list(OPTIMIZERS), "Optimizers to train.")
    cli.run_main(main)

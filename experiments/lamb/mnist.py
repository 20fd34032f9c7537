"""The MNIST table of the LAMB paper's appendix: runs its cells and writes them beside the paper's.

  python -m experiments.lamb.mnist --runs=DIR --networks=lenet5 --seeds=0,1,2 --data_dir=FOLDER
  python -m experiments.lamb.mnist --runs=DIR --train=false

The first command trains every cell asked for that has no record yet (each in its own workdir,
resumable); both collect the complete runs of these recipes in DIR into
experiments/lamb/mnist.jsonl, one record a run, and write the table experiments/lamb/mnist.md from
all records in that file.
"""

import json
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from absl import flags

from configs import mnist_lenet
from experiments.records import (
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
from lamb_tpu.config import differences, flatten
from lamb_tpu.errors import UserError
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
EPOCHS = 30

# Test accuracy, mean of 5 runs, batch 1,024, 30 epochs: arXiv:1904.00962, appendix.
PAPER = {"lamb": 0.9945, "adamw": 0.9941, "momentum": 0.9933}

NETWORKS = {
    "lenet": "the author's network: 5x5 convolutions of 32 and 64, dense 1,024, dropout 0.4",
    "lenet5": "LeNet-5 (61,706 parameters), with the same rates, not tuned",
}


class Cell(NamedTuple):
    """One run of the study."""

    network: str
    optimizer: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def is_complete(folder: pathlib.Path) -> bool:
    """Returns whether the workdir holds a complete run of one of the table's recipes."""
    if not (folder / "config.json").exists():
        return False
    config = json.loads((folder / "config.json").read_text())
    network, optimizer = config.get("model.name"), config.get("optimizer.name")
    if network not in NETWORKS or optimizer not in PAPER:
        return False
    recipe = flatten(mnist_lenet.get_config(f"network={network},optimizer={optimizer}"))
    if differences(config | {"seed": recipe["seed"]}, recipe):
        return False
    evals = evaluations(folder)
    return bool(evals) and evals[-1]["epoch"] >= EPOCHS


def collect(runs: pathlib.Path) -> list[dict[str, Any]]:
    """One record for each complete run below `runs`, from the files in its workdir."""
    records = []
    for folder in sorted(path.parent for path in runs.glob("*/metrics.jsonl")):
        if not is_complete(folder):
            continue
        config = json.loads((folder / "config.json").read_text())
        evaluation = evaluations(folder)[-1]
        records.append({
            "network": config["model.name"],
            "optimizer": config["optimizer.name"],
            "seed": config["seed"],
            "test_accuracy": evaluation["accuracy"],
            "test_loss": evaluation["loss"],
            "updates": evaluation["step"],
            **facts(folder),
        })
    return records


def table(records: Iterable[dict[str, Any]]) -> str:
    """The Markdown page."""
    records = list(records)
    lines = [
        "# MNIST: LeNet at batch 1,024, 30 epochs",
        "",
        "Test accuracy after the last update on all 10,000 test images. The paper's column is from",
        "the appendix of arXiv:1904.00962, mean of 5 runs (recalled, not read from the paper",
        "itself), for the author's network. Learning rates, warm-up, decay and clipping are those",
        "of the first author's code and logs for that network (configs/mnist_lenet.py); nothing",
        "was tuned here.",
        "",
    ]
    for network, description in NETWORKS.items():
        lines += [
            f"## {network}: {description}",
            "",
            "| optimizer | learning rate | paper | mean | lowest to highest | by seed | "
            "minutes a run | machine |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for optimizer, paper in PAPER.items():
            cell = [
                record for record in records
                if (record["network"], record["optimizer"]) == (network, optimizer)
            ]
            quoted = f"{paper:.4f}" if network == "lenet" else "-"
            rate = mnist_lenet.OPTIMIZERS[optimizer][0]["learning_rate"]
            measured = seed_columns(cell, "test_accuracy")
            lines.append(f"| {optimizer} | {rate} | {quoted} | {measured} |")
        lines += [
            "",
            "One run: `python -m lamb_tpu.train "
            f"--config=configs/mnist_lenet.py:network={network},optimizer=OPTIMIZER "
            "--config.seed=SEED --workdir=DIR`; all and this page: "
            f"`python -m experiments.lamb.mnist --networks={network}`.",
            "",
        ]
    collapsed = [record for record in records if record["test_accuracy"] < 0.2]
    for record in collapsed:
        lines += [
            f"{record['network']} with {record['optimizer']}, seed {record['seed']}: training "
            "collapsed, the accuracy is about that of guessing.",
            "",
        ]
    lines += [f"Versions: {versions(records)}. Records: mnist.jsonl.", ""]
    return "\n".join(lines)


def main() -> None:
    """Runs the missing cells and writes the table."""
    values = flags.FLAGS
    runs = pathlib.Path(values.runs).expanduser()

    def run(cell: Cell, folder: pathlib.Path) -> None:
        config = mnist_lenet.get_config(f"network={cell.network},optimizer={cell.optimizer}")
        config.seed = cell.seed
        config.data.dir = values.data_dir
        train(config, folder, label=cell.name)

    records = Records(FOLDER / "mnist.jsonl", Cell._fields)
    wanted = [
        Cell(network, optimizer, seed)
        for network in choices("networks", NETWORKS)
        for optimizer in choices("optimizers", PAPER)
        for seed in integers("seeds")
    ]
    run_missing(
        wanted, records, runs, lambda runs, cells: collect(runs), run if values.train else None
    )
    if not list(records):
        raise UserError(f"--runs {runs} holds no complete run, and there are no records yet")
    text = table(records)
    (FOLDER / "mnist.md").write_text(text)
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/mnist", "Folder with one workdir a run.")
    flags.DEFINE_list("networks", list(NETWORKS), "Networks to train.")
    flags.DEFINE_list("optimizers", list(PAPER), "Optimizers to train.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds to train.")
    flags.DEFINE_string("data_dir", None, "Folder with MNIST's original files; else download.")
    flags.DEFINE_bool("train", True, "Whether to train what is missing before collecting.")
    cli.run_main(main)

"""The MNIST table of the LAMB paper's appendix: runs its cells and writes them beside the paper's.

  python -m experiments.lamb.mnist --runs=DIR --networks=lenet5 --seeds=0,1,2 --data_dir=FOLDER
  python -m experiments.lamb.mnist --runs=DIR --train=false

The first command trains every cell asked for whose run in DIR is not complete (each in its own
workdir, resumable); both then collect the complete runs of these recipes in DIR into
experiments/lamb/mnist.jsonl, one record a run, and write the table experiments/lamb/mnist.md from
all records in that file.
"""

import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from absl import flags

from configs import mnist_lenet
from lamb_tpu import cli
from lamb_tpu.config import differences, flatten
from lamb_tpu.errors import UserError
from lamb_tpu.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
EPOCHS = 30

# Test accuracy, mean of 5 runs, batch 1,024, 30 epochs: arXiv:1904.00962, appendix.
PAPER = {"lamb": 0.9945, "adamw": 0.9941, "momentum": 0.9933}

NETWORKS = {
    "lenet": "the author's network: 5x5 convolutions of 32 and 64, dense 1,024, dropout 0.4",
    "lenet5": "LeNet-5 (61,706 parameters), with the same rates, not tuned",
}


def is_complete(folder: pathlib.Path) -> bool:
    """Whether the workdir holds a run of one of the table's recipes, trained to its end."""
    if not (folder / "config.json").exists() or not (folder / "metrics.jsonl").exists():
        return False
    config = json.loads((folder / "config.json").read_text())
    network, optimizer = config.get("model.name"), config.get("optimizer.name")
    if network not in NETWORKS or optimizer not in PAPER:
        return False
    recipe = flatten(mnist_lenet.get_config(f"network={network},optimizer={optimizer}"))
    if differences(config | {"seed": recipe["seed"]}, recipe):
        return False
    evals = read_records(folder / "metrics.jsonl", "eval")
    return bool(evals) and evals[-1]["epoch"] >= EPOCHS


def collect(runs: pathlib.Path) -> list[dict[str, Any]]:
    """One record for each complete run below `runs`, from the files in its workdir."""
    records = []
    for folder in sorted(path.parent for path in runs.glob("*/metrics.jsonl")):
        if not is_complete(folder):
            continue
        config = json.loads((folder / "config.json").read_text())
        evaluation = read_records(folder / "metrics.jsonl", "eval")[-1]
        training = read_records(folder / "metrics.jsonl", "train")[-1]
        receipt = read_records(folder / "run.jsonl")[-1]
        records.append({
            "network": config["model.name"],
            "optimizer": config["optimizer.name"],
            "seed": config["seed"],
            "test_accuracy": evaluation["accuracy"],
            "test_loss": evaluation["loss"],
            "updates": evaluation["step"],
            "seconds": round(training["seconds"], 1),
            **{key: receipt[key] for key in ("device", "devices", "cores", "jax", "commit")},
        })
    return records


def merge(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All records, a new one in place of an old one of the same cell and seed."""

    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        return record["network"], record["optimizer"], record["seed"]

    return sorted({key(record): record for record in (*old, *new)}.values(), key=key)


def table(records: list[dict[str, Any]]) -> str:
    """The Markdown page."""
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
            lines.append(f"| {optimizer} | {rate} | {quoted} | {_measured(cell)} |")
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
    versions = sorted({f"jax {record['jax']} at commit {record['commit']}" for record in records})
    lines += [f"Versions: {'; '.join(versions)}. Records: mnist.jsonl.", ""]
    return "\n".join(lines)


def _measured(cell: list[dict[str, Any]]) -> str:
    """The measured columns of a row, joined."""
    if not cell:
        return "not run | - | - | - | -"
    accuracies = [record["test_accuracy"] for record in cell]
    spread = f"{min(accuracies):.4f} to {max(accuracies):.4f}" if len(cell) > 1 else "-"
    by_seed = ", ".join(f"{record['seed']}: {record['test_accuracy']:.4f}" for record in cell)
    minutes = statistics.mean(record["seconds"] for record in cell) / 60
    machines = sorted({f"{r['devices']} x {r['device']}, {r['cores']} cores" for r in cell})
    return (
        f"{statistics.mean(accuracies):.4f} | {spread} | {by_seed} | {minutes:.1f} | "
        f"{'; '.join(machines)}"
    )


def main() -> None:
    """Runs the missing cells and writes the table."""
    values = flags.FLAGS
    runs = pathlib.Path(values.runs).expanduser()
    if values.train:
        for network in values.networks:
            for optimizer in values.optimizers:
                for seed in map(int, values.seeds):
                    run_config = mnist_lenet.get_config(f"network={network},optimizer={optimizer}")
                    run_config.seed = seed
                    run_config.data.dir = values.data_dir
                    name = f"{network}-{optimizer}-{seed}"
                    if not is_complete(runs / name):
                        train(run_config, runs / name, label=name)
    record_file = FOLDER / "mnist.jsonl"
    old = read_records(record_file) if record_file.exists() else []
    records = merge(old, collect(runs))
    if not records:
        raise UserError(f"--runs {runs} holds no complete run, and there are no records yet")
    record_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (FOLDER / "mnist.md").write_text(table(records))
    print(table(records))


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/mnist", "Folder with one workdir a run.")
    flags.DEFINE_list("networks", list(NETWORKS), "Networks to train.")
    flags.DEFINE_list("optimizers", list(PAPER), "Optimizers to train.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds to train.")
    flags.DEFINE_string("data_dir", None, "Folder with MNIST's original files; else download.")
    flags.DEFINE_bool("train", True, "Whether to train what is missing before collecting.")
    cli.run_main(main)

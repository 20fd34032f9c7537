"""The MNIST table of the LAMB paper's appendix: runs its cells and writes them beside the paper's.

  python -m experiments.lamb.mnist --runs=DIR --networks=lenet5 --seeds=0,1,2 --data_dir=FOLDER
  python -m experiments.lamb.mnist --runs=DIR --train=false

The first command trains every cell asked for whose run in DIR is not complete (each in its own
workdir, resumable); both then collect the complete runs of DIR into experiments/lamb/mnist.jsonl,
one record a run, and write the table experiments/lamb/mnist.md from all records in that file.
"""

import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from absl import flags

from configs import mnist_lenet
from lamb_tpu import cli
from lamb_tpu.errors import UserError
from lamb_tpu.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent

# Test accuracy, mean of 5 runs, batch 1,024, 30 epochs: arXiv:1904.00962, appendix.
PAPER = {"lamb": 0.9945, "adamw": 0.9941, "momentum": 0.9933}

NETWORKS = {
    "lenet": "the author's network: 5x5 convolutions of 32 and 64, dense 1,024, dropout 0.4",
    "lenet5": "LeNet-5 (61,706 parameters), with the same rates, not tuned",
}


def collect(runs: pathlib.Path) -> list[dict[str, Any]]:
    """One record for each complete run below `runs`, from the files in its workdir."""
    records = []
    for path in sorted(runs.glob("*/metrics.jsonl")):
        config = json.loads((path.parent / "config.json").read_text())
        if config["data.name"] != "mnist":
            continue
        evals = read_records(path, "eval")
        last = read_records(path, "train")[-1]
        receipts = [json.loads(line) for line in (path.parent / "run.jsonl").open()]
        if not evals or evals[-1]["step"] != last["step"] or evals[-1]["epoch"] < 30:
            continue
        records.append({
            "network": config["model.name"],
            "optimizer": config["optimizer.name"],
            "batch": config["batch_size"],
            "seed": config["seed"],
            "learning_rate": config["optimizer.learning_rate"],
            "test_accuracy": evals[-1]["accuracy"],
            "test_loss": evals[-1]["loss"],
            "updates": last["step"],
            "seconds": round(last["seconds"], 1),
            "device": receipts[-1]["device"],
            "devices": receipts[-1]["devices"],
            "cores": receipts[-1]["cores"],
            "jax": receipts[-1]["jax"],
            "commit": receipts[-1]["commit"],
        })
    return records


def merge(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All records, a new one in place of an old one of the same cell and seed."""
    def key(record: dict[str, Any]) -> tuple[Any, ...]:
        return record["network"], record["optimizer"], record["batch"], record["seed"]

    return sorted({key(record): record for record in (*old, *new)}.values(), key=key)


def table(records: list[dict[str, Any]]) -> str:
    """The Markdown page."""
    lines = [
        "# MNIST: LeNet at batch 1,024, 30 epochs",
        "",
        "Test accuracy after the last update on all 10,000 test images. The paper's column is from",
        "the appendix of arXiv:1904.00962, mean of 5 runs (recalled, not read from the paper",
        "itself), for the author's network. Learning rates, warm-up, decay and clipping are those",
        "of the first author's code and logs; nothing was tuned here. Spread is the lowest and the",
        "highest seed.",
        "",
    ]
    for network, description in NETWORKS.items():
        lines += [
            f"## {network}: {description}",
            "",
            "| optimizer | learning rate | paper | measured | spread | seeds | minutes a run |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for optimizer, paper in PAPER.items():
            cell = [
                record for record in records
                if (record["network"], record["optimizer"]) == (network, optimizer)
            ]
            quoted = f"{paper:.4f}" if network == "lenet" else "-"
            rate = mnist_lenet.OPTIMIZERS[optimizer][0]["learning_rate"]
            if not cell:
                lines.append(f"| {optimizer} | {rate} | {quoted} | not run | - | - | - |")
                continue
            accuracies = [record["test_accuracy"] for record in cell]
            seeds = ", ".join(str(record["seed"]) for record in cell)
            minutes = statistics.mean(record["seconds"] for record in cell) / 60
            spread = f"{min(accuracies):.4f} to {max(accuracies):.4f}" if len(cell) > 1 else "-"
            lines.append(
                f"| {optimizer} | {rate} | {quoted} | {statistics.mean(accuracies):.4f} | {spread} "
                f"| {seeds} | {minutes:.1f} |"
            )
        lines += [
            "",
            "Command of a run: `python -m lamb_tpu.train "
            f"--config=configs/mnist_lenet.py:network={network},optimizer=OPTIMIZER "
            "--config.seed=SEED --workdir=DIR`",
            "",
        ]
    machines = sorted({
        f"{record['devices']} x {record['device']}, {record['cores']} cores, "
        f"jax {record['jax']}, commit {record['commit']}"
        for record in records
    })
    lines += ["Machine and version: " + "; ".join(machines) + ". The machine was shared with other",
              "work, so minutes are an upper bound. Records: mnist.jsonl.", ""]
    return "\n".join(lines)


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

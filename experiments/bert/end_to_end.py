"""From text to a SQuAD score: a small BERT pre-trained in two phases, against random weights.

  python -m experiments.bert.end_to_end --data_dir=DATA --squad_dir=SQUAD --runs=DIR

Pre-trains configs/bert_pretrain.py:size=mini in both phases in DIR/pretrained (128 tokens, then
512), fine-tunes configs/bert_squad.py:size=mini from it and from random weights, and writes exact
match and F1 of both into experiments/bert/end_to_end.md. DATA holds the folders `train` and
`validation` that `python -m lamb_tpu.data.prepare_text` made, SQUAD the files of SQuAD v1.1. Every
run is resumable; complete ones are not run again.
"""

import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from configs import bert_pretrain, bert_squad
from lamb_tpu import cli
from lamb_tpu.errors import UserError
from lamb_tpu.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
STARTS = ("pretrained", "random")
RATE = 1e-3  # of both starts; not tuned


def pretrain_config(data_dir: str, examples: int) -> ConfigDict:
    """Both phases: `examples` of 128 tokens at batch 128, a twelfth of them of 512 at batch 32."""
    config = bert_pretrain.get_config("size=mini")
    config.data.dir = data_dir
    config.model.dtype = "float32"
    config.eval.batch_size = 64
    config.log.every = "10 steps"
    config.checkpoint.every = "10 percent"
    config.schedule.base_batch_size = 128
    first, second = config.phases.phase_1, config.phases.phase_2
    first.update({"batch_size": 128, "duration": f"{examples} examples"})
    second.update({"batch_size": 32, "duration": f"{examples // 12} examples"})
    for phase in (first, second):
        phase.optimizer.learning_rate = 4e-3
        phase.schedule.warmup = "5 percent"
    return config


def squad_config(
    squad_dir: str, train_file: str, start: str, pretrained: pathlib.Path, seed: int, epochs: float
) -> ConfigDict:
    """Fine-tuning from one of `STARTS`, windows of 192 tokens."""
    config = bert_squad.get_config("size=mini,batch=32")
    config.seed = seed
    config.data.dir = squad_dir
    config.data.train_split = train_file
    config.data.options.update({"max_length": 192, "document_stride": 64, "max_query": 32})
    config.data.options.vocab = str(pretrained / "phase_2" / "vocab.txt")
    config.model.dtype = "float32"
    config.duration = f"{epochs} epochs"
    config.eval.every = "50 percent"
    config.optimizer.learning_rate = RATE
    config.schedule.base_batch_size = 32
    config.checkpoint.every = "10 percent"
    if start == "pretrained":
        config.init_from = str(pretrained)
    return config


def collect(runs: pathlib.Path, seeds: Iterable[int]) -> list[dict[str, Any]]:
    """One record for each fine-tuning run of `seeds` below `runs`, all of them complete."""
    records = []
    for start in STARTS:
        for folder in (runs / f"{start}-seed{seed}" for seed in seeds):
            evals = read_records(folder / "metrics.jsonl", "eval")
            receipt = read_records(folder / "run.jsonl")[-1]
            trained = read_records(folder / "metrics.jsonl", "train")[-1]
            config = json.loads((folder / "config.json").read_text())
            records.append({
                "start": start, "seed": config["seed"], "updates": evals[-1]["step"],
                "exact_match": evals[-1]["exact_match"], "f1": evals[-1]["f1"],
                "loss": trained["loss"], "rate": config["optimizer.learning_rate"],
                "seconds": round(trained["seconds"], 1),
                **{key: receipt[key] for key in ("device", "devices", "cores", "jax", "commit")},
            })
    return records


def page(records: list[dict[str, Any]], phases: list[dict[str, Any]], command: str) -> str:
    """The Markdown page."""
    lines = [
        "# From text to SQuAD with a small BERT",
        "",
        "4 layers, 256 units, the public uncased vocabulary, float32. Pre-trained with LAMB on 190",
        "books in the public domain in two phases; fine-tuned with LAMB on the 11,877 questions",
        "of 44 articles of SQuAD v1.1's training set that were to be had (of 87,599), windows of",
        "192 tokens; measured on all 10,570 questions of its development set.",
        "",
        "| phase | tokens | batch | updates | held-out masked-word loss | accuracy | next sentence "
        "| minutes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {p['phase']} | {p['tokens']} | {p['batch']} | {p['updates']:,} | "
            f"{p['mlm_loss']:.3f} | {p['mlm_accuracy']:.2%} | {p['nsp_accuracy']:.2%} | "
            f"{p['seconds'] / 60:.0f} |"
            for p in phases
        ),
        "",
        "| fine-tuned from | exact match | F1 | by seed | updates | minutes a run |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for start in STARTS:
        found = [record for record in records if record["start"] == start]
        if not found:
            lines.append(f"| {start} | not run | - | - | - | - |")
            continue
        by_seed = ", ".join(f"{r['seed']}: {r['f1']:.2f}" for r in found)
        lines.append(
            f"| {start} | {statistics.mean(r['exact_match'] for r in found):.2f} | "
            f"{statistics.mean(r['f1'] for r in found):.2f} | {by_seed} | {found[0]['updates']:,} "
            f"| {statistics.mean(r['seconds'] for r in found) / 60:.0f} |"
        )
    machines = sorted({f"{r['devices']} x {r['device']}, {r['cores']} cores" for r in records})
    versions = sorted({f"jax {r['jax']} at commit {r['commit']}" for r in records})
    return "\n".join([
        *lines, "", f"Machine: {'; '.join(machines)}. Versions: {'; '.join(versions)}. Command: "
        f"`{command}`. Records: end_to_end.jsonl.", "",
    ])


def phase_records(pretrained: pathlib.Path) -> list[dict[str, Any]]:
    """What each phase of the pre-training came to."""
    records = []
    for folder in sorted(pretrained.glob("phase_*")):
        config = json.loads((folder / "config.json").read_text())
        last = read_records(folder / "metrics.jsonl", "eval")[-1]
        trained = read_records(folder / "metrics.jsonl", "train")[-1]
        records.append({
            "phase": folder.name, "tokens": config["data.options.sequence_length"],
            "batch": config["batch_size"], "updates": last["step"],
            **{key: last[key] for key in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")},
            "seconds": trained["seconds"],
        })
    return records


def main() -> None:
    """Runs what is missing and writes the page."""
    values = flags.FLAGS
    runs = pathlib.Path(values.runs).expanduser().absolute()
    for name in ("data_dir", "squad_dir"):
        if values[name].value is None:
            raise UserError(f"--{name} is missing; see --help")
    pretrained = runs / "pretrained"
    train(pretrain_config(values.data_dir, values.examples), pretrained, label="pre-training")
    seeds = list(map(int, values.seeds))
    for seed in seeds:
        for start in STARTS:
            config = squad_config(
                values.squad_dir, values.train_file, start, pretrained, seed, values.epochs
            )
            folder = runs / f"{start}-seed{seed}"
            train(config, folder, label=folder.name)
    records = collect(runs, seeds)
    (FOLDER / "end_to_end.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    command = (
        f"python -m experiments.bert.end_to_end --data_dir=DATA --squad_dir=SQUAD "
        f"--examples={values.examples} --epochs={values.epochs} --seeds={','.join(values.seeds)}"
    )
    text = page(records, phase_records(pretrained), command)
    (FOLDER / "end_to_end.md").write_text(text)
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/bert_end_to_end", "Folder of the runs.")
    flags.DEFINE_string("data_dir", None, "Folder with the prepared texts train and validation.")
    flags.DEFINE_string("squad_dir", None, "Folder with SQuAD v1.1's files.")
    flags.DEFINE_string("train_file", "train-v1.1.json", "The questions to train on.")
    flags.DEFINE_integer("examples", 98_304, "Examples of the first phase.", lower_bound=1536)
    flags.DEFINE_float("epochs", 2.0, "Of the fine-tuning.", lower_bound=0.01)
    flags.DEFINE_list("seeds", ["0"], "Seeds of the fine-tuning.")
    cli.run_main(main)

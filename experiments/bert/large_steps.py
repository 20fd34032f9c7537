"""BERT-Large itself: eight updates of its recipe on a CPU.

  python -m experiments.bert.large_steps --data_dir=DATA --runs=DIR

Trains configs/bert_pretrain.py:phase=1 at full size, batch 16 in 4 microbatches, and keeps a record
of each update in experiments/bert/large_steps.jsonl, from which the page large_steps.md is made.
DATA holds the folders `train` and `validation` that `python -m lamb_tpu.data.prepare_text` made;
the evaluation at the end reads all of `validation`, so a page of text is enough there. The
checkpoint has 3.8 GB.
"""

import json
import math
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict

from configs import bert_pretrain
from experiments.records import Record, evaluations, facts, machines, versions
from lamb_tpu import cli
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
UPDATES = 8
_KEPT = ("learning_rate", "loss", "mlm_loss", "nsp_loss", "grad_norm", "tokens_per_second")


def make_config(data_dir: str | None) -> ConfigDict:
    """The recipe of BERT-Large at a batch that two cores can do."""
    config = bert_pretrain.get_config("phase=1")
    config.data.dir = data_dir
    config.batch_size, config.accumulation_steps = 16, 4
    config.duration = f"{UPDATES} steps"
    config.optimizer.learning_rate = 0.002
    config.schedule.scaling = "identity"
    config.schedule.warmup = "2 steps"
    config.model.dtype = "float32"
    config.log.every = "1 steps"
    config.eval.batch_size = 16
    config.eval.every = config.checkpoint.every = "100 percent"
    return config


def collect(folder: pathlib.Path) -> list[Record]:
    """A record for each update of a complete run, and one for its evaluation."""
    config = json.loads((folder / "config.json").read_text())
    about = {
        "batch": config["batch_size"], "microbatches": config["accumulation_steps"],
        "tokens": config["data.options.sequence_length"], "seed": config["seed"],
        "vocabulary": config["model.vocab_size"], **facts(folder),
    }
    steps = read_records(folder / "metrics.jsonl", "train")
    last = evaluations(folder)[-1]
    return [
        *({"kind": "update", "update": each["step"]} | {k: each.get(k) for k in _KEPT}
          for each in steps),
        {"kind": "held out", "mlm_loss": last["mlm_loss"], "nsp_loss": last["nsp_loss"]} | about,
    ]


def page(records: Sequence[Record]) -> str:
    """The Markdown page."""
    *updates, held_out = records
    vocabulary = held_out["vocabulary"]
    rows = []
    for each in updates:
        speed = each["tokens_per_second"]
        rows.append(
            f"| {each['update']} | {each['learning_rate']:.6f} | {each['loss']:.3f} | "
            f"{each['mlm_loss']:.3f} | {each['nsp_loss']:.3f} | {each['grad_norm']:.2f} | "
            f"{'-' if speed is None else f'{speed:.0f}'} |"
        )
    return "\n".join([
        "# BERT-Large: real updates on a CPU",
        "",
        f"{held_out['tokens']} tokens, batch {held_out['batch']} in {held_out['microbatches']} "
        "microbatches, float32, dropout 0.1, LAMB.",
        "It shows that the whole recipe runs at this size, not what a recipe reaches: the batch is",
        "a two-thousandth of the paper's, and the rate was picked for so few updates.",
        "",
        "| update | learning rate | loss | masked words | next sentence | gradient's norm | "
        "tokens/s |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *rows,
        "",
        f"Guessing would have ln {vocabulary:,} + ln 2 = {math.log(vocabulary) + math.log(2):.2f}. "
        f"On held-out text the masked words",
        f"end at {held_out['mlm_loss']:.3f} and the next sentence at {held_out['nsp_loss']:.3f}.",
        "",
        f"Machine: {machines([held_out])}; {held_out['seconds'] / 60:.0f} minutes of training, "
        f"with other work on it. Seed {held_out['seed']}. Versions: {versions([held_out])}.",
        "",
        "Command: `python -m experiments.bert.large_steps --data_dir=DATA`. "
        "Records: large_steps.jsonl.",
        "",
    ])


def main() -> None:
    """Trains, unless it is done, and writes records and page."""
    folder = pathlib.Path(flags.FLAGS.runs).expanduser()
    train(make_config(flags.FLAGS.data_dir), folder, label="BERT-Large")
    records = collect(folder)
    (FOLDER / "large_steps.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    text = page(records)
    (FOLDER / "large_steps.md").write_text(text)
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/bert_large_steps", "The run's workdir.")
    flags.DEFINE_string("data_dir", None, "Folder with the prepared texts train and validation.")
    cli.run_main(main, required=("data_dir",))

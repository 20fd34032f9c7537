"""Batch scaling of a small BERT on books: LAMB untuned against AdamW by two rules.

  python -m experiments.bert.scaling --data_dir=DATA --runs=DIR
  python -m experiments.bert.scaling --runs=DIR --train=false

A BERT of 4 layers reads the same number of examples of 128 tokens at every batch from 64 to 4,096:
the range of 64 times that the LAMB paper has from 512 to 32,768, with its warm-up from 1/320 of the
run to 1/5. Each optimizer's rate is chosen at batch 64, from three by runs of a quarter of the
length, and carried to the others by a rule: for LAMB by the square root (that is LEGW), for AdamW
by the square root or linearly, both with LAMB's warm-up. DATA holds the folders `train` and
`validation` that `python -m lamb_tpu.data.prepare_text` made, with one vocabulary. Every cell is a
resumable run in a workdir of its own below DIR; those with a record are not run again. Records go
into scaling.jsonl, the table and the picture into scaling.md and scaling.png, in experiments/bert.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict

from configs import bert_pretrain
from experiments.bert import scaling_page
from experiments.records import Records, best_rates, evaluations, facts, integers, run_missing
from lamb_tpu import cli
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train

FOLDER = pathlib.Path(__file__).parent
BATCHES = (64, 256, 1024, 4096)
BASE_BATCH = BATCHES[0]
MICROBATCH = 64
# Shares of the run, as 1/320 ... 1/5 in the paper for batches 64 times apart.
WARMUP_PERCENT = {batch: 100 / 320 * batch / BASE_BATCH for batch in BATCHES}
# Tried at the smallest batch; the study goes on with the one that won.
GRIDS = {"lamb": (0.005, 0.01, 0.02), "adamw": (0.0005, 0.001, 0.002)}


class Cell(NamedTuple):
    """One run of the study."""

    optimizer: str
    scaling: str
    batch: int
    rate: float
    examples: int
    hidden_size: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's workdir."""
        return "-".join(map(str, self))


def tuning_cells(examples: int, hidden_size: int) -> list[Cell]:
    """The runs at the base batch that choose the rates of the study that reads `examples`."""
    return [
        Cell(optimizer, "sqrt", BASE_BATCH, rate, examples // 4, hidden_size, 0)
        for optimizer, grid in GRIDS.items() for rate in grid
    ]


def cells(
    examples: int, hidden_size: int, seeds: Iterable[int], rates: Mapping[str, float]
) -> list[Cell]:
    """All of the study; at the base batch AdamW's two rules are one and the same run."""
    lines = (("lamb", "sqrt"), ("adamw", "sqrt"), ("adamw", "linear"))
    found = [
        Cell(optimizer, scaling, batch, rates[optimizer], examples, hidden_size, seed)
        for seed in seeds for optimizer, scaling in lines for batch in BATCHES
        if (scaling, batch) != ("linear", BASE_BATCH)
    ]
    # The large batches first: they are what the study is about, and none waits for another.
    return sorted(found, key=lambda cell: -cell.batch)


def make_config(cell: Cell, data_dir: str | None) -> ConfigDict:
    """The recipe of one cell."""
    config = bert_pretrain.get_config(f"size=mini,phase=1,optimizer={cell.optimizer}")
    config.seed = cell.seed
    config.batch_size = cell.batch
    config.accumulation_steps = cell.batch // MICROBATCH
    config.duration = f"{cell.examples} examples"
    config.data.dir = data_dir
    # Words alone, and what few updates want: nothing is read twice, and the moments move on.
    config.data.options.next_sentence = False
    config.model.update({
        "heads": ("mlm",), "hidden_size": cell.hidden_size, "num_heads": cell.hidden_size // 64,
        "intermediate_size": 4 * cell.hidden_size, "dropout_rate": 0.0,
        "attention_dropout_rate": 0.0, "dtype": "float32",
    })
    config.optimizer.b2 = 0.98
    if data_dir is not None:
        vocabulary = Vocabulary.read(pathlib.Path(data_dir) / "train" / "vocab.txt")
        config.model.vocab_size = len(vocabulary)
    config.optimizer.learning_rate = cell.rate
    config.schedule.base_batch_size = BASE_BATCH
    config.schedule.scaling = cell.scaling
    config.schedule.decay_from = "warmup"  # as in all records; the recipe's counts from update 0
    config.schedule.warmup = f"{WARMUP_PERCENT[cell.batch]} percent"
    config.eval.batch_size = 256
    config.eval.every = "50 percent"
    config.checkpoint.every = "5 percent"
    config.log.every = f"{max(1, 256 // cell.batch)} steps"
    return config


def collect(runs: pathlib.Path, wanted: Iterable[Cell]) -> list[dict[str, Any]]:
    """One record for each complete run of `wanted` below `runs`."""
    records = []
    for cell in wanted:
        folder = runs / cell.name
        evals = evaluations(folder)
        if not evals or evals[-1]["step"] * cell.batch < cell.examples:
            continue
        config = json.loads((folder / "config.json").read_text())
        records.append({
            **cell._asdict(),
            "vocabulary": config["model.vocab_size"],
            "updates": evals[-1]["step"],
            "mlm_loss": evals[-1]["mlm_loss"],
            "mlm_accuracy": evals[-1]["mlm_accuracy"],
            "curve": [[e["step"] * cell.batch, round(e["mlm_loss"], 4)] for e in evals],
            "train_loss": read_records(folder / "metrics.jsonl", "train")[-1]["loss"],
            **facts(folder),
        })
    return records


def main() -> None:
    """Runs the missing cells and writes the page."""
    values = flags.FLAGS
    runs, seeds = pathlib.Path(values.runs).expanduser(), integers("seeds")

    def run(cell: Cell, folder: pathlib.Path) -> None:
        if values.data_dir is None:
            raise UserError("--data_dir is missing; give the folder with train and validation")
        train(make_config(cell, values.data_dir), folder, label=cell.name)

    records = Records(FOLDER / "scaling.jsonl", Cell._fields)
    how = records, runs, collect, run if values.train else None
    size = values.examples, values.hidden_size
    tuning = tuning_cells(*size)
    run_missing(tuning, *how)
    rates = best_rates(records.of(tuning), tuning, lambda record: record["mlm_loss"])
    wanted = cells(*size, seeds, rates)
    run_missing(wanted, *how)
    shown = records.of(wanted)
    text = scaling_page.page(shown, records.of(tuning))
    (FOLDER / "scaling.md").write_text(text)
    scaling_page.draw(shown, FOLDER / "scaling.png")
    print(text)


if __name__ == "__main__":
    flags.DEFINE_string("runs", "runs/bert_scaling", "Folder with one workdir a run.")
    flags.DEFINE_string("data_dir", None, "Folder with the prepared texts train and validation.")
    flags.DEFINE_integer("examples", 65_536, "Examples that each run reads.", lower_bound=4096)
    flags.DEFINE_integer("hidden_size", 256, "Units, of 64 a head.", lower_bound=64)
    flags.DEFINE_list("seeds", ["0"], "Seeds to train.")
    flags.DEFINE_bool("train", True, "Whether to train what is missing before collecting.")
    cli.run_main(main)

"""The page and the picture of the batch-scaling study."""

import pathlib
import statistics
from collections.abc import Sequence

from experiments import batch_plot
from experiments.records import Record, machines, versions

# What a line of the table is called, and how it is drawn, see `style.line`.
LINES = {
    ("lamb", "sqrt"): ("LAMB, square root", "lamb", 0),
    ("adamw", "sqrt"): ("AdamW, square root", "adamw", 0),
    ("adamw", "linear"): ("AdamW, linear", "adamw", 1),
}


def _line(records: Sequence[Record], line: tuple[str, str]) -> list[Record]:
    """A line's records; at the smallest batch, the base of both rules, AdamW's run is one."""
    base = min((record["batch"] for record in records), default=0)
    optimizer, scaling = line
    return [
        record for record in records
        if record["optimizer"] == optimizer
        and (record["scaling"] == scaling or record["batch"] == base)
    ]


def _mean(records: Sequence[Record], key: str) -> float:
    return statistics.mean(record[key] for record in records)


def page(records: Sequence[Record], tuning: Sequence[Record]) -> str:
    """The Markdown page: records of the study, of one length, and those that chose its rates."""
    examples, width = records[0]["examples"], records[0]["hidden_size"]
    lines = [
        "# A small BERT on books, batch 64 to 4,096",
        "",
        f"4 layers, {width} units, 128 tokens, 20 predictions, full sentences, no dropout, b2",
        f"0.98, float32; {examples:,} examples at every batch, microbatches of 64, less than an",
        "epoch. Trained on books in the public domain, vocabulary of",
        f"{records[0]['vocabulary']:,}; measured on WikiText-2's validation and test text, all of",
        "it, always with the same masks. Rates were chosen at batch 64 and carried by the rule;",
        "warm-up 1/320 of the run at 64 to 1/5 at 4,096, then linear decay, which in",
        "configs/bert_pretrain.py has since counted from update 0. Mean over the seeds.",
        "",
        "| batch | updates | "
        + " | ".join(f"{name}: rate | loss | accuracy" for name, *_ in LINES.values()) + " |",
        "| ---: | ---: |" + " ---: |" * (3 * len(LINES)),
    ]
    batches = sorted({record["batch"] for record in records})
    for batch in batches:
        cells = []
        for line in LINES:
            found = [r for r in _line(records, line) if r["batch"] == batch]
            if not found:
                cells += ["not run", "-", "-"]
                continue
            ratio = batch / batches[0]
            rate = found[0]["rate"] * (ratio if line[1] == "linear" else ratio**0.5)
            cells += [
                f"{rate:.3g}", f"{_mean(found, 'mlm_loss'):.3f}",
                f"{_mean(found, 'mlm_accuracy'):.2%}",
            ]
        lines.append(f"| {batch:,} | {examples // batch:,} | {' | '.join(cells)} |")
    lines += ["", "Held-out masked-word loss in nats, and accuracy. ![](scaling.png)", ""]
    lines += [
        "## How the rates were chosen",
        "",
        f"Batch {tuning[0]['batch']}, {tuning[0]['examples']:,} examples, seed 0, the same "
        "held-out text.",
        "",
        "| optimizer | rate | loss | accuracy |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {r['optimizer']} | {r['rate']} | {r['mlm_loss']:.3f} | {r['mlm_accuracy']:.2%} |"
            for r in sorted(tuning, key=lambda r: (r["optimizer"], r["rate"]))
        ),
        "",
    ]
    seeds = sorted({str(record["seed"]) for record in records})
    shown_runs = [*records, *tuning]
    minutes = sum(record["seconds"] for record in shown_runs) / 60
    lines += [
        f"Machine: {machines(shown_runs)}; {minutes:.0f} minutes of runs in all. Seeds: "
        f"{', '.join(seeds)}. Versions: {versions(shown_runs)}.",
        "",
        f"Command: `python -m experiments.bert.scaling --data_dir=DATA --examples={examples} "
        f"--hidden_size={width}`. Records: scaling.jsonl.",
        "",
    ]
    return "\n".join(lines)


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws held-out loss against the batch, and over the examples at the largest batch.

    Args:
      records: of the study.
      path: the PNG.
    """
    batch_plot.draw(
        [batch_plot.Line(*how, _line(records, line)) for line, how in LINES.items()],
        path, "mlm_loss", "held-out masked-word loss (nats)", "lower",
        f"BERT of 4 layers and {records[0]['hidden_size']} units, trained on 190 books, measured "
        "on WikiText-2",
        f"after {records[0]['examples']:,} examples", "examples read",
    )

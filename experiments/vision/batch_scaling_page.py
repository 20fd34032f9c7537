"""The page and the picture of the batch-scaling study on CIFAR-10."""

import pathlib
import statistics
from collections.abc import Sequence

from configs import cifar10 as recipe
from experiments import batch_plot
from experiments.records import Record, machines, shown, versions
from lamb_tpu import style
from lamb_tpu.optim.scaling import scale_learning_rate

# Names, and how they are drawn.
LINES = {name: style.OPTIMIZERS[name] for name in ("lamb", "lars", "momentum")}
_RULES = {"sqrt": "square root", "linear": "linear"}
_MODELS = {"davidnet": "DavidNet", "resnet18": "ResNet-18"}
_DATA = {
    "cifar10": "CIFAR-10's original pictures",
    "cifar10_jpeg": "CIFAR-10 as JPEGs of quality 75, which costs accuracy",
}


def _name(optimizer: str) -> str:
    """Returns the optimizer's name with its rule."""
    return f"{LINES[optimizer][0]}, {_RULES[recipe.OPTIMIZERS[optimizer][1]]}"


def _mean(records: Sequence[Record]) -> float | None:
    """Returns the mean over the seeds; None if a run diverged."""
    values = [record["accuracy"] for record in records]
    return None if None in values else statistics.mean(values)


def _accuracy(records: Sequence[Record]) -> str:
    """A row's cell."""
    values = [record["accuracy"] for record in records]
    if len(values) == 1 or None in values:
        diverged = f"{values.count(None)} of {len(values)} diverged"
        return diverged if len(values) > 1 else shown(values[0])
    return f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _table(records: Sequence[Record], base: int, optimizers: Sequence[str]) -> list[str]:
    lines = [
        "| batch | updates | "
        + " | ".join(f"{_name(optimizer)}: rate | accuracy" for optimizer in optimizers) + " |",
        "| ---: | ---: |" + " ---: |" * (2 * len(optimizers)),
    ]
    for batch in sorted({record["batch"] for record in records}):
        row, updates = [], 0
        for optimizer in optimizers:
            found = [r for r in records if (r["optimizer"], r["batch"]) == (optimizer, batch)]
            if not found:
                row += ["-", "not run"]
                continue
            rule = recipe.OPTIMIZERS[optimizer][1]
            rate = scale_learning_rate(rule, found[0]["rate"], base, batch)
            row += [f"{rate:.3g}", _accuracy(found)]
            updates = max(updates, *(record["updates"] for record in found))
        lines.append(f"| {batch:,} | {updates:,} | {' | '.join(row)} |")
    return lines


def _findings(records: Sequence[Record], optimizers: Sequence[str]) -> list[str]:
    """Lines on each line's loss from the smallest batch to the largest, and on the best there."""
    lines, ends = [], {}
    for optimizer in optimizers:
        found = [record for record in records if record["optimizer"] == optimizer]
        means = {
            batch: _mean([record for record in found if record["batch"] == batch])
            for batch in {record["batch"] for record in found}
        }
        first, last = min(means), max(means)
        text = f"- {_name(optimizer)}: {shown(means[first])} at {first:,}"
        if last > first:
            text += f", {shown(means[last])} at {last:,}"
            if None not in (means[first], means[last]):
                change = 100 * (means[last] - means[first])
                text += f", {abs(change):.2f} points {'more' if change > 0 else 'less'}"
        lines.append(f"{text}.")
        ends[optimizer] = means
    largest = max(record["batch"] for record in records)
    there = {o: means[largest] for o, means in ends.items() if means.get(largest) is not None}
    if len(there) > 1:
        best = max(there, key=there.__getitem__)
        lines.append(f"- Highest at {largest:,}: {_name(best)}, {there[best]:.4f}.")
    return lines


def _tuning(tuning: Sequence[Record], rates: dict[str, float]) -> list[str]:
    """The page's section on the choice of the rates."""
    lines = [
        "## How the rates were chosen",
        "",
        f"Batch {tuning[0]['batch']}, {tuning[0]['epochs']:g} epochs of nine tenths of the",
        "training pictures, measured on the other tenth, seed 0. The study goes on with the best.",
        "",
        "| optimizer | rate | accuracy |",
        "| --- | ---: | ---: |",
        *(
            f"| {LINES[r['optimizer']][0]} | {r['rate']:.4g} | {shown(r['accuracy'])} |"
            for r in sorted(tuning, key=lambda r: (r["optimizer"], r["rate"]))
        ),
        "",
    ]
    for optimizer, rate in rates.items():
        tried = sorted(r["rate"] for r in tuning if r["optimizer"] == optimizer)
        for end, word in ((tried[0], "smallest"), (tried[-1], "largest")):
            if rate == end:
                lines += [
                    f"{LINES[optimizer][0]}'s is the {word} one that was tried, so its best may "
                    "lie beyond.",
                    "",
                ]
    return lines


def page(records: Sequence[Record], tuning: Sequence[Record]) -> str:
    """The Markdown page: records of one study, and of the runs that chose its rates."""
    one, base = records[0], tuning[0]["batch"]
    rates = {record["optimizer"]: record["rate"] for record in records}
    optimizers = [optimizer for optimizer in LINES if optimizer in rates]
    network = _MODELS[one["model"]]
    if one["model"] == "davidnet":
        network += f" of width {one['width']} (64 as published)"
    warmup = ", ".join(
        f"{LINES[optimizer][0]} {recipe.OPTIMIZERS[optimizer][2] / recipe.EPOCHS:.0%}"
        for optimizer in optimizers
    )
    batches = sorted({record["batch"] for record in records})
    seeds = sorted({record["seed"] for record in records})
    shown_runs = [*records, *tuning]
    minutes = sum(record["seconds"] for record in shown_runs) / 60
    folder = " --data_dir=FOLDER" if one["data"] == "cifar10_jpeg" else ""
    return "\n".join([
        f"# CIFAR-10, batch {batches[0]:,} to {batches[-1]:,}",
        "",
        f"{network}, float32, {one['epochs']:g} epochs at every batch, of {_DATA[one['data']]}.",
        "Accuracy on all 10,000 test pictures after the last update. Rates were chosen at batch",
        f"{base} and carried by the rule that is named; warm-up in shares of the run: {warmup}.",
        f"Microbatches of {base}, which are the groups of BatchNorm; its running averages reach as",
        "many examples back at every batch. All else is as in configs/cifar10.py.",
        "",
        *_table(records, base, optimizers),
        "",
        "![](batch_scaling.png)",
        "",
        *_findings(records, optimizers),
        "",
        *(["One seed: small differences may be chance.", ""] if len(seeds) == 1 else []),
        *_tuning(tuning, rates),
        f"Machine: {machines(shown_runs)}; {minutes:.0f} minutes of runs in all. Seeds: "
        f"{', '.join(map(str, seeds))}. Versions: {versions(shown_runs)}.",
        "",
        f"Command: `python -m experiments.vision.batch_scaling --data={one['data']}{folder} "
        f"--model={one['model']} --width={one['width']} --epochs={one['epochs']:g} "
        f"--batches={','.join(map(str, batches))} --optimizers={','.join(optimizers)} "
        f"--seeds={','.join(map(str, seeds))}`. Records: batch_scaling.jsonl.",
        "",
    ])


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws accuracy against the batch, and over the epochs at the largest batch, into a PNG."""
    one = records[0]
    batch_plot.draw(
        [
            batch_plot.Line(
                _name(optimizer), optimizer, 0,
                [record for record in records if record["optimizer"] == optimizer],
            )
            for optimizer in LINES
        ],
        path, "accuracy", "test accuracy", "higher",
        f"{_MODELS[one['model']]} on CIFAR-10{' as JPEGs' * (one['data'] == 'cifar10_jpeg')}",
        f"after {one['epochs']:g} epochs", "epochs",
    )

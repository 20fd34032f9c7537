"""The page and the picture of the study on Tiny ImageNet."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from experiments import records as records_lib
from experiments.records import Record
from lamb_tpu import style

# What an optimizer is called, and how it is drawn.
OPTIMIZERS = {
    "lamb": style.OPTIMIZERS["lamb"],
    "momentum": style.OPTIMIZERS["momentum"]._replace(name="SGD with Nesterov's momentum"),
}


def verdict(records: Sequence[Record]) -> str:
    """A sentence: by how much the means differ, beside how much the seeds do."""
    accuracies = {
        name: [record["accuracy"] for record in records if record["optimizer"] == name]
        for name in OPTIMIZERS
    }
    ahead = statistics.mean(accuracies["lamb"]) - statistics.mean(accuracies["momentum"])
    told = f"LAMB's mean is {100 * abs(ahead):.1f} points {'above' if ahead >= 0 else 'below'}"
    seeds = min(map(len, accuracies.values()))
    if seeds < 2:
        return f"{told} SGD's, of one seed."
    spread = max(max(values) - min(values) for values in accuracies.values())
    few = ", too few of them to tell noise by" if seeds < 5 else ""
    return (
        f"{told} SGD's; the {seeds} seeds of one optimizer differ by up to {100 * spread:.1f} "
        f"points{few}."
    )


def page(
    records: Sequence[Record], tuning: Sequence[Record], grids: Mapping[str, Sequence[float]]
) -> str:
    """The Markdown page: the long runs, and the short ones that chose their rates from `grids`."""
    first = records[0]
    lines = [
        f"# Tiny ImageNet, 20 classes: ResNet-18 at batch {first['batch']}, "
        f"{first['epochs']} epochs",
        "",
        "Every tenth class of Tiny ImageNet: 10,000 pictures to train on, 1,000 to validate, JPEGs",
        f"of 64x64; random crops of at least a quarter at {first['pixels']} pixels and mirroring,",
        f"the central 7/8 in evaluation; stem '{first['stem']}'. Warm-up over a tenth of the run,",
        "linear decay to 0, label smoothing 0.1, groups of BatchNorm of up to 128, float32; the",
        "rest is of configs/imagenet_resnet.py. Validation accuracy after the last update.",
        "",
        "| optimizer | learning rate | mean | lowest to highest | by seed | minutes a run | machine"
        " |",
        "| --- | ---: | ---: | --- | --- | ---: | --- |",
    ]
    for name, (told, *_) in OPTIMIZERS.items():
        seeds = [record for record in records if record["optimizer"] == name]
        rate = f"{seeds[0]['rate']}" if seeds else "-"
        lines.append(f"| {told} | {rate} | {records_lib.seed_columns(seeds, 'accuracy')} |")
    accuracy = statistics.mean(record["accuracy"] for record in records)
    noise = (accuracy * (1 - accuracy) / 1000) ** 0.5
    lines += [
        "",
        verdict(records),
        f"Of 1,000 pictures an accuracy of {accuracy:.2f} has itself a standard error of",
        f"{100 * noise:.1f} points, and a difference of two runs one of up to "
        f"{100 * 2**0.5 * noise:.1f}.",
        "",
        "![](tiny_imagenet.png)",
        "",
        "## How the rates were chosen",
        "",
        f"{tuning[0]['epochs']} epochs, seed 0, by the same validation pictures.",
        "",
        "| optimizer | rate | accuracy | top-5 | loss |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {OPTIMIZERS[r['optimizer']][0]} | {r['rate']} | {r['accuracy']:.4f} | "
            f"{r['top5_accuracy']:.4f} | {r['loss']:.3f} |"
            for r in tuning
        ),
        "",
    ]
    for name, (told, *_) in OPTIMIZERS.items():
        chosen = {record["rate"] for record in records if record["optimizer"] == name}
        if chosen & {min(grids[name]), max(grids[name])}:
            lines += [f"The rate of {told} lies at the edge of what was tried.", ""]
    minutes = sum(record["seconds"] for record in (*records, *tuning)) / 60
    seeds = ",".join(map(str, sorted({record["seed"] for record in records})))
    options = " ".join(f"--{name}={first[name]}" for name in ("batch", "pixels", "stem", "epochs"))
    lines += [
        f"Command: `python -m experiments.vision.tiny_imagenet --data_dir=DATA {options} "
        f"--tuning_epochs={tuning[0]['epochs']} --seeds={seeds}`; {minutes:.0f} minutes of runs. "
        f"Versions: {records_lib.versions([*records, *tuning])}. Records: tiny_imagenet.jsonl.",
        "",
    ]
    return "\n".join(lines)


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws validation accuracy over the epochs, a line a run, into a PNG."""
    figure = style.figure(8, 4.8)
    axes = figure.subplots()
    for name, (told, color, marker) in OPTIMIZERS.items():
        for number, record in enumerate(r for r in records if r["optimizer"] == name):
            axes.plot(
                *zip(*record["curve"]), color=color, marker=marker, alpha=0.7,
                label=f"{told}, rate {record['rate']}" if number == 0 else None,
            )
    style.dress(
        axes, f"ResNet-18 on 20 classes of Tiny ImageNet, batch {records[0]['batch']}",
        "epochs of 10,000 pictures", "validation accuracy", "higher",
    )
    axes.legend()
    figure.savefig(path)

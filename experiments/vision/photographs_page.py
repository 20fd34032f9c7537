"""The page and the picture of the study on 400 photographs."""

import pathlib
from collections.abc import Sequence

from experiments import records as records_lib
from experiments.records import Record
from lamb_tpu import style

# What a network and its optimizer are called, and how they are drawn.
NETWORKS = {
    "efficientnet_b0": ("EfficientNet-B0", *style.OPTIMIZERS["rmsprop"]),
    "resnet50": ("ResNet-50", *style.OPTIMIZERS["lamb"]),
}


def page(records: Sequence[Record]) -> str:
    """The Markdown page of the runs of one kind."""
    first = records[0]
    lines = [
        "# 400 photographs of ImageNet, learnt by heart",
        "",
        "One original photograph of each of 400 classes of ImageNet, told apart among all 1,000.",
        "Training reads the JPEGs through the whole input path: random crops of at least half a",
        f"picture at {first['pixels']} pixels, random mirroring, uint8 to the device, normalised",
        "there. Measured are the same 400, cut to the centre, with BatchNorm's running averages; a",
        "run ends at the first evaluation above 0.9.",
        f"Batch {first['batch']}, linear decay of the rate to 0 at epoch {first['epochs']}, no",
        "label smoothing, dropout or stochastic depth, float32.",
        "",
        "| network | optimizer, peak rate | top-1 | top-5 | loss | updates | epoch | "
        "top-1 in training, last epoch | minutes | machine |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *(
            f"| {NETWORKS[r['network']][0]} | {NETWORKS[r['network']][1]}, {r['rate']:g} | "
            f"{r['accuracy']:.4f} | {r['top5_accuracy']:.4f} | "
            f"{r['loss']:.3f} | {r['updates']:,} | {r['ended_epoch']:g} | "
            f"{r['train_accuracy']:.4f} | {r['seconds'] / 60:.1f} | "
            f"{records_lib.machines([r])} |"
            for r in records
        ),
        "",
        *(
            f"{NETWORKS[r['network']][0]} did not get above 0.9 in its {r['epochs']} epochs."
            for r in records if not r["reached"]
        ),
        "![](photographs.png)",
        "",
    ]
    grey = [record["grey"] for record in records if record["grey"] is not None]
    if grey:
        lines += [f"Of the 400 files {grey[0]} are grey; they are read as colour.", ""]
    options = " ".join(
        f"--{name}={first[name]}" for name in ("pixels", "batch", "epochs", "seed")
    )
    lines += [
        f"Command: `python -m experiments.vision.photographs --data_dir=DATA {options}`. Versions: "
        f"{records_lib.versions(records)}. Records: photographs.jsonl.",
        "",
    ]
    return "\n".join(lines)


def draw(records: Sequence[Record], path: pathlib.Path) -> None:
    """Draws top-1 over the epochs, of the centres and in training, into a PNG."""
    figure = style.figure(8, 4.8)
    axes = figure.subplots()
    for record in records:
        network, optimizer, color, marker = NETWORKS[record["network"]]
        name = f"{network} by {optimizer}"
        axes.plot(*zip(*record["curve"]), color=color, marker=marker, label=f"{name}, centre")
        if record["train_curve"]:
            axes.plot(
                *zip(*record["train_curve"]), color=color, alpha=0.5, linestyle="--",
                label=f"{name}, random crops, in training",
            )
    axes.axhline(0.9, color=style.NEUTRAL, linewidth=0.8)
    style.dress(
        axes, "400 photographs of ImageNet, learnt by heart", "epochs of 400 photographs",
        "top-1 accuracy on the 400", "higher",
    )
    axes.set_ylim(0, 1)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)

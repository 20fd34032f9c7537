"""The demo's page, README.md, made of the records of its three studies.

  python -m experiments.demo.page
"""

import statistics
import textwrap
from collections.abc import Sequence

from configs import digits
from experiments.demo import batch_scaling, command, tune, tuned
from experiments.demo.plot import draw
from experiments.demo.study import Record, cell
from experiments.records import machines, versions
from lamb_tpu import data, style
from lamb_tpu.store.metrics import read_records

PAGE = command.HERE / "README.md"
_NAMES = {optimizer: style.OPTIMIZERS[optimizer].name for optimizer in tuned.OPTIMIZERS}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table whose first `left` columns are text."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * left}{'--:|' * (len(head) - left)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _scaled(records: Sequence[Record], factor: float) -> dict[str, list[Record]]:
    return batch_scaling.rows([r for r in records if r["rate_factor"] == factor])


def _rule_table(records: Sequence[Record]) -> list[str]:
    sizes = sorted({record["batch_size"] for record in records})
    return _table(
        ["optimizer, scaling", *(f"{size:,}" for size in sizes)],
        [
            [label, *(cell(batch_scaling.at(line, size)) for size in sizes)]
            for label, line in _scaled(records, 1.0).items()
        ],
    )


def _factor_table(records: Sequence[Record], size: int) -> list[str]:
    columns = [_scaled(records, factor) for factor in (0.25, 0.5, 1.0, 2.0)]
    return _table(
        ["optimizer, scaling", "a quarter", "half", "the rates above", "twice"],
        [
            [label, *(cell(batch_scaling.at(column[label], size)) for column in columns)]
            for label in columns[0]
        ],
    )


def _tuned_table(records: Sequence[Record]) -> list[str]:
    def shown(optimizer: str, batch: int) -> str:
        found = tuned.chosen(records, optimizer, batch)
        return f"{cell(found)} at {found[0]['learning_rate']:g}"

    return _table(
        ["optimizer: accuracy at rate", *(f"{batch:,}" for batch in tuned.BATCHES)],
        [
            [name, *(shown(optimizer, batch) for batch in tuned.BATCHES)]
            for optimizer, name in _NAMES.items()
        ],
    )


def _rates(records: Sequence[Record], optimizer: str) -> str:
    """'0.01 95.1, **0.02 96.0**, 0.04 diverged': the rates of one grid with their accuracy."""
    means = tune.mean_results(records)[optimizer]
    chosen = tune.choose(means)
    texts = []
    for rate in sorted({record["learning_rate"] for record in records}):
        found = [record["accuracy"] for record in records if record["learning_rate"] == rate]
        value = "diverged" if None in found else f"{100 * statistics.fmean(found):.2f}"
        texts.append(f"**{rate:g} {value}**" if rate == chosen else f"{rate:g} {value}")
    return ", ".join(texts)


def _grids(records: Sequence[Record]) -> list[str]:
    return _table(
        ["optimizer", "batch", "rate and accuracy, chosen in bold"],
        [
            [name, f"{batch:,}", _rates(
                [
                    record for record in records
                    if (record["part"], record["optimizer"], record["batch"])
                    == ("tune", optimizer, batch)
                ],
                optimizer,
            )]
            for optimizer, name in _NAMES.items() for batch in tuned.BATCHES
        ],
        left=3,
    )


def _base_rates(records: Sequence[Record]) -> list[str]:
    return _table(
        ["optimizer", "rate and accuracy, chosen in bold"],
        [
            [name, _rates([r for r in records if r["optimizer"] == optimizer], optimizer)]
            for optimizer, name in _NAMES.items()
        ],
        left=2,
    )


def _measured(records: Sequence[Record], file: str) -> str:
    seconds = sum(record["seconds"] for record in records)
    return (
        f"{len(records)} runs, {seconds:.0f} s of training in all, on {machines(records)}; "
        f"{versions(records)}. Records: {file}."
    )


def _levelled(records: Sequence[Record]) -> str:
    """Sentences on the gap between optimizers at the largest batch, beside that of the seeds."""
    largest = tuned.BATCHES[-1]
    values = {
        optimizer: [
            100 * record["accuracy"] for record in tuned.chosen(records, optimizer, largest)
        ]
        for optimizer in tuned.OPTIMIZERS
    }
    means = {optimizer: statistics.fmean(each) for optimizer, each in values.items()}
    first, last = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    seeds = max(max(each) - min(each) for each in values.values())
    return (
        f"At the full batch {_NAMES[first]} is {means[first] - means[last]:.1f} points above "
        f"{_NAMES[last]}; the seeds of one optimizer differ by up to {seeds:.1f}."
    )


def _other_choices(records: Sequence[Record], scaled: Sequence[Record]) -> list[str]:
    """A paragraph for each base rate of the config that the runs in `records` would not choose."""
    lines, full = [], max(record["batch_size"] for record in scaled)
    for optimizer, means in tune.mean_results(records).items():
        rate, best = digits.OPTIMIZERS[optimizer][0]["learning_rate"], tune.choose(means)
        if rate != best:
            with_best = [
                cell(batch_scaling.at(line, full))
                for line in _scaled(scaled, best / rate).values()
                if line and line[0]["optimizer"] == optimizer
            ]
            lines.append(
                f"**{_NAMES[optimizer]}'s {rate:g} is not what these runs choose.** It was chosen "
                "when the norms were summed in another order. Now its accuracy is "
                f"{100 * means[rate][0]:.2f} and that of {best:g} is {100 * means[best][0]:.2f}, "
                f"with the lower loss, {means[best][1]:.4f} against {means[rate][1]:.4f}. With "
                f"{best:g} the demo would have {' and '.join(with_best) or 'not measured'} at the "
                "full batch."
            )
    return lines


def _fill(*sentences: str) -> str:
    """One paragraph."""
    return textwrap.fill(
        " ".join(sentences), 100, break_long_words=False, break_on_hyphens=False
    )


def page() -> str:
    """The page as Markdown, from the records in this folder."""
    scaled, base, fair = (
        read_records(path) for path in (batch_scaling.KEPT, tune.KEPT, tuned.KEPT)
    )
    full = max(record["batch_size"] for record in scaled)
    held_out, tests = len(data.load("digits", tune.HELD_OUT)), len(data.load("digits", "test"))
    updates = {
        size: next(r["updates"] for r in scaled if r["batch_size"] == size) for size in (32, full)
    }
    momentum = batch_scaling.LINES[0][2]
    rate = batch_scaling.at(_scaled(scaled, 1.0)[momentum], 32)[0]["learning_rate"]
    half, twice = (_scaled(scaled, factor)[momentum] for factor in (0.5, 2.0))
    return "\n".join([
        "# Tune once at batch 32, then only scale",
        "",
        _fill(
            "`make demo`, or `python -m experiments.demo.batch_scaling`, trains a small network",
            "(64-128-64-10) on the embedded UCI digits for 30 epochs at batch 32, 128, 512 and the",
            f"whole training set: {updates[32]:,} updates at batch 32, {updates[full]:,} at the",
            "full batch. Every base rate was tuned at batch 32 alone; a rule carries it to the",
            "larger batches. Nothing is tuned there.",
        ),
        "",
        "![Test accuracy against batch size, rates scaled by a rule](batch_scaling.png)",
        "",
        f"Test accuracy in % ({tests} scans: one is {100 / tests:.2f} %), mean ± standard "
        "deviation "
        "of seeds 0, 1, 2:",
        "",
        *_rule_table(scaled),
        _fill(
            "**Momentum's row is about the rule, not about momentum.** Its best rate at batch 32,",
            f"{rate:g}, is next to the largest that is stable at all: twice of it already gives",
            f"{cell(batch_scaling.at(twice, 32))} there, because some runs fail. The linear rule",
            "multiplies it by 4 at batch 128, and those runs end at chance. A rate chosen with a",
            "margin goes further: half of it, scaled by the same rule, gives",
            f"{cell(batch_scaling.at(half, 128))} at batch 128 and",
            f"{cell(batch_scaling.at(half, 512))} at 512. What momentum can do at each batch is in",
            "the next table.",
        ),
        "",
        "## Each rate tuned at each batch",
        "",
        _fill(
            "`python -m experiments.demo.tuned --write`: no rule. At each batch each optimizer's",
            "rate is chosen from a grid in steps of 2, by the mean accuracy of 3 seeds on the",
            f"held-out fifth of the training scans ({held_out}). A grid whose best lies at its "
            "edge",
            "goes on there. Then 3 seeds are trained on all training scans, and the test scans "
            "give",
        ),
        "",
        *_tuned_table(fair),
        "![Test accuracy against batch size, rates tuned at each](tuned.png)",
        "",
        _fill(
            _levelled(fair), f"Warm-up is {tuned.WARMUP} and linear decay follows, for all alike;",
            "weight decay as in `configs/digits.py`.", _measured(fair, "tuned.jsonl"),
        ),
        "",
        _fill(
            "The grids, mean accuracy on the held-out scans in %. The largest batch is there "
            "all of",
            "the 80 % that is trained on:",
        ),
        "",
        *_grids(fair),
        "## How the base rates were chosen",
        "",
        _fill(
            "`python -m experiments.demo.tune --write`: seven rates for each optimizer in steps of",
            "2, 10 seeds each, batch 32, trained on the first 80 % of the training scans and "
            "judged",
            f"by accuracy on the other {held_out}, in %; of equals the lower loss decides:",
        ),
        "",
        *_base_rates(base),
        *(part for text in _other_choices(base, scaled) for part in (_fill(text), "")),
        _fill(
            "None lies at an edge of its grid. Weight decay (0.01; none for momentum) and warm-up",
            "were not tuned: 5 epochs for momentum, as in the paper on linear scaling; for "
            "LEGW 0.1",
            "epochs at batch 32, the share of the run that the LAMB paper has for ResNet-50, which",
            "becomes 4.5 epochs at the full batch.",
        ),
        "",
        "## What it does not show",
        "",
        _fill(
            "**The order at the full batch depends on the base rate.** With `--rate_factor=0.25`,",
            f"`0.5` and `2`, at {full:,} (each with an `--out` of its own):",
        ),
        "",
        *_factor_table(scaled, full),
        _fill(
            "**The settings were not all fixed in advance.** A first version had five times the",
            "warm-up under LEGW and preferred, among rates about equally accurate, the one "
            "with the",
            "lowest loss. At the full batch AdamW under LEGW was then ahead of LAMB. The "
            "warm-up was",
            "set to the paper's share, the choice to accuracy alone with 10 seeds instead of "
            "5, and",
            "all rates were tuned again, before any larger batch was run with them.",
        ),
        "",
        _fill("The demo and its factors:", _measured(scaled, "batch_scaling.jsonl")),
        _fill("The base rates:", _measured(base, "tune.jsonl")),
        "",
    ])


def write() -> None:
    """Writes the page and its pictures, where all three studies have records."""
    if all(path.exists() for path in (batch_scaling.KEPT, tune.KEPT, tuned.KEPT)):
        scaled = _scaled(read_records(batch_scaling.KEPT), 1.0)
        draw(scaled, command.HERE / batch_scaling.PLOT, batch_scaling.TITLE)
        draw(tuned.rows(tuned.kept()), command.HERE / tuned.PLOT, tuned.TITLE)
        PAGE.write_text(page())


if __name__ == "__main__":
    write()

"""Uses LEGW to scale a learning rate and warm-up from a base batch size to other batch sizes."""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lamb_tpu import cli, terminal
from lamb_tpu.errors import UserError, out_of_range

if TYPE_CHECKING:  # --help does not need these slow imports
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOTE = """\
LEGW (arXiv:1901.08256): for k times the batch size, use sqrt(k) times the
learning rate and k times the warm-up epochs. The warm-up is linear from 0 and
has the same number of updates at every batch size. All other settings stay as
tuned at the base batch size; durations keep their number of epochs. A recipe
does the same with --config.schedule.scaling=legw. Then give the settings of the
base batch size in config.schedule.base_batch_size, config.schedule.warmup and
config.optimizer.learning_rate.

examples:
  python -m lamb_tpu.legw --base-batch=128 --base-lr=0.1 \\
      --base-warmup-epochs=0.1 --batches=128..8192 --num-examples=60000 \\
      --epochs=25 --output=legw.svg
  python -m lamb_tpu.legw --base-batch=256 --base-lr=0.001 \\
      --base-warmup-epochs=0.5 --batches=256,1000,8192 --num-examples=1281167
"""
_MOST = 10**6  # limit of a learning rate or a number of epochs


class ScaledBatch(NamedTuple):
    """The LEGW settings of a batch size.

    `updates` is the length of the training in updates, or None if it is unknown. `warmup_updates`
    and `updates_per_epoch` may be fractional.
    """

    batch: int
    learning_rate: float
    warmup_epochs: float
    warmup_updates: float
    updates_per_epoch: float
    updates: int | None


def rows(
    base_batch: int,
    base_rate: float,
    base_warmup_epochs: float,
    batches: Sequence[int],
    num_examples: int,
    epochs: float | None = None,
) -> list[ScaledBatch]:
    """Returns the LEGW settings of each batch size.

    `num_examples` is the number of examples per epoch; `epochs` is the length of the training, if it
    is known.
    """
    from lamb_tpu.optim import durations, scaling

    length = None if epochs is None else durations.parse(f"{epochs} epochs")
    scaled = []
    for batch in batches:
        rate, warmup = scaling.legw(base_rate, base_warmup_epochs, base_batch, batch)
        per_epoch = num_examples / batch
        updates = None if length is None else length.whole_steps(batch, num_examples)
        scaled.append(
            ScaledBatch(
                batch=batch,
                learning_rate=rate,
                warmup_epochs=warmup,
                warmup_updates=warmup * per_epoch,
                updates_per_epoch=per_epoch,
                updates=updates,
            )
        )
    return scaled


def table(scaled: Sequence[ScaledBatch]) -> str:
    """Formats the rows as lines with aligned columns."""
    head = ["batch", "rate", "warm-up epochs", "warm-up updates", "updates/epoch"]
    if scaled[0].updates is not None:
        head.append("updates")
    lines = [
        [
            f"{row.batch:,}",
            f"{row.learning_rate:.6g}",
            f"{row.warmup_epochs:.6g}",
            _count(row.warmup_updates),
            _count(row.updates_per_epoch),
            *([] if row.updates is None else [f"{row.updates:,}"]),
        ]
        for row in scaled
    ]
    return terminal.columns([head, *lines], right=range(len(head)))


def _count(value: float) -> str:
    """Formats a number of updates, with one decimal unless it is an integer."""
    rounded = round(value, 1)
    return f"{rounded:,.0f}" if rounded == int(rounded) else f"{rounded:,.1f}"


def warnings(scaled: Sequence[ScaledBatch], epochs: float | None) -> list[str]:
    """Returns a warning for each batch size whose warm-up is longer than the training."""
    return [
        f"at batch {row.batch:,} the warm-up of {row.warmup_epochs:.6g} epochs is longer than the "
        f"training of {epochs:.6g} epochs, so the rate never reaches {row.learning_rate:.6g}"
        for row in scaled
        if epochs is not None and row.warmup_epochs > epochs
    ]


def curve_figure(scaled: Sequence[ScaledBatch], epochs: float | None = None) -> "Figure":
    """Plots each batch size's learning rate twice: against epochs, and its first part against updates."""
    from lamb_tpu import style

    end = epochs or 1.25 * max(row.warmup_epochs for row in scaled) or 1.0
    # Twice the warm-up, which has the same number of updates at every batch size.
    first_updates = 2 * scaled[0].warmup_updates or scaled[0].updates_per_epoch * end
    split = style.chunks(scaled)
    figure, panels = style.stacked(
        [5.4] * len(split), [[f"{row.batch:,}" for row in drawn] for drawn in split]
    )
    first: tuple[Axes, Axes] | None = None
    for panel, drawn in zip(panels, split, strict=True):
        by_epoch, by_update = panel.subplots(2, 1)
        first = first or (by_epoch, by_update)
        for axes, of in zip((by_epoch, by_update), first):
            if axes is not of:
                axes.sharex(of)
                axes.sharey(of)
        if len(split) > 1:
            panel.suptitle(f"batches {drawn[0].batch:,} to {drawn[-1].batch:,}", fontsize=11)
        for number, row in enumerate(drawn):
            look = style.numbered(number)
            for axes, length, warmup in (
                (by_epoch, end, row.warmup_epochs),
                (by_update, min(first_updates, row.updates_per_epoch * end), row.warmup_updates),
            ):
                ramp = min(warmup, length)
                reached = row.learning_rate * (ramp / warmup if warmup else 1)
                axes.plot([0, ramp, length], [0, reached, reached], **look, label=f"{row.batch:,}")
        style.dress(by_epoch, "by epochs", "epochs", "learning rate")
        style.dress(by_update, "the first updates", "completed updates", "learning rate")
        style.legend_below(panel, title="batch")
    return figure


def read_batches(text: str) -> list[int]:
    """Parses batch sizes: a range of doublings such as '20..640', or a list such as '20,100,640'."""
    first, is_range, last = text.partition("..")
    if not is_range:
        return [_whole("--batches", item) for item in text.split(",")]
    low, high = _whole("--batches", first), _whole("--batches", last)
    scaled = [low]
    while scaled[-1] < high:
        scaled.append(2 * scaled[-1])
    if scaled[-1] != high:
        below = f"{low}..{scaled[-2]}, or " if len(scaled) > 1 else ""
        problem = f"is not a range, because doubling {low} does not reach {high}"
        raise UserError("--batches", text, problem, f"give {below}a list of batches")
    return scaled


def _whole(flag: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9][0-9_]{0,17}\s*", text) or int(text) < 1:
        problem = "is not a whole number of examples above 0"
        examples = "20..640 or 20,100,640" if flag == "--batches" else "128"
        raise UserError(flag, text, problem, f"give a value such as {examples}")
    return int(text)


def _number(flag: str, text: str, least: str = "above 0") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST or (value == 0 and least == "above 0"):
        raise out_of_range(flag, text, f"a number {least} and at most a million")
    return value


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.legw", epilog=_NOTE, description=__doc__ or ""
    )
    for flag, text in (
        ("--base-batch=N", "tuned batch size, in examples"),
        ("--base-lr=RATE", "peak learning rate tuned at that batch size"),
        (
            "--base-warmup-epochs=EPOCHS",
            "warm-up tuned at that batch size; may be fractional; 0: none",
        ),
        (
            "--batches=FIRST..LAST",
            "batch sizes to scale to: doublings, or a list such as 20,100,640",
        ),
        ("--num-examples=N", "examples per epoch; for text streams, batch size times updates"),
    ):
        parser.option(flag, text, required=True)
    parser.option("--epochs=EPOCHS", "length of the training")
    parser.option("--output=FILE.svg", "figure of the curves")
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Prints the table and the warnings, and draws the curves if --output is given."""
    base = _whole("--base-batch", options.base_batch)
    rate = _number("--base-lr", options.base_lr)
    warmup = _number("--base-warmup-epochs", options.base_warmup_epochs, "of at least 0")
    batches = read_batches(options.batches)
    examples = _whole("--num-examples", options.num_examples)
    epochs = None if options.epochs is None else _number("--epochs", options.epochs)
    if max(batches) > examples:
        problem = f"is larger than an epoch (--num-examples={examples})"
        raise UserError("--batches", max(batches), problem, f"use at most {examples}")
    if options.output is not None:
        from lamb_tpu import style
        from lamb_tpu.files import writing

        path = style.figure_path(options.output, "--output", ".svg")
    scaled = rows(base, rate, warmup, batches, examples, epochs)
    print(table(scaled))
    for text in warnings(scaled, epochs):
        print(terminal.fit(f"warning: {text}"), file=sys.stderr)
    if options.output is not None:
        writing.replace(path, style.svg(curve_figure(scaled, epochs)), "--output")
        print(path)


if __name__ == "__main__":
    cli.run_command(lambda words: main(_parse(words)))

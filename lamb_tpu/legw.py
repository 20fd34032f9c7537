"""Carries a learning rate and a warm-up from one batch to others by LEGW, as a table and curves."""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lamb_tpu import cli, terminal
from lamb_tpu.errors import UserError

if TYPE_CHECKING:  # --help does without what this imports
    from matplotlib.figure import Figure

_NOTE = """\
LEGW (arXiv:1901.08256): for k times the batch, sqrt(k) times the rate and k
times the warm-up epochs. The warm-up, linear from 0, has as many updates at
every batch. All else stays as it was tuned at the base batch, in epochs. A
recipe does the same with --config.schedule.scaling=legw, and then
config.schedule.base_batch_size, config.schedule.warmup and
config.optimizer.learning_rate are those of the base batch.

examples:
  python -m lamb_tpu.legw --base-batch=128 --base-lr=0.1 \\
      --base-warmup-epochs=0.1 --batches=128..8192 --num-examples=60000 \\
      --epochs=25 --output=legw.svg
  python -m lamb_tpu.legw --base-batch=256 --base-lr=0.001 \\
      --base-warmup-epochs=0.5 --batches=256,1000,8192 --num-examples=1281167
"""
_MOST = 10**6  # of a rate or a number of epochs


class Row(NamedTuple):
    """A batch with what LEGW gives it.

    Attributes:
      batch: examples in an update.
      learning_rate: the peak.
      warmup_epochs: length of the warm-up in epochs.
      warmup_updates: the same in updates; may be a fraction.
      updates_per_epoch: may be a fraction.
      updates: of the whole training, rounded up; None if its length is not known.
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
) -> list[Row]:
    """Returns a row for each batch.

    Args:
      base_batch, base_rate, base_warmup_epochs: the setting that was tuned.
      batches: the batches to carry it to, in examples.
      num_examples: examples in an epoch.
      epochs: length of the training; None if it is not known.
    """
    from lamb_tpu.optim import durations, scaling

    length = None if epochs is None else durations.parse(f"{epochs} epochs")
    found = []
    for batch in batches:
        rate, warmup = scaling.legw(base_rate, base_warmup_epochs, base_batch, batch)
        per_epoch = num_examples / batch
        updates = None if length is None else length.whole_steps(batch, num_examples)
        found.append(Row(batch, rate, warmup, warmup * per_epoch, per_epoch, updates))
    return found


def table(found: Sequence[Row]) -> str:
    """Returns the rows as lines with aligned columns."""
    head = ["batch", "rate", "warm-up epochs", "warm-up updates", "updates/epoch"]
    if found[0].updates is not None:
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
        for row in found
    ]
    return terminal.columns([head, *lines], right=range(len(head)))


def _count(value: float) -> str:
    """Returns a number of updates, with one decimal unless it is whole."""
    rounded = round(value, 1)
    return f"{rounded:,.0f}" if rounded == int(rounded) else f"{rounded:,.1f}"


def warnings(found: Sequence[Row], epochs: float | None) -> list[str]:
    """Returns a sentence for each batch whose warm-up does not end within the training."""
    return [
        f"at batch {row.batch:,} the warm-up of {row.warmup_epochs:.6g} epochs is longer than the "
        f"training of {epochs:.6g}, so the rate never reaches {row.learning_rate:.6g}"
        for row in found
        if epochs is not None and row.warmup_epochs > epochs
    ]


def picture(found: Sequence[Row], epochs: float | None = None) -> "Figure":
    """Plots the rate of every batch against epochs, and its warm-up against updates.

    Without `epochs` the curves end behind the longest warm-up.
    """
    from lamb_tpu import style

    end = epochs or 1.25 * max(row.warmup_epochs for row in found) or 1.0
    figure = style.figure(10, 4.4)
    by_epoch, by_update = figure.subplots(1, 2)
    # Twice the warm-up, which has as many updates at every batch.
    first_updates = 2 * found[0].warmup_updates or found[0].updates_per_epoch * end
    for number, row in enumerate(found):
        color = style.numbered(number)["color"]
        for axes, length, warmup, label in (
            (by_epoch, end, row.warmup_epochs, f"{row.batch:,}"),
            (by_update, min(first_updates, row.updates_per_epoch * end), row.warmup_updates, None),
        ):
            ramp = min(warmup, length)
            reached = row.learning_rate * (ramp / warmup if warmup else 1)
            axes.plot([0, ramp, length], [0, reached, reached], color=color, label=label)
    style.dress(by_epoch, "by epochs", "epochs", "learning rate")
    style.dress(by_update, "the first updates", "completed updates", "learning rate")
    figure.legend(
        loc="outside lower center", ncols=min(len(found), 8), frameon=False, title="batch"
    )
    return figure


def read_batches(text: str) -> list[int]:
    """Reads '20..640', the doublings from 20 to 640, or a list such as '20,100,640'.

    Raises:
      UserError: something else, or a range whose end is not reached by doubling.
    """
    first, is_range, last = text.partition("..")
    if not is_range:
        return [_whole("--batches", part) for part in text.split(",")]
    low, high = _whole("--batches", first), _whole("--batches", last)
    found = [low]
    while found[-1] < high:
        found.append(2 * found[-1])
    if found[-1] != high:
        below = f", such as {low}..{found[-2]}" if len(found) > 1 else ""
        raise UserError(
            f"--batches is {text!r}; doubling {low} does not reach {high}: give an end that it "
            f"reaches{below}, or a list of batches"
        )
    return found


def _whole(flag: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9][0-9_]{0,17}\s*", text) or int(text) < 1:
        raise UserError(
            f"{flag} has {text!r}; it must be a whole number of examples above 0"
            + (", a list of such, or a range such as 20..640" if flag == "--batches" else "")
        )
    return int(text)


def _number(flag: str, text: str, least: str = "above 0") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST or (value == 0 and least == "above 0"):
        raise UserError(f"{flag} is {text!r}; it must be a number {least}, at most a million")
    return value


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.legw",
        epilog=_NOTE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--base-batch",
        required=True,
        metavar="N",
        help="batch at which the rate was tuned, in examples",
    )
    parser.add_argument(
        "--base-lr", required=True, metavar="RATE", help="peak learning rate tuned there"
    )
    parser.add_argument(
        "--base-warmup-epochs",
        required=True,
        metavar="EPOCHS",
        help="warm-up there; fractions are meant, 0 is none",
    )
    parser.add_argument(
        "--batches",
        required=True,
        metavar="FIRST..LAST",
        help="batches to carry it to, by doubling, or a list: 20,100,640",
    )
    parser.add_argument(
        "--num-examples",
        required=True,
        metavar="N",
        help="examples in an epoch; of streams of text, batch times updates",
    )
    parser.add_argument("--epochs", metavar="EPOCHS", help="length of the training")
    parser.add_argument("--output", metavar="FILE.svg", help="picture of the curves")
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    """Prints the table and the warnings, and draws the curves if asked to."""
    base = _whole("--base-batch", options.base_batch)
    rate = _number("--base-lr", options.base_lr)
    warmup = _number("--base-warmup-epochs", options.base_warmup_epochs, "of at least 0")
    batches = read_batches(options.batches)
    examples = _whole("--num-examples", options.num_examples)
    epochs = None if options.epochs is None else _number("--epochs", options.epochs)
    if max(batches) > examples:
        raise UserError(
            f"--batches has {max(batches)}, more than the --num-examples={examples} of an epoch; "
            "it must be at most that"
        )
    if options.output is not None:
        from lamb_tpu import style
        from lamb_tpu.files import buckets, writing

        path = buckets.local(options.output, "--output")
        style.check_picture(path, "--output", ".svg")
    found = rows(base, rate, warmup, batches, examples, epochs)
    print(table(found))
    for text in warnings(found, epochs):
        print(terminal.fit(f"warning: {text}"), file=sys.stderr)
    if options.output is not None:
        with writing.checked(path, "--output"):
            writing.write(path, style.svg(picture(found, epochs)).encode())
        print(path)


if __name__ == "__main__":
    given = sys.argv[1:]
    del sys.argv[1:]  # the flags of absl, of which there are none here
    cli.run_main(lambda: main(_parse(given)))

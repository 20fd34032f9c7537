"""Turns raw text into shards of WordPiece ids, once, before pre-training.

    python -m lamb_tpu.prepare_text --input='books/**/*.md' --vocab=vocab.txt --output=DIR

If the command is killed, run it again to continue.
"""

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from rich import progress as bars
from rich.console import Console

from lamb_tpu import limits, terminal
from lamb_tpu.data.text.preparation import Progress, Settings, prepare_text
from lamb_tpu.data.text.sentences import SENTENCE_RULES
from lamb_tpu.errors import UserError, printable

_SECONDS_BETWEEN_LINES = 10.0
_EXAMPLES = """\
examples:
  text files, one document each, with BERT's vocabulary:
    %(prog)s --input='books/**/*.txt' \\
        --vocab=vocab.txt --output=DATA/books
  one file with many articles, such as WikiText:
    %(prog)s --input=wiki.valid.raw \\
        --documents=titles --vocab=vocab.txt --output=DATA/held_out
  Wikipedia, prepared by TFDS, with a vocabulary trained on it:
    %(prog)s --input=tfds:wikipedia/20230601.en \\
        --train-vocab=30522 --output=DATA/wikipedia

If the command is killed, run it again to continue. The output is the same for
any number of processes. To train on one folder and evaluate on another:
  python -m lamb_tpu.train --config=configs/bert_pretrain.py --workdir=DIR \\
      --config.data.dir=DATA \\
      --config.data.train_split=books --config.data.eval_split=held_out
"""


class _ProgressDisplay:
    """Reports progress: a bar on a terminal, otherwise a line at most every ten seconds."""

    def __init__(self) -> None:
        self._start = self._last_line = time.monotonic()
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar = bars.Progress(
            "text",
            bars.BarColumn(bar_width=None),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            "left",
            bars.TimeRemainingColumn(),
            console=self._console,
            # By default rich discards updates after 30 s, but a shard can take longer.
            speed_estimate_period=1e9,
            disable=not self._console.is_terminal,
        )
        self._task: bars.TaskID | None = None

    def __enter__(self) -> "_ProgressDisplay":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        # The task is added with the first report, which includes the bytes done by earlier runs.
        if self._task is None:
            self._task = self._bar.add_task("text", completed=progress.done)
            if progress.resumed:
                self.log(f"{progress.resumed / 1e6:,.1f} MB were done by an earlier run")
        self._bar.update(self._task, completed=progress.done, total=progress.total)
        now = time.monotonic()
        fresh = progress.done - progress.resumed
        if fresh and self._bar.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            # Counts only this run's bytes, because the elapsed time excludes earlier runs.
            rate = fresh / (now - self._start)
            self.log(
                f"{progress.done / 1e6:,.1f} of {progress.total / 1e6:,.1f} MB; "
                f"{rate / 1e6:.2f} MB/s, {(progress.total - progress.done) / rate:,.0f} s left"
            )

    def log(self, text: str) -> None:
        self._console.print(printable(text), markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 for a user error, or 130 for Ctrl-C."""
    try:
        return _run(_parse(arguments))
    except (UserError, OSError) as error:  # OSError: a full disk, a folder without permission
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; start the same command again to continue", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    given["vocab"] = options.vocab and os.path.expanduser(options.vocab)
    with _ProgressDisplay() as progress:
        manifest = prepare_text(
            options.input, options.output, Settings(**given), options.processes, progress
        )
    # A summary, then the flags for training on this text.
    counts = manifest["counts"]
    progress.log(
        f"{options.output} holds {_number(counts['documents'], 'document')}, "
        f"{_number(counts['sentences'], 'sentence')} and {_number(counts['tokens'], 'token')} in "
        f"{_number(len(manifest['shards']), 'shard')}; "
        f"{counts['unknown_tokens'] / counts['tokens']:.2%} of the tokens are unknown"
    )
    folder = pathlib.Path(options.output).expanduser().absolute()
    progress.log(
        f"to train on it: --config.data.dir={folder.parent} "
        f"--config.data.train_split={folder.name} "
        f"--config.model.vocab_size={manifest['vocabulary']['size']}"
    )
    # Warns about text that was dropped or cut: the cause may be a wrong rule or a damaged file.
    for key, text in (
        ("empty_documents", "document(s) were empty and were left out"),
        ("broken_lines", "line(s) were not UTF-8; their unreadable bytes were left out"),
        ("cut_sentences", "sentence(s) were too long and were cut"),
    ):
        if counts[key]:
            print(f"warning: {counts[key]:,} {text}", file=sys.stderr)
    return 0


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.prepare_text",
        description=(__doc__ or "").partition("\n")[0],
        epilog=_EXAMPLES,
    )
    option = parser.option
    option(
        "--input=GLOB",
        "a pattern of text files, in which ** matches folders of any depth; can be given several "
        "times. Or tfds:NAME[/CONFIG][:SPLIT], a prepared TFDS set whose feature `text` has one "
        "document in each example",
        action="append",
        required=True,
    )
    option(
        "--output=DIR", "folder to write: shards of ids, vocab.txt, manifest.json", required=True
    )
    option("--vocab=FILE", "a vocab.txt, one token in each line, such as BERT's")
    option(
        "--train-vocab=N",
        "instead of --vocab: train a vocabulary of at most N tokens on the inputs",
        type=terminal.count(0, 10**7),
    )
    option("--cased", "keep case and accents", action="store_true")
    option(
        "--documents=RULE",
        "what a document is. file (the default): an entire file; blank-lines: the text between "
        "blank lines, as in the original BERT code; titles: the text from a line `= Title =` on, as "
        "in WikiText",
        default="file",
    )
    option(
        f"--sentences={'|'.join(SENTENCE_RULES)}",
        "what a sentence is. split (the default): part of a line, split by rules; lines: an entire "
        "line",
        default="split",
    )
    option(
        "--shard-bytes=N",
        "approximate size of a shard's text in bytes; each shard is made by one process "
        "(default: %(default)s)",
        type=terminal.count(),
        default=16 * 2**20,
    )
    option(
        "--processes=N",
        "number of processes (default: one for each CPU core)",
        type=terminal.count(0, limits.MAX_PROCESSES),
    )
    option("--data-dir=DIR", "folder of prepared TFDS sets")
    return parser.parse_all(arguments)


if __name__ == "__main__":
    terminal.run_and_exit(main)

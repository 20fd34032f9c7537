"""Turns raw text into shards of WordPiece ids, once, before pre-training.

    python -m lamb_tpu.data.prepare_text --input='books/**/*.md' --vocab=vocab.txt --output=DIR

After a kill, the same command continues.
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from lamb_tpu import terminal
from lamb_tpu.data.text.preparation import Progress, Settings, prepare_text
from lamb_tpu.data.text.sentences import SENTENCE_RULES
from lamb_tpu.errors import UserError
from lamb_tpu.terminal import fit

_SECONDS_BETWEEN_LINES = 10.0
_EXAMPLES = """\
examples:
  files, each a document, by BERT's own vocabulary:
    %(prog)s --input='books/**/*.txt' \\
        --vocab=vocab.txt --output=DATA/books
  a file of many articles, of WikiText:
    %(prog)s --input=wiki.valid.raw \\
        --documents=titles --vocab=vocab.txt --output=DATA/held_out
  Wikipedia, which TFDS prepared, by a vocabulary made of it:
    %(prog)s --input=tfds:wikipedia/20230601.en \\
        --train-vocab=30522 --output=DATA/wikipedia

After a kill, the same command continues. The output is the same for any number
of processes. Then train on one folder and evaluate on another:
  python -m lamb_tpu.train --config=configs/bert_pretrain.py --workdir=DIR \\
      --config.data.dir=DATA \\
      --config.data.train_split=books --config.data.eval_split=held_out
"""


class _Shown:
    """Progress: a bar on a terminal, elsewhere a line at most every ten seconds."""

    def __init__(self) -> None:
        self._start = self._last_line = time.monotonic()
        columns = (
            TextColumn("text"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._console = Console(highlight=False, soft_wrap=True)
        terminal = self._console.is_terminal
        # By default rich forgets updates after 30 s, and a shard can take longer.
        self._bar = Bar(
            *columns, console=self._console, speed_estimate_period=1e9, disable=not terminal
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "_Shown":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        # The task is added at the first report, which has the bytes that are already done.
        if self._task is None:
            self._task = self._bar.add_task("text", completed=progress.done)
            if progress.resumed:
                self.tell(f"{progress.resumed / 1e6:,.1f} MB were done by an earlier run")
        self._bar.update(self._task, completed=progress.done, total=progress.total)
        now = time.monotonic()
        fresh = progress.done - progress.resumed
        if fresh and self._bar.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            # Of the bytes of this run; those of an earlier run took none of its time.
            rate = fresh / (now - self._start)
            self.tell(
                f"{progress.done / 1e6:,.1f} of {progress.total / 1e6:,.1f} MB; "
                f"{rate / 1e6:.2f} MB/s, {(progress.total - progress.done) / rate:,.0f} s left"
            )

    def tell(self, text: str) -> None:
        self._console.print(text, markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 for a user's mistake, or 130 for Ctrl-C."""
    try:
        return _run(_parse(arguments))
    except (UserError, OSError) as error:  # of the system: a full disk, a folder of others
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; start the same command again to continue", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    settings = Settings(
        vocab=options.vocab and os.path.expanduser(options.vocab),
        train_vocab=options.train_vocab,
        cased=options.cased,
        documents=options.documents,
        sentences=options.sentences,
        shard_bytes=options.shard_bytes,
        data_dir=options.data_dir,
    )
    with _Shown() as shown:
        manifest = prepare_text(options.input, options.output, settings, options.processes, shown)
    # A summary, and the flags that a run on this text needs.
    counts = manifest["counts"]
    shown.tell(
        f"{options.output} holds {_number(counts['documents'], 'document')}, "
        f"{_number(counts['sentences'], 'sentence')} and {_number(counts['tokens'], 'token')} in "
        f"{_number(len(manifest['shards']), 'shard')}; "
        f"{counts['unknown_tokens'] / counts['tokens']:.2%} of the tokens are unknown"
    )
    folder = pathlib.Path(options.output).expanduser().absolute()
    shown.tell(
        f"to train on it: --config.data.dir={folder.parent} "
        f"--config.data.train_split={folder.name} "
        f"--config.model.vocab_size={manifest['vocabulary']['size']}"
    )
    # What is left out or cut is told, because it may show a wrong rule or a damaged file.
    for key, text in (
        ("empty_documents", "documents were empty and are left out"),
        ("broken_lines", "lines are not UTF-8; what could not be read in them is left out"),
        ("cut_sentences", "sentences were too long and are cut"),
    ):
        if counts[key]:
            print(f"warning: {counts[key]:,} {text}", file=sys.stderr)
    return 0


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.data.prepare_text",
        description=fit(__doc__.partition("\n")[0]),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        action="append",
        required=True,
        metavar="GLOB",
        help="files of text, with ** for all folders below; may be repeated; or tfds:NAME[/CONFIG]"
        "[:SPLIT], a prepared TFDS set with a feature `text`, one document in each example",
    )
    add(
        "--output",
        required=True,
        metavar="DIR",
        help="folder to write: shards of ids, vocab.txt, manifest.json",
    )
    add("--vocab", metavar="FILE", help="a vocab.txt, one token in each line, such as BERT's own")
    add(
        "--train-vocab",
        type=int,
        metavar="N",
        help="instead of --vocab: make a vocabulary of N tokens from the inputs",
    )
    add("--cased", action="store_true", help="keep case and accents")
    add(
        "--documents",
        default="file",
        metavar="RULE",
        help="what a document is: a file (the default); the text between blank-lines, as in the "
        "original BERT code; or the text after a line `= Title =` (titles), as in WikiText",
    )
    add(
        "--sentences",
        default="split",
        metavar="|".join(SENTENCE_RULES),
        help="what a sentence is: a part of a line, found by rules (the default), or a whole line",
    )
    add(
        "--shard-bytes",
        type=int,
        default=16 * 2**20,
        metavar="N",
        help="approximate text in a shard; one process makes a shard (default: %(default)s)",
    )
    add("--processes", type=int, metavar="N", help="number of processes (default: one a core)")
    add("--data-dir", metavar="DIR", help="folder of prepared TFDS sets")
    return parser.parse_all(arguments)


if __name__ == "__main__":
    terminal.run_and_exit(main)

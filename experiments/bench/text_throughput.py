"""Throughput of text on a core: its preparation, and the masked batches made from it in training.

  python -m experiments.bench.text_throughput --text_dir=BOOKS --vocab=vocab.txt --write

Preparation is compared with plain use of `tokenizers`: its `encode_batch`, and its faster form
without offsets, over the same lines by the same vocabulary, with the text already read and nothing
cut into sentences or written. They take turns on one core, and what counts is the time which that
core works for this process, so that what else runs on the machine matters little.

Batches are gathered at random places of the prepared text, from memory, and by record, as text of
more than 1 GiB of ids is read. The last column says how many cores feed BERT-Large on one H200, of
which the best published figure is about 1,000 packed samples of 512 tokens a second (8,004 on eight
of them, MLPerf Training 4.0); of 128 tokens that is taken to be 4,000.
"""

import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import tokenizers
from absl import flags

from lamb_tpu import cli
from lamb_tpu.cluster.host import processor
from lamb_tpu.data.text.masked_lm import MaskedLmSource, Options
from lamb_tpu.data.text.preparation import Settings, prepare_text
from lamb_tpu.data.text.shards import TokenShards
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer
from lamb_tpu.errors import UserError

_H200_TOKENS = 1000 * 512  # a second
_LINES = 1000  # encoded together, as in the preparation
_BATCH = 256
OPTIONS = {
    "128, 20": Options(128, 20),
    "128, 20, whole words": Options(128, 20, whole_words=True),
    "512, 80": Options(512, 80),
    "512, 80, whole words": Options(512, 80, whole_words=True),
}


def core_seconds(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of all threads of this process during `work()`."""
    start = time.process_time()
    work()
    return time.process_time() - start


def choose_files(folder: str, megabytes: float) -> list[str]:
    """Text files below a folder, in the order of their names, until they have that size.

    Raises:
      UserError: there is none.
    """
    chosen, size = [], 0
    for path in sorted(pathlib.Path(folder).expanduser().rglob("*")):
        if path.suffix in (".md", ".txt") and size < megabytes * 1e6:
            chosen.append(str(path))
            size += path.stat().st_size
    if not size:
        raise UserError(f"--text_dir={folder} holds no text, files that end in .md or .txt")
    return chosen


def preparation(files: list[str], folder: pathlib.Path, rounds: int) -> list[tuple[str, float]]:
    """Returns (what, median MB/s a core) of plain `tokenizers` and of ours; the last is ours."""
    contents = [pathlib.Path(path).read_bytes() for path in files]
    size = sum(map(len, contents)) / 1e6
    lines = [line for text in contents for line in text.decode(errors="replace").split("\n")]
    lines = [line for line in lines if line.strip()]
    tokenizer = make_tokenizer(Vocabulary.read(flags.FLAGS.vocab), cased=False)

    def plain(encode: Callable[..., object]) -> Callable[[], object]:
        def work() -> None:
            for start in range(0, len(lines), _LINES):
                encode(lines[start : start + _LINES], add_special_tokens=False)

        return work

    def ours() -> None:
        settings = Settings(vocab=flags.FLAGS.vocab)
        prepare_text(files, folder / str(len(os.listdir(folder))), settings, processes=1)

    works = {
        "`encode_batch`": plain(tokenizer.encode_batch),
        "`encode_batch_fast`": plain(tokenizer.encode_batch_fast),
        "preparation": ours,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(core_seconds(work))
    return [(name, size / statistics.median(found)) for name, found in times.items()]


def gathering(prepared: pathlib.Path, batches: int) -> list[tuple[str, str, float, float]]:
    """(options, where the ids are, examples a second a core, cores that feed one H200)."""
    rows = []
    for in_memory, where in ((True, "memory"), (False, "by record")):
        shards = TokenShards(prepared, in_memory)
        for name, options in OPTIONS.items():
            source = MaskedLmSource(shards, options)
            indices = np.random.default_rng(0).integers(0, len(source), (batches + 1, _BATCH))
            source.gather(indices[0])
            found = [core_seconds(lambda: source.gather(wanted)) for wanted in indices[1:]]
            rate = _BATCH / statistics.median(found)
            rows.append((name, where, rate, _H200_TOKENS / options.sequence_length / rate))
    return rows


def main() -> None:
    """Measures, prints the tables and writes them if asked."""
    values = flags.FLAGS
    if hasattr(os, "sched_setaffinity"):  # one core, also for the threads of `tokenizers`
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    files = choose_files(values.text_dir, values.megabytes)
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        prepared = preparation(files, folder, values.rounds)
        gathered = gathering(folder / "0", values.batches)
    size = sum(map(os.path.getsize, files)) / 1e6
    ours = prepared[-1][1]
    lines = [
        f"{len(files)} files, {size:.1f} MB of text; Python {platform.python_version()}, numpy "
        f"{np.__version__}, tokenizers {tokenizers.__version__}, {processor()}, one core of "
        f"{os.cpu_count()}. Medians of {values.rounds} rounds and of {values.batches} batches of "
        f"{_BATCH}, in time of the core.",
        "Command: `python -m experiments.bench.text_throughput --text_dir=BOOKS --vocab=vocab.txt "
        f"--megabytes={values.megabytes:g} --rounds={values.rounds} --batches={values.batches}`",
        *([values.note] if values.note else []),
        "",
        "| text to tokens | MB/s a core | preparation has of it |",
        "|---|--:|--:|",
        *(f"| {name} | {rate:.2f} | {ours / rate:.2f} |" for name, rate in prepared),
        "",
        "| pairs: tokens, predictions | ids | examples/s a core | cores for one H200 |",
        "|---|---|--:|--:|",
        *(
            f"| {name} | {where} | {rate:,.0f} | {cores:.2f} |"
            for name, where, rate, cores in gathered
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if values.write:
        pathlib.Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    flags.DEFINE_string("text_dir", None, "Folder with text, files that end in .md or .txt.")
    flags.DEFINE_string("vocab", None, "A vocab.txt.")
    flags.DEFINE_float("megabytes", 10.0, "Text to take, about; whole files.", lower_bound=0.001)
    flags.DEFINE_integer("rounds", 3, "Turns of each way to tokens.", lower_bound=1)
    flags.DEFINE_integer("batches", 40, "Batches of each kind.", lower_bound=1)
    flags.DEFINE_string("note", "", "What else ran on the machine, for the table.")
    flags.DEFINE_bool("write", False, "Whether to write text_throughput.md beside this file.")
    cli.run_main(main, required=("text_dir", "vocab"))

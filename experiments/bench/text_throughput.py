"""Throughput of text on one core: preparation, and masked training batches from prepared text.

  python -m experiments.bench.text_throughput --text_dir=BOOKS --vocab=vocab.txt --write

Preparation is compared with two functions of `tokenizers`: `encode_batch`, and `encode_batch_fast`,
which computes no offsets. Both functions encode the same lines with the same vocabulary, from memory,
and neither split sentences nor write files. These functions and the preparation alternate on one core.
Times are CPU times of this process, so other load matters little.

Batches are gathered at random positions of the prepared text. The ids are in memory or, as for text
with more than 1 GiB of ids, are read from files. The table's last column gives the number of CPU cores
that feed BERT-Large on one H200. The best published rate of an H200 is about 1,000 packed samples of
512 tokens per second (8,004 on eight, MLPerf Training 4.0); for 128 tokens, 4,000 samples per second
are assumed.
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
from lamb_tpu.data.text.masked_lm import MaskedLmOptions, MaskedLmSource
from lamb_tpu.data.text.preparation import Settings, prepare_text
from lamb_tpu.data.text.shards import TokenShards
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer
from lamb_tpu.errors import UserError

_H200_TOKENS = 1000 * 512  # tokens per second
_LINES = 1000  # lines per call, as in the preparation
_BATCH = 256
OPTIONS = {
    "128, 20": MaskedLmOptions(128, 20),
    "128, 20, whole words": MaskedLmOptions(128, 20, whole_words=True),
    "512, 80": MaskedLmOptions(512, 80),
    "512, 80, whole words": MaskedLmOptions(512, 80, whole_words=True),
}


def core_seconds(work: Callable[[], object]) -> float:
    """Calls `work`, and returns the CPU seconds that all threads of this process used during the call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def choose_files(folder: str, megabytes: float) -> list[str]:
    """Returns text files below a folder, sorted by path, until their total size reaches `megabytes`.

    Raises:
      UserError: the folder has no text file.
    """
    chosen, size = [], 0
    for path in sorted(pathlib.Path(folder).expanduser().rglob("*")):
        if path.suffix in (".md", ".txt") and size < megabytes * 1e6:
            chosen.append(str(path))
            size += path.stat().st_size
    if not size:
        remedy = "give a folder with text files"
        raise UserError(f"--text_dir={folder}", problem="has no .md or .txt files", remedy=remedy)
    return chosen


def preparation(files: list[str], folder: pathlib.Path, rounds: int) -> list[tuple[str, float]]:
    """Returns (name, median MB/s per core) of the two `tokenizers` functions and our preparation."""
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
    return [(name, size / statistics.median(seconds)) for name, seconds in times.items()]


def gathering(prepared: pathlib.Path, batches: int) -> list[tuple[str, str, float, float]]:
    """Returns rows (options, where ids are read from, examples/s per core, cores that feed one H200)."""
    rows = []
    for in_memory, where in ((True, "memory"), (False, "files")):
        shards = TokenShards(prepared, in_memory)
        for name, options in OPTIONS.items():
            source = MaskedLmSource(shards, options)
            indices = np.random.default_rng(0).integers(0, len(source), (batches + 1, _BATCH))
            source.gather(indices[0])
            seconds = [core_seconds(lambda: source.gather(wanted)) for wanted in indices[1:]]
            rate = _BATCH / statistics.median(seconds)
            rows.append((name, where, rate, _H200_TOKENS / options.sequence_length / rate))
    return rows


def main() -> None:
    """Measures, prints the tables, and writes them if --write is given."""
    values = flags.FLAGS
    if hasattr(os, "sched_setaffinity"):  # limit the threads of `tokenizers` to one core too
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
        f"{os.cpu_count()}. Rates are per second of CPU time. The first table has medians of "
        f"{values.rounds} rounds, the second table medians of {values.batches} batches of {_BATCH} examples. "
        "The last column is the number of CPU cores that feed the training of BERT-Large on one H200.",
        "Command: `python -m experiments.bench.text_throughput --text_dir=BOOKS --vocab=vocab.txt "
        f"--megabytes={values.megabytes:g} --rounds={values.rounds} --batches={values.batches}`",
        *([values.note] if values.note else []),
        "",
        "| text to tokens | MB/s per core | rate of preparation / this rate |",
        "|---|--:|--:|",
        *(f"| {name} | {rate:.2f} | {ours / rate:.2f} |" for name, rate in prepared),
        "",
        "| sentence pairs: tokens, predictions | ids read from | examples/s per core | "
        "CPU cores for one H200 |",
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
    flags.DEFINE_string("text_dir", None, "Folder with .md or .txt files.")
    flags.DEFINE_string("vocab", None, "A vocab.txt file.")
    flags.DEFINE_float(
        "megabytes", 10.0, "Approximate amount of text, in complete files.", lower_bound=0.001
    )
    flags.DEFINE_integer(
        "rounds", 3, "Rounds; each tokenizer takes one turn per round.", lower_bound=1
    )
    flags.DEFINE_integer("batches", 40, "Batches of each variant.", lower_bound=1)
    flags.DEFINE_string("note", "", "Note for the page, such as other load on the machine.")
    flags.DEFINE_bool("write", False, "Whether to write text_throughput.md beside this file.")
    cli.run_main(main, required=("text_dir", "vocab"))

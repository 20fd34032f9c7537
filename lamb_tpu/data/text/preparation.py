"""Preparation of text as shards of token ids, in parallel; a killed preparation can be continued."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import tokenizers

from lamb_tpu import environment
from lamb_tpu.cluster import children
from lamb_tpu.data.hashing import sha256
from lamb_tpu.data.text import saved, shards
from lamb_tpu.data.text.reader import (
    DOCUMENT_RULES,
    TFDS_PREFIX,
    Segment,
    cut_files,
    cut_tfds,
    find_files,
    read_segment,
    read_tfds,
    tfds_builder,
)
from lamb_tpu.data.text.sentences import SENTENCE_RULES, sentences
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer, train_vocabulary
from lamb_tpu.errors import UserError, out_of_range, unknown, unreadable
from lamb_tpu.files import locks, reading, schema, writing

_SETTINGS = "settings.json"  # exists until the manifest is written
_LOCK = ".preparing"
_AGAIN = "delete the folder, or give another folder"
_BATCH = 1000  # sentences that are tokenized together


@dataclass(frozen=True)
class Settings:
    """Settings that, together with the inputs, determine the output.

    Attributes:
      vocab: path of a `vocab.txt`; None trains a vocabulary.
      train_vocab: size in tokens of the vocabulary to train; None reads `vocab`.
      cased: whether to keep case and accents.
      documents: rule for documents, one of `reader.DOCUMENT_RULES`.
      sentences: rule for sentences, one of `sentences.SENTENCE_RULES`.
      shard_bytes: approximate size of a shard's text, in bytes.
      data_dir: folder of prepared TFDS sets; None for TFDS's default.
    """

    vocab: str | None = None
    train_vocab: int | None = None
    cased: bool = False
    documents: str = "file"
    sentences: str = "split"
    shard_bytes: int = 16 * 2**20
    data_dir: str | None = None


@dataclass(frozen=True)
class Progress:
    """Progress in bytes of text; an earlier run processed `resumed` of the `done` bytes."""

    done: int
    resumed: int
    total: int


def prepare_text(
    inputs: Sequence[str],
    output: str | pathlib.Path,
    settings: Settings,
    processes: int | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Prepares text and returns the manifest; if the output is complete, only checks the output.

    The output is the same, byte for byte, for every number of processes, whether or not a run was
    killed and continued. A shard is a function of the inputs and settings. Each shard is written under
    a temporary name and renamed when it is complete.

    Args:
      inputs: patterns of files, or one `tfds:NAME[/CONFIG][:SPLIT]`.
      output: the folder for shards, vocabulary and manifest.
      settings: see `Settings`.
      processes: number of processes; None for one per CPU core.
      report: called with the progress at the start and after each shard.

    Raises:
      UserError: settings or inputs are wrong, or `output` is damaged or holds something else.
    """
    _check(settings, processes)
    if "://" in str(output):
        problem = "is not on this machine"
        raise UserError("--output", output, problem, "use a local or mounted folder")
    folder = pathlib.Path(output).expanduser()
    if folder.is_file():
        raise UserError("--output", output, "is a file", "use a folder")
    with _locked(folder):
        # Only checks a complete output; continues an incomplete output of the same command.
        segments, files = _plan(inputs, settings)
        identity = _identity(files, settings)
        if (folder / shards.MANIFEST).exists():
            manifest = _read_json(folder / shards.MANIFEST)
            _compare(folder, manifest, identity)
            shards.check_manifest(folder, manifest)
            shards.check_files(folder, manifest)
            return manifest
        if (folder / _SETTINGS).exists():
            _compare(folder, _read_json(folder / _SETTINGS), identity)
        # Any file except the lock, which this process has just created, belongs to something else.
        elif [path for path in folder.iterdir() if path.name != _LOCK]:
            problem = "is not empty and holds no unfinished output of this command"
            raise UserError("--output", output, problem, "use another folder")
        else:
            # Written before the first shard, so that a later command can compare its settings.
            _write_json(folder / _SETTINGS, identity)
        # The remaining work: the vocabulary, then a shard for each group of segments.
        groups = _group(segments, settings.shard_bytes)
        vocabulary = _vocabulary(folder, groups, settings)
        names = [f"text-{i:05}-of-{len(groups):05}.array_record" for i in range(len(groups))]
        jobs = {name: (folder / name, group, settings) for name, group in zip(names, groups)}
        _work(jobs, folder, processes, report)
        # The manifest makes the output complete; then intermediate files are removed.
        manifest = _manifest(folder, names, identity, vocabulary)
        _write_json(folder / shards.MANIFEST, manifest)
        for name in names:
            _done(folder / name).unlink()
        (folder / _SETTINGS).unlink()
        return manifest


def _check(settings: Settings, processes: int | None) -> None:
    for flag, value, known in (
        ("documents", settings.documents, DOCUMENT_RULES),
        ("sentences", settings.sentences, SENTENCE_RULES),
    ):
        if value not in known:
            raise unknown(f"--{flag}", value, known)
    if (settings.vocab is None) == (settings.train_vocab is None):
        remedy = "give --vocab=FILE or --train-vocab=N"
        raise UserError("--vocab or --train-vocab", ..., "must be given, but not both", remedy)
    for flag, number in (
        ("processes", processes),
        ("shard-bytes", settings.shard_bytes),
        ("train-vocab", settings.train_vocab),
    ):
        if number is not None and not 1 <= number < 2**31:
            raise out_of_range(f"--{flag}", number, f"1 to {2**31 - 1}")
    # Checked here, so that settings with a wrong vocabulary are never stored.
    if settings.vocab is not None:
        _given_vocabulary(settings.vocab, settings.cased)


def _plan(inputs: Sequence[str], settings: Settings) -> tuple[list[Segment], dict[str, str]]:
    """Returns the segments of all inputs, and the input files as name in the manifest -> path."""
    sets = [item for item in inputs if item.startswith(TFDS_PREFIX)]
    if sets and len(inputs) > 1:
        raise UserError("--input", sets[0], "must be the only input", "leave out the other inputs")
    if sets:
        builder, split = tfds_builder(sets[0], settings.data_dir)
        paths = [str(path) for path in builder.info.splits[split].filepaths]
        segments = cut_tfds(sets[0], settings.data_dir, settings.shard_bytes)
    else:
        paths = find_files(inputs)
        segments = cut_files(paths, settings.documents, settings.shard_bytes)
    # Names are relative to the common folder, so that a manifest is the same on every machine.
    root = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    return segments, {os.path.relpath(path, root): path for path in paths}


def _identity(files: dict[str, str], settings: Settings) -> dict[str, Any]:
    # Threads suffice, because hashing releases Python's global lock.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(_sha256, files.values())
    # Paths may differ between machines, so the files' contents are compared.
    described = asdict(settings)
    del described["data_dir"]
    described["vocab"] = settings.vocab and _sha256(settings.vocab)
    return {
        # Other versions of the tokenizer may split the text differently.
        "settings": {"format": shards.FORMAT, **described, "tokenizers": tokenizers.__version__},
        "inputs": [
            {"name": name, "bytes": os.path.getsize(path), "sha256": digest}
            for (name, path), digest in zip(files.items(), sums)
        ],
    }


def _compare(folder: pathlib.Path, stored: dict[str, Any], identity: dict[str, Any]) -> None:
    stored_settings, settings = stored.get("settings"), identity["settings"]
    if not isinstance(stored_settings, dict):
        raise UserError("--output", folder, "has a manifest without settings", _AGAIN)
    for key, value in settings.items():
        if stored_settings.get(key) != value:
            difference = f"{key}={stored_settings.get(key)!r}, not {value!r}"
            if key == "vocab":  # its sha256 would not help the user
                difference = "another vocabulary"
            raise UserError("--output", folder, f"was begun with {difference}", _AGAIN)
    if stored.get("inputs") != identity["inputs"]:
        problem = "was begun with other input files, or the files have changed"
        raise UserError("--output", folder, problem, _AGAIN)


def _group(segments: Iterable[Segment], shard_bytes: int) -> list[list[Segment]]:
    groups: list[list[Segment]] = [[]]
    size = 0
    for segment in segments:
        if groups[-1] and size + segment.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(segment)
        size += segment.num_bytes
    return groups


def _vocabulary(
    folder: pathlib.Path, groups: list[list[Segment]], settings: Settings
) -> Vocabulary:
    path = folder / shards.VOCABULARY
    if path.exists():
        return Vocabulary.read(path)
    if settings.vocab is not None:
        vocabulary = _given_vocabulary(settings.vocab, settings.cased)
    else:

        def read() -> Iterator[str]:
            for group in groups:
                # Discards these counts: they are taken again when the shards are made.
                for lines in _documents(group, settings, Counter()):
                    yield from sentences(lines, settings.sentences, Counter())

        assert settings.train_vocab is not None  # `_check` requires one of the two
        try:
            vocabulary = train_vocabulary(read, settings.train_vocab, settings.cased)
        except UserError:  # nothing is prepared, so the wrong settings must not stay
            (folder / _SETTINGS).unlink()
            raise
    vocabulary.write(path)  # renamed when complete, because a restart uses an existing file
    return vocabulary


def _given_vocabulary(path: str, wanted: bool) -> Vocabulary:
    vocabulary, cased = saved.read(path)
    if cased not in (None, wanted):
        problem = f"is a vocabulary with cased={cased}, as the file beside it says"
        remedy = f"{'give' if cased else 'leave out'} --cased, or give another vocabulary"
        raise UserError("--vocab", path, problem, remedy)
    return vocabulary


def _work(
    jobs: dict[str, tuple],
    folder: pathlib.Path,
    processes: int | None,
    report: Callable[[Progress], None],
) -> None:
    sizes = {name: sum(segment.num_bytes for segment in job[1]) for name, job in jobs.items()}
    # Skips shards that an earlier run has completed.
    todo = [name for name in jobs if not _is_complete(folder / name)]
    total = sum(sizes.values())
    done = resumed = total - sum(sizes[name] for name in todo)
    report(Progress(done, resumed, total))
    count = min(processes or os.cpu_count() or 1, len(todo))
    with contextlib.ExitStack() as stack:
        if count > 1:
            # Starts one single-threaded process per CPU core: spawned, not forked, because ArrayRecord
            # has threads.
            stack.enter_context(environment.variables(TOKENIZERS_PARALLELISM="false"))
            pool = stack.enter_context(
                concurrent.futures.ProcessPoolExecutor(
                    count, multiprocessing.get_context("spawn"), _start_worker
                )
            )
            # Called before the pool's own exit, which would finish all shards after an error or
            # Ctrl-C.
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            futures = [pool.submit(_prepare_shard, *jobs[name]) for name in todo]
            # `result` raises the worker's exception.
            names = (future.result() for future in concurrent.futures.as_completed(futures))
        else:
            names = (_prepare_shard(*jobs[name]) for name in todo)
        try:
            for name in names:
                done += sizes[name]
                report(Progress(done, resumed, total))
        except concurrent.futures.process.BrokenProcessPool as error:
            problem = "was killed, perhaps because memory ran out"
            remedy = f"start again with fewer than {count} processes, or a smaller --shard-bytes"
            raise UserError("a process", ..., problem, remedy) from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None  # this is a worker
    children.follow_parent(parent.pid)


def _prepare_shard(path: pathlib.Path, segments: list[Segment], settings: Settings) -> str:
    """Writes a shard, then the file that marks the shard as complete; returns the shard's name."""
    vocabulary = Vocabulary.read(path.parent / shards.VOCABULARY)
    counts = Counter[str]()
    scratch = path.with_name(f".{path.name}.part")
    documents = _tokenize(segments, settings, vocabulary, counts)
    shards.write_shard(scratch, documents, shards.id_dtype(len(vocabulary)))
    scratch.rename(path)
    described = {
        "name": path.name,
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
        "counts": {key: counts[key] for key in shards.COUNTS},
    }
    _write_json(_done(path), described)
    return path.name


def _tokenize(
    segments: list[Segment], settings: Settings, vocabulary: Vocabulary, counts: Counter[str]
) -> Iterator[list[list[int]]]:
    tokenizer = make_tokenizer(vocabulary, settings.cased)
    for lines in _documents(segments, settings, counts):
        texts = list(sentences(lines, settings.sentences, counts))
        document = []
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            # The fast variant omits the offsets, which only questions need.
            for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = encoded.ids
                if ids:  # none for a sentence of control characters
                    document.append(ids)
                    counts["tokens"] += len(ids)
                    counts["unknown_tokens"] += ids.count(vocabulary.unknown_id)
        counts["sentences"] += len(document)
        if document:
            yield document
        else:
            # The reader has counted this document as one with text.
            counts["documents"] -= 1
            counts["empty_documents"] += 1


def _documents(
    segments: list[Segment], settings: Settings, counts: Counter[str]
) -> Iterator[list[str]]:
    for segment in segments:
        yield from (
            read_tfds(segment, settings.data_dir, counts)
            if segment.path.startswith(TFDS_PREFIX)
            else read_segment(segment, settings.documents, counts)
        )


def _manifest(
    folder: pathlib.Path, names: list[str], identity: dict[str, Any], vocabulary: Vocabulary
) -> dict[str, Any]:
    described = [msgspec.to_builtins(_read_done(folder / name)) for name in names]
    counts = {key: sum(item["counts"][key] for item in described) for key in shards.COUNTS}
    if not counts["tokens"]:
        raise UserError(
            "--output",
            folder,
            "would have no text, because the inputs have none",
            "give other inputs",
        )
    return {
        **identity,
        "vocabulary": {
            "name": shards.VOCABULARY,
            "size": len(vocabulary),
            "sha256": _sha256(folder / shards.VOCABULARY),
        },
        "counts": counts,
        "shards": described,
    }


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    with writing.checked(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).touch()
    problem = "is being prepared by another process"
    busy = UserError("--output", folder, problem, "wait until it ends, or give another folder")
    with locks.hold(folder / _LOCK, busy):
        yield


def _done(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".done.json")


def _is_complete(path: pathlib.Path) -> bool:
    """Returns whether a shard is complete; a power failure may leave empty files."""
    try:
        return _read_done(path).bytes == path.stat().st_size
    except (OSError, ValueError, UserError):
        return False


def _read_done(path: pathlib.Path) -> shards.Shard:
    return schema.convert(reading.read_json(_done(path)), shards.Shard, _done(path))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return msgspec.convert(reading.read_json(path), dict[str, Any])
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "delete the folder", "is damaged") from error


def _write_json(path: pathlib.Path, value: Any) -> None:
    writing.replace(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", "--output")


def _sha256(path: str | os.PathLike[str]) -> str:
    try:
        return sha256(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "make it readable, or leave it out") from error

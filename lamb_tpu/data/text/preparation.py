"""Preparation of text into shards of token ids, in parallel and resumable after a kill."""

import concurrent.futures
import concurrent.futures.process
import contextlib
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tokenizers

from lamb_tpu.data.text import saved, shards
from lamb_tpu.data.text.reader import (
    DOCUMENT_RULES,
    TFDS_PREFIX,
    Piece,
    cut_files,
    cut_tfds,
    find_files,
    read_piece,
    read_tfds,
    tfds_builder,
)
from lamb_tpu.data.text.sentences import SENTENCE_RULES, sentences
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.data.text.wordpiece import make_tokenizer, train_vocabulary
from lamb_tpu.errors import UserError
from lamb_tpu.files import locks, writing

_SETTINGS = "settings.json"  # exists until the manifest is written
_LOCK = ".preparing"
_COUNTS = (
    "documents",
    "empty_documents",
    "sentences",
    "cut_sentences",
    "tokens",
    "unknown_tokens",
    "broken_lines",
)
_BATCH = 1000  # number of sentences that are tokenized together


@dataclass(frozen=True)
class Settings:
    """Settings that, together with the inputs, determine the output.

    Attributes:
      vocab: path of a `vocab.txt`; None trains a vocabulary.
      train_vocab: number of tokens of the vocabulary to train; None reads `vocab`.
      cased: keep case and accents.
      documents: rule for documents, one of `reader.DOCUMENT_RULES`.
      sentences: rule for sentences, one of `sentences.SENTENCE_RULES`.
      shard_bytes: approximate text in a shard, in bytes.
      data_dir: folder of prepared TFDS sets; None is TFDS's own.
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
    """Progress in bytes of text; `resumed` bytes were done by an earlier run."""

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
    """Prepares text once, or returns the manifest of an output that is complete.

    The output is the same, byte for byte, for every number of processes, and after a killed run is
    started again. A shard is a function of the inputs and settings; it is written under another
    name and renamed when it is complete.

    Args:
      inputs: patterns of files, or one `tfds:NAME[/CONFIG][:SPLIT]`.
      output: the folder of shards, vocabulary and manifest.
      settings: see `Settings`.
      processes: number of processes; None for the number of cores.
      report: called with the progress at the start and after each shard.

    Returns:
      The manifest: `settings`, `inputs` and `shards` with their sha256, `vocabulary`, `counts`.

    Raises:
      UserError: settings or inputs are wrong, or `output` holds something else or is damaged.
    """
    _check(settings, processes)
    if "://" in str(output):
        raise UserError(f"--output={output} must be a local or mounted folder")
    folder = pathlib.Path(output).expanduser()
    if folder.is_file():
        raise UserError(f"--output={output} is a file; it must be a folder")
    with _locked(folder):
        # A complete output is only checked; an incomplete one goes on if it was begun by this
        # command.
        pieces, files = _plan(inputs, settings)
        identity = _identity(files, settings)
        if (folder / shards.MANIFEST).exists():
            manifest = _read_json(folder / shards.MANIFEST)
            _compare(folder, manifest, identity)
            shards.check_files(folder, manifest)
            return manifest
        if (folder / _SETTINGS).exists():
            _compare(folder, _read_json(folder / _SETTINGS), identity)
        # Anything but the lock, which this process has just made.
        elif [path for path in folder.iterdir() if path.name != _LOCK]:
            raise UserError(
                f"--output={output} is not empty and was not begun by this command; give another "
                "folder"
            )
        else:
            # Written before the first shard, so that a later command can compare.
            _write_json(folder / _SETTINGS, identity)
        # The work that is left: the vocabulary, then a shard for each group of pieces.
        groups = _group(pieces, settings.shard_bytes)
        vocabulary = _vocabulary(folder, groups, settings)
        names = [f"text-{i:05}-of-{len(groups):05}.array_record" for i in range(len(groups))]
        jobs = {name: (folder / name, group, settings) for name, group in zip(names, groups)}
        _work(jobs, folder, processes, report)
        # The manifest makes the output complete. Only then are intermediate files removed.
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
            raise UserError(f"--{flag}={value} is unknown; known are {', '.join(known)}")
    if (settings.vocab is None) == (settings.train_vocab is None):
        raise UserError("give one of --vocab=FILE and --train-vocab=N")
    for flag, number in (
        ("processes", processes),
        ("shard-bytes", settings.shard_bytes),
        ("train-vocab", settings.train_vocab),
    ):
        if number is not None and number < 1:
            raise UserError(f"--{flag}={number} must be at least 1")
        if number is not None and number >= 2**31:
            raise UserError(f"--{flag}={number} must be below {2**31}")
    if settings.vocab is not None:
        # Read before the settings are stored, so that a mistake is not stored with the output.
        _given_vocabulary(settings.vocab, settings.cased)


def _plan(inputs: Sequence[str], settings: Settings) -> tuple[list[Piece], dict[str, str]]:
    """Returns the pieces of all inputs, and their files: name in the manifest -> path."""
    sets = [item for item in inputs if item.startswith(TFDS_PREFIX)]
    if sets and len(inputs) > 1:
        raise UserError(f"--input={sets[0]} must be the only input")
    if sets:
        builder, split = tfds_builder(sets[0], settings.data_dir)
        paths = [str(path) for path in builder.info.splits[split].filepaths]
        pieces = cut_tfds(sets[0], settings.data_dir, settings.shard_bytes)
    else:
        paths = find_files(inputs)
        pieces = cut_files(paths, settings.documents, settings.shard_bytes)
    # Without the common parent folders, so that a manifest is the same on every machine.
    root = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
    return pieces, {os.path.relpath(path, root): path for path in paths}


def _identity(files: dict[str, str], settings: Settings) -> dict[str, Any]:
    # Threads suffice, because hashing runs without Python's global lock.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(_sha256, files.values())
    # Paths may differ between machines; the content decides.
    described = asdict(settings)
    del described["data_dir"]
    described["vocab"] = settings.vocab and _sha256(settings.vocab)
    return {
        # Versions of the tokenizer may split a text differently.
        "settings": {"format": shards.FORMAT, **described, "tokenizers": tokenizers.__version__},
        "inputs": [
            {"name": name, "bytes": os.path.getsize(path), "sha256": digest}
            for (name, path), digest in zip(files.items(), sums)
        ],
    }


def _compare(folder: pathlib.Path, found: dict[str, Any], identity: dict[str, Any]) -> None:
    found_settings, settings = found.get("settings") or {}, identity["settings"]
    for key, value in settings.items():
        if found_settings.get(key) != value:
            what = f"{key} = {found_settings.get(key)!r}, this command has {value!r}"
            if key == "vocab":  # its sha256 would not help a reader
                what = "another vocabulary"
            raise UserError(
                f"--output={folder} was begun with {what}; delete the folder or give another"
            )
    if found.get("inputs") != identity["inputs"]:
        raise UserError(
            f"--output={folder} was begun from other input files, or they have changed; delete "
            "the folder or give another"
        )


def _group(pieces: Iterable[Piece], shard_bytes: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if groups[-1] and size + piece.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.num_bytes
    return groups


def _vocabulary(folder: pathlib.Path, groups: list[list[Piece]], settings: Settings) -> Vocabulary:
    path = folder / shards.VOCABULARY
    if path.exists():
        return Vocabulary.read(path)
    if settings.vocab is not None:
        vocabulary = _given_vocabulary(settings.vocab, settings.cased)
    else:

        def read() -> Iterator[str]:
            for group in groups:
                # Counted when the shards are made, not here.
                for lines in _documents(group, settings, Counter()):
                    yield from sentences(lines, settings.sentences, Counter())

        assert settings.train_vocab is not None  # one of the two is given
        try:
            vocabulary = train_vocabulary(read, settings.train_vocab, settings.cased)
        except UserError:  # nothing is prepared yet, so this mistake must not stay in the output
            (folder / _SETTINGS).unlink()
            raise
    # Renamed when it is whole: a restart takes a vocabulary that exists.
    part = folder / f".{shards.VOCABULARY}.part"
    vocabulary.write(part)
    part.rename(path)
    return vocabulary


def _given_vocabulary(path: str, wanted: bool) -> Vocabulary:
    vocabulary, cased = saved.read(path)
    if cased not in (None, wanted):
        raise UserError(
            f"--vocab={path} is of text with cased = {cased}, as the file beside it "
            f"says; {'give' if cased else 'leave out'} --cased, or give another vocabulary"
        )
    return vocabulary


def _work(
    jobs: dict[str, tuple],
    folder: pathlib.Path,
    processes: int | None,
    report: Callable[[Progress], None],
) -> None:
    sizes = {name: sum(piece.num_bytes for piece in job[1]) for name, job in jobs.items()}
    # What an earlier run finished is not done again.
    todo = [name for name in jobs if not _is_whole(folder / name)]
    resumed = sum(sizes.values()) - sum(sizes[name] for name in todo)
    done = resumed
    report(Progress(done, resumed, sum(sizes.values())))
    count = min(processes or os.cpu_count() or 1, len(todo))
    names: Iterator[str]
    with contextlib.ExitStack() as stack:
        if count > 1:
            # A process a core, each with one thread; spawned, because ArrayRecord has threads.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            pool = stack.enter_context(
                concurrent.futures.ProcessPoolExecutor(
                    count, multiprocessing.get_context("spawn"), _start_worker
                )
            )
            # Called before the pool's own exit, which would finish all shards after an error or
            # Ctrl-C.
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            futures = {pool.submit(_prepare_shard, *jobs[name]): name for name in todo}
            finished = concurrent.futures.as_completed(futures)
            # `result()` raises what the worker raised, and is None otherwise.
            names = (futures[future] for future in finished if future.result() is None)
        else:

            def prepared() -> Iterator[str]:
                for name in todo:
                    _prepare_shard(*jobs[name])
                    yield name

            names = prepared()
        try:
            for name in names:
                done += sizes[name]
                report(Progress(done, resumed, sum(sizes.values())))
        except concurrent.futures.process.BrokenProcessPool as error:
            raise UserError(
                "a process was killed, perhaps for want of memory; start the same command again, "
                f"with fewer than --processes={count} or smaller --shard-bytes"
            ) from error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the workers
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a worker

    def follow() -> None:
        parent.join()
        os._exit(1)  # the first process was killed, so nobody waits for this one

    threading.Thread(target=follow, daemon=True).start()


def _prepare_shard(path: pathlib.Path, pieces: list[Piece], settings: Settings) -> None:
    """Writes one shard and then a file with its counts, which shows that the shard is complete."""
    vocabulary = Vocabulary.read(path.parent / shards.VOCABULARY)
    counts = Counter[str]()
    part = path.with_name(f".{path.name}.part")
    documents = _tokenize(pieces, settings, vocabulary, counts)
    shards.write_shard(part, documents, shards.id_dtype(len(vocabulary)))
    part.rename(path)
    described = {
        "name": path.name,
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
        "counts": {key: counts[key] for key in _COUNTS},
    }
    _write_json(_done(path), described)


def _tokenize(
    pieces: list[Piece], settings: Settings, vocabulary: Vocabulary, counts: Counter[str]
) -> Iterator[list[list[int]]]:
    tokenizer = make_tokenizer(vocabulary, settings.cased)
    for lines in _documents(pieces, settings, counts):
        texts = list(sentences(lines, settings.sentences, counts))
        document = []
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            # The fast variant leaves out the offsets, which only questions need.
            for encoded in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                ids = encoded.ids
                if ids:  # a sentence of control characters only, for example, has no ids
                    document.append(ids)
                    counts["tokens"] += len(ids)
                    counts["unknown_tokens"] += ids.count(vocabulary.unknown_id)
        counts["sentences"] += len(document)
        if document:
            yield document
        else:
            # The reader has counted it as a document with text.
            counts["documents"] -= 1
            counts["empty_documents"] += 1


def _documents(
    pieces: list[Piece], settings: Settings, counts: Counter[str]
) -> Iterator[list[str]]:
    for piece in pieces:
        if piece.path.startswith(TFDS_PREFIX):
            yield from read_tfds(piece, settings.data_dir, counts)
        else:
            yield from read_piece(piece, settings.documents, counts)


def _manifest(
    folder: pathlib.Path, names: list[str], identity: dict[str, Any], vocabulary: Vocabulary
) -> dict[str, Any]:
    described = [json.loads(_done(folder / name).read_text()) for name in names]
    counts = {key: sum(item["counts"][key] for item in described) for key in _COUNTS}
    if not counts["tokens"]:
        raise UserError(f"the inputs of --output={folder} hold no text")
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
    """Holds a lock in the folder; the system frees it even if the process is killed."""
    with writing.checked(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _LOCK).touch()
    with locks.hold(folder / _LOCK, f"--output={folder} is being prepared by another process"):
        yield


def _done(path: pathlib.Path) -> pathlib.Path:
    return path.with_suffix(".done.json")


def _is_whole(path: pathlib.Path) -> bool:
    """Returns whether a shard is complete; after a power failure files may be empty."""
    try:
        return json.loads(_done(path).read_text())["bytes"] == path.stat().st_size
    except (OSError, ValueError):
        return False


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete the folder") from error


def _write_json(path: pathlib.Path, value: Any) -> None:
    # A rename within a folder is atomic, so a kill leaves no half-written file of the final name.
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.rename(path)


def _sha256(path: str | os.PathLike) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error

"""Raw text: finding files, cutting them into pieces, and the documents of a piece."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tensorflow_datasets as tfds

from lamb_tpu.data.prepare import is_prepared
from lamb_tpu.errors import UserError

DOCUMENT_RULES = ("file", "blank-lines", "titles")
TFDS_PREFIX = "tfds:"
# A document is held in memory as a whole.
_MAX_DOCUMENT_BYTES = 2**28
_TITLE = re.compile(r"= (?!=).*[^=] =")  # of an article in WikiText; a section has = = on each side


class Piece(NamedTuple):
    """A part of one input: bytes `start` to `stop` of a file, or a range of TFDS records."""

    path: str
    start: int
    stop: int
    num_bytes: int


def find_files(patterns: Sequence[str]) -> list[str]:
    """Returns the files that match any of the patterns (`**` matches folders), sorted, each once.

    Raises:
      UserError: a pattern matches no file.
    """
    found = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = [os.path.abspath(path) for path in matches if os.path.isfile(path)]
        if not files:
            below = f"; for those in it give {pattern.rstrip('/')}/**/*" if matches else ""
            raise UserError(f"--input={pattern} matches no file{below}")
        found.update(files)
    return sorted(found)


def cut_files(paths: Sequence[str], rule: str, max_bytes: int) -> list[Piece]:
    """Cuts files into pieces of at most `max_bytes`; under the rule `file` a piece is a file.

    Raises:
      UserError: a file is too large for one document, which must fit into memory.
    """
    pieces = []
    for path in paths:
        size = os.path.getsize(path)
        if rule == "file" and size > _MAX_DOCUMENT_BYTES:
            raise UserError(
                f"{path} has {size / 1e6:,.0f} MB, too much for one document; say what the "
                "documents in it are by --documents=blank-lines or --documents=titles"
            )
        step = size if rule == "file" else max_bytes
        # An empty file is a piece too, so that it is counted.
        for start in range(0, size, step) if size else [0]:
            stop = min(start + step, size)
            pieces.append(Piece(path, start, stop, stop - start))
    return pieces


def read_piece(piece: Piece, rule: str, counts: Counter[str]) -> Iterator[list[str]]:
    """Yields the documents that begin in a piece of a file, each as a list of its non-blank lines.

    A document is a `file`, the text between `blank-lines`, or the text after a line `= Title =`
    that follows a blank line, as in WikiText (`titles`). It belongs to the piece in which the blank
    line before it begins. So all pieces of a file together have each document once, wherever the
    file was cut.

    Args:
      piece: a piece of a file.
      rule: one of `DOCUMENT_RULES`.
      counts: receives the numbers of `documents`, `empty_documents` (files without text) and
        `broken_lines` (not UTF-8: unreadable bytes become U+FFFD, which BERT's normaliser deletes).

    Raises:
      UserError: a line has a NUL byte, so that the file is not text, or a document is too large.
    """
    # Lines of the current document; None before the first document of this piece.
    lines: list[str] | None = [] if piece.start == 0 else None
    # Start of the blank line just before this line, if there is one; the file's start counts too.
    blank = 0 if piece.start == 0 else None
    num_bytes = 0  # size of the current document
    with open(piece.path, "rb") as file:
        if piece.start:
            # From the byte before, so that a line that begins exactly at the start is not skipped.
            file.seek(piece.start - 1)
            file.readline()  # the rest of a line that began in the previous piece
        position = file.tell()
        for content in file:
            text, broken = _decode(piece.path, position, content)
            if text and blank is not None and _begins_document(text, rule):
                if lines:
                    counts["documents"] += 1
                    yield lines
                # This document belongs to the next piece, though its first line was read here.
                if blank >= piece.stop:
                    return
                lines, num_bytes = [], 0
            # No document begins in this piece.
            elif lines is None and position >= piece.stop:
                return
            if lines is not None and text:
                lines.append(text)
                counts["broken_lines"] += broken
                num_bytes += len(content)
                if num_bytes > _MAX_DOCUMENT_BYTES:
                    raise UserError(
                        f"{piece.path} has a document of over {num_bytes / 1e6:,.0f} MB, too much "
                        f"for one: up to byte {position:,} nothing in it begins another under "
                        f"--documents={rule}"
                    )
            blank = None if text else position
            position += len(content)
    if lines:
        counts["documents"] += 1
        yield lines
    elif rule == "file":
        counts["empty_documents"] += 1


def tfds_builder(name: str, data_dir: str | None) -> tuple[tfds.core.DatasetBuilder, str]:
    """Returns the prepared TFDS set and split of an input, `tfds:wikipedia/20230601.en:train`.

    Raises:
      UserError: TFDS does not know the set; it is not prepared, or in a format that cannot be read
        by index; or it has no such split or no text.
    """
    set_name, _, split = name.removeprefix(TFDS_PREFIX).partition(":")
    try:
        builder = tfds.builder(set_name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--input={name}: TFDS has no {set_name!r}, neither by name nor prepared in "
            f"{data_dir or '~/tensorflow_datasets'} ({first_line}); give the --data-dir that holds "
            "it"
        ) from error
    if not is_prepared(builder):
        raise UserError(
            f"--input={name}: the set is not prepared in {builder.data_dir}; prepare it once with "
            f"tfds.builder({set_name!r}, file_format='array_record').download_and_prepare()"
        )
    split = split or "train"
    if split not in builder.info.splits:
        known = ", ".join(builder.info.splits)
        raise UserError(f"--input={name}: the set has no split {split!r}; it has {known}")
    if "text" not in builder.info.features:
        known = ", ".join(builder.info.features)
        raise UserError(f"--input={name}: the set has no feature 'text'; it has {known}")
    try:
        builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise UserError(
            f"--input={name}: {builder.data_dir} is prepared as {builder.info.file_format.value}, "
            "which cannot be read by index; prepare it in another --data-dir with "
            "file_format='array_record'"
        ) from error
    return builder, split


def cut_tfds(name: str, data_dir: str | None, max_bytes: int) -> list[Piece]:
    """Cuts a prepared set's records into pieces of about `max_bytes`. Raises as `tfds_builder`."""
    builder, split = tfds_builder(name, data_dir)
    info = builder.info.splits[split]
    # TFDS knows the size of a split, not of each record.
    bytes_each = max(1, info.num_bytes // max(1, info.num_examples))
    step = max(1, max_bytes // bytes_each)
    return [
        Piece(name, start, stop, (stop - start) * bytes_each)
        for start in range(0, info.num_examples, step)
        for stop in [min(start + step, info.num_examples)]
    ]


def read_tfds(piece: Piece, data_dir: str | None, counts: Counter[str]) -> Iterator[list[str]]:
    """Yields the documents of a piece of a TFDS set, one for each record; counts as `read_piece`.

    Raises:
      UserError: a record is damaged or has a NUL byte; see also `tfds_builder`.
    """
    builder, split = tfds_builder(piece.path, data_dir)
    records = builder.as_data_source(split=split)
    for start in range(piece.start, piece.stop, 256):
        try:
            found = records.__getitems__(list(range(start, min(start + 256, piece.stop))))
        except RuntimeError as error:  # ArrayRecord's own
            raise UserError(
                f"--input={piece.path}: a record cannot be read, so the files are damaged; delete "
                f"{builder.data_dir} and prepare the set again ({' '.join(str(error).split())})"
            ) from error
        for record in found:
            content = record["text"]
            content = content if isinstance(content, bytes) else content.encode()
            decoded = [_decode(piece.path, 0, line) for line in content.split(b"\n")]
            counts["broken_lines"] += sum(broken for _, broken in decoded)
            lines = [text for text, _ in decoded if text]
            counts["documents" if lines else "empty_documents"] += 1
            if lines:
                yield lines


def _begins_document(text: str, rule: str) -> bool:
    """Returns whether a line after a blank line begins a document."""
    return rule == "blank-lines" or (rule == "titles" and _TITLE.fullmatch(text) is not None)


def _decode(path: str, position: int, content: bytes) -> tuple[str, bool]:
    if b"\0" in content:
        raise UserError(f"{path} is no text: its line at byte {position:,} holds a NUL byte")
    broken = False
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text, broken = content.decode(errors="replace"), True
    # Some editors begin a UTF-8 file with a byte order mark.
    return text.removeprefix("\ufeff").strip(), broken

"""Raw text: finds files, cuts them into segments, and reads the documents of a segment."""

import functools
import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lamb_tpu.errors import UserError, listed, unreadable
from lamb_tpu.files import reading

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

DOCUMENT_RULES = ("file", "blank-lines", "titles")
TFDS_PREFIX = "tfds:"
_PREPARE = "prepare it with tfds.builder({!r}, file_format='array_record').download_and_prepare()"
_MAX_DOCUMENT_BYTES = 2**28  # a document must fit into memory
_TITLE = re.compile(r"= (?!=).*[^=] =")  # title of a WikiText article; section titles have `= =`


class Segment(NamedTuple):
    """A segment of an input: bytes `start` to `stop - 1` of a file, or such a range of TFDS records."""

    path: str
    start: int
    stop: int
    num_bytes: int


def find_files(patterns: Sequence[str]) -> list[str]:
    """Returns the files that match any of the patterns (`**` matches folders), sorted, each once."""
    matched = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        files = [os.path.abspath(path) for path in matches if os.path.isfile(path)]
        if not files:
            below, remedy = "", "give a file, or a pattern that matches files"
            if any(map(os.path.isdir, matches)):
                remedy = f"give {pattern.rstrip('/')}/**/* for the files in the folder"
            elif matches:
                below = f": {matches[0]} is a pipe, a device or a broken link"
            raise UserError("--input", pattern, f"matches no file{below}", remedy)
        matched.update(files)
    return sorted(matched)


def cut_files(paths: Sequence[str], rule: str, max_bytes: int) -> list[Segment]:
    """Cuts files into segments of at most `max_bytes`; with the rule `file`, a file is one segment."""
    segments = []
    for path in paths:
        size = os.path.getsize(path)
        if rule == "file" and size > _MAX_DOCUMENT_BYTES:
            problem = f"has {size / 1e6:,.0f} MB, which is too large for a document"
            remedy = "split it into documents with --documents=blank-lines or --documents=titles"
            raise UserError(path, ..., problem, remedy)
        step = size if rule == "file" else max_bytes
        # An empty file is a segment too, so that it is counted.
        for start in range(0, size, step) if size else [0]:
            stop = min(start + step, size)
            segments.append(Segment(path, start, stop, stop - start))
    return segments


def read_segment(segment: Segment, rule: str, counts: Counter[str]) -> Iterator[list[str]]:
    """Yields the documents that begin in a segment of a file, each as a list of non-blank lines.

    The rule says what a document is. `file`: an entire file. `blank-lines`: the text between blank
    lines. `titles`: the text that begins with a line `= Title =` after a blank line, as in WikiText. A
    document belongs to the segment in which the blank line before the document begins, so the
    segments of a file together have each document once, wherever the file was cut.

    Adds to `counts` the numbers of `documents`, `empty_documents` (files without text) and
    `broken_lines` (not UTF-8: unreadable bytes become U+FFFD, which BERT's normaliser deletes).

    Raises:
      UserError: a line has a NUL byte, so the file is not text, or a document is too large.
    """
    # Lines of the current document; None before the first document of this segment.
    lines: list[str] | None = [] if segment.start == 0 else None
    # Start of the blank line just before this line, if any; the file's start counts as a blank line.
    blank = 0 if segment.start == 0 else None
    num_bytes = 0  # size of the current document
    try:
        file = reading.open_file(segment.path)
    except (OSError, ValueError) as error:
        raise unreadable(segment.path, error, "make it readable, or leave it out") from None
    with file:
        # A line that is too long is read in parts, each of which exceeds the limit on a document.
        read_line = functools.partial(file.readline, _MAX_DOCUMENT_BYTES + 1)
        if segment.start:
            # Begins one byte earlier, so that a line that begins exactly at the start is not skipped.
            file.seek(segment.start - 1)
            # Skips the rest of a line that began in the previous segment.
            while (rest := read_line()) and not rest.endswith(b"\n"):
                pass
        position = file.tell()
        for content in iter(read_line, b""):
            text, broken = _decode(segment.path, position, content)
            if text and blank is not None and _begins_document(text, rule):
                if lines:
                    counts["documents"] += 1
                    yield lines
                # This document belongs to the next segment, though its first line was read here.
                if blank >= segment.stop:
                    return
                lines, num_bytes = [], 0
            # No document began in this segment.
            elif lines is None and position >= segment.stop:
                return
            if lines is not None and text:
                lines.append(text)
                counts["broken_lines"] += broken
                num_bytes += len(content)
                if num_bytes > _MAX_DOCUMENT_BYTES:
                    size = f"{num_bytes / 1e6:,.0f} MB, up to byte {position:,}"
                    remedy = f"use another rule than --documents={rule}, or split the file"
                    raise UserError(segment.path, ..., f"has a document of over {size}", remedy)
            blank = None if text else position
            position += len(content)
    if lines:
        counts["documents"] += 1
        yield lines
    elif rule == "file":
        counts["empty_documents"] += 1


def tfds_builder(name: str, data_dir: str | None) -> "tuple[tfds.core.DatasetBuilder, str]":
    """Returns the prepared TFDS set and split of an input, such as `tfds:wikipedia/20230601.en:train`.

    Raises a UserError if TFDS does not know the set, or if the set is not prepared, lacks the split
    or the feature `text`, or cannot be read by index.
    """
    # Imported here, because files do not need TFDS.
    import tensorflow_datasets as tfds

    from lamb_tpu.data.prepare import is_prepared

    set_name, _, split = name.removeprefix(TFDS_PREFIX).partition(":")
    try:
        builder = tfds.builder(set_name, data_dir=data_dir)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        problem = f"is neither in TFDS nor in {data_dir or '~/tensorflow_datasets'} ({first_line})"
        raise UserError("--input", name, problem, "give the --data-dir that holds it") from error
    if not is_prepared(builder):
        problem = f"is not prepared in {builder.data_dir}"
        raise UserError("--input", name, problem, _PREPARE.format(set_name))
    split = split or "train"
    if split not in builder.info.splits:
        problem = f"has no split {split!r}"
        raise UserError("--input", name, problem, f"use {listed(builder.info.splits)}")
    if "text" not in builder.info.features:
        remedy = f"use a set with text; this set has {listed(builder.info.features, 'and')}"
        raise UserError("--input", name, "has no feature 'text'", remedy)
    try:
        builder.as_data_source(split=split)
    except NotImplementedError as error:
        problem = f"is prepared as {builder.info.file_format.value}, which cannot be read by index"
        remedy = "prepare it in another --data-dir with file_format='array_record'"
        raise UserError("--input", name, problem, remedy) from error
    return builder, split


def cut_tfds(name: str, data_dir: str | None, max_bytes: int) -> list[Segment]:
    """Cuts a prepared set into segments of about `max_bytes`; see `tfds_builder` for `name` and errors."""
    builder, split = tfds_builder(name, data_dir)
    info = builder.info.splits[split]
    # TFDS knows the total size of a split, but not the size of each record.
    bytes_each = max(1, info.num_bytes // max(1, info.num_examples))
    step = max(1, max_bytes // bytes_each)
    return [
        Segment(name, start, stop, (stop - start) * bytes_each)
        for start in range(0, info.num_examples, step)
        for stop in [min(start + step, info.num_examples)]
    ]


def read_tfds(segment: Segment, data_dir: str | None, counts: Counter[str]) -> Iterator[list[str]]:
    """Yields the documents of a segment of a TFDS set, one per record, as `read_segment` does."""
    builder, split = tfds_builder(segment.path, data_dir)
    records = builder.as_data_source(split=split)
    for start in range(segment.start, segment.stop, 256):
        try:
            records_read = records.__getitems__(list(range(start, min(start + 256, segment.stop))))
        except RuntimeError as error:  # raised by ArrayRecord
            remedy = f"delete {builder.data_dir} and prepare the set again"
            key = f"a record of --input={segment.path}"
            raise unreadable(key, error, remedy, "is damaged") from error
        for record in records_read:
            text = record["text"]
            content = text if isinstance(text, bytes) else text.encode()
            decoded = [_decode(segment.path, 0, line) for line in content.split(b"\n")]
            counts["broken_lines"] += sum(broken for _, broken in decoded)
            lines = [line for line, _ in decoded if line]
            counts["documents" if lines else "empty_documents"] += 1
            if lines:
                yield lines


def _begins_document(text: str, rule: str) -> bool:
    return rule == "blank-lines" or (rule == "titles" and _TITLE.fullmatch(text) is not None)


def _decode(path: str, position: int, content: bytes) -> tuple[str, bool]:
    if b"\0" in content:
        problem = f"is not text: its line at byte {position:,} holds a NUL byte"
        raise UserError(path, ..., problem, "leave the file out")
    broken = False
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text, broken = content.decode(errors="replace"), True
    # Some editors begin a UTF-8 file with a byte order mark.
    return text.removeprefix("\ufeff").strip(), broken

"""Checks a set of photographs for damaged and odd pictures before a long run.

    python -m lamb_tpu.data.images.check --name=image_folder --dir=DIR --split=train

Every picture is decoded whole. A run decodes only its crops and would not see damage elsewhere.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from lamb_tpu import terminal
from lamb_tpu.cluster.host import num_cores
from lamb_tpu.data import load
from lamb_tpu.data.images import headers
from lamb_tpu.data.images.folder import FolderRecords
from lamb_tpu.data.images.jpeg import MAX_PIXELS, BadImage, decode_whole
from lamb_tpu.data.images.records import Records
from lamb_tpu.data.images.source import ImageSource
from lamb_tpu.data.images.tally import KINDS
from lamb_tpu.errors import UserError

_CHUNK = 16  # examples that a thread takes at a time
_SUMMARY = {"rgb": "in colour", **KINDS}


def check_records(records: Records, max_pixels: int) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, name, reason) of each example in order; only kind `bad` has a reason.

    An image with a rotation tag is yielded a second time, of the kind `rotated`.
    """

    def check(start: int) -> list[tuple[str, str, str]]:
        indices = range(start, min(start + _CHUNK, len(records)))
        found = []
        for index, record in zip(indices, records.read(indices)):
            kind, reason = "bad", record.problem
            if not reason and not 0 <= record.label < records.num_classes:
                reason = f"its label is {record.label}, of {records.num_classes} classes"
            if not reason:
                try:
                    _, kind = decode_whole(record.content, max_pixels)
                except BadImage as bad:
                    reason = str(bad)
            # Only what is rare is named: a name can cost the reading of a record.
            name = records.name(index) if kind not in ("rgb", "grey") else ""
            found.append((kind, name, reason))
            if kind != "bad" and headers.is_rotated(record.content):
                found.append(("rotated", name or records.name(index), ""))
        return found

    starts = iter(range(0, len(records), _CHUNK))
    with ThreadPoolExecutor(num_cores()) as pool:
        # A part at a time, so that findings are printed as they are made.
        while part := list(itertools.islice(starts, 8 * num_cores())):
            for found in pool.map(check, part):
                yield from found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if records are bad, 2 for a mistake, 130 for Ctrl-C."""
    try:
        return _run(_parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(asked: argparse.Namespace) -> int:
    options = {
        # A run may stop at the first mistake; this command lists them all.
        "on_bad_record": "skip",
        "num_classes": asked.num_classes,
        "max_megapixels": asked.max_megapixels,
    }
    source = load(
        asked.name,
        asked.split,
        data_dir=asked.data_dir,
        source_dir=asked.dir,
        options=options,
        training=False,
    )
    if not isinstance(source, ImageSource):
        raise UserError(f"--name={asked.name} is no set of photographs that are decoded when read")
    records = source.records
    faults = records.faults if isinstance(records, FolderRecords) else records.notes
    for note in records.notes:
        print(f"{'bad' if note in faults else 'note'}\t{note}")
    counts = dict.fromkeys(_SUMMARY, 0)
    for kind, name, reason in check_records(records, source.max_pixels):
        counts[kind] += 1
        if name:
            print("\t".join(part for part in (kind, name, reason) if part), flush=True)
    rotated = counts.pop("rotated")
    listed = ", ".join(f"{count:,} {_SUMMARY[kind]}" for kind, count in counts.items() if count)
    listed += f"; {rotated:,} {_SUMMARY['rotated']}" if rotated else ""
    print(f"{len(source):,} pictures of {source.num_classes:,} classes: {listed}")
    return 1 if counts["bad"] or faults else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.data.images.check",
        description=__doc__.partition("\n")[0],
        epilog="Prints a line for each image that is no ordinary JPEG, is rotated by its EXIF tag, "
        "or is bad, with the reason; then counts. Notes say which files are not read.",
    )
    add = parser.add_argument
    add(
        "--name",
        default="image_folder",
        metavar="SET",
        help="image_folder (the default), imagenet2012 or tfds:NAME",
    )
    add("--dir", metavar="DIR", help="as config.data.dir: of image_folder")
    add("--data-dir", metavar="DIR", help="as config.data.prepared_dir: of sets that TFDS prepared")
    add("--split", default="train", help="(default: %(default)s)")
    add(
        "--num-classes",
        type=int,
        default=0,
        metavar="N",
        help="as config.data.options.num_classes; default what the set tells",
    )
    add(
        "--max-megapixels",
        type=float,
        default=MAX_PIXELS / 1e6,
        metavar="N",
        help="as config.data.options.max_megapixels (default: %(default)g)",
    )
    return parser.parse_all(arguments)


if __name__ == "__main__":
    terminal.run_and_exit(main)

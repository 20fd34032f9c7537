"""Checks a set of photographs for damaged and unusual images before a long run.

    python -m lamb_tpu.check_images --name=image_folder --dir=DIR --split=train

Every image is decoded in full. A run decodes only its crops, and would miss damage outside a crop.
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
from lamb_tpu.data.images.jpeg import MAX_PIXELS, BadImage, decode_full
from lamb_tpu.data.images.records import Records
from lamb_tpu.data.images.source import ImageSource
from lamb_tpu.data.images.tally import TYPES
from lamb_tpu.errors import UserError, printable

_CHUNK = 16  # examples per task of a thread
_SUMMARY = {"rgb": "in colour", **TYPES}


def check_records(records: Records, max_pixels: int) -> Iterator[tuple[str, str, str]]:
    """Yields (kind, name, reason) for each example in order; only the kind `bad` has a reason.

    The name is '' for RGB and grey JPEGs. An image with a rotation tag is yielded a second time, with
    the kind `rotated`.
    """

    def check(start: int) -> list[tuple[str, str, str]]:
        indices = range(start, min(start + _CHUNK, len(records)))
        results = []
        for index, record in zip(indices, records.read(indices)):
            kind, reason = "bad", record.problem
            if not reason and not 0 <= record.label < records.num_classes:
                reason = (
                    f"its label is {record.label}, out of the range 0 to {records.num_classes - 1}"
                )
            if not reason:
                try:
                    _, kind = decode_full(record.content, max_pixels)
                except BadImage as bad:
                    reason = str(bad)
            # Only unusual images are named, because a record may have to be read for its name.
            name = records.name(index) if kind not in ("rgb", "grey") else ""
            results.append((kind, name, reason))
            if kind != "bad" and headers.is_rotated(record.content):
                results.append(("rotated", name or records.name(index), ""))
        return results

    starts = iter(range(0, len(records), _CHUNK))
    with ThreadPoolExecutor(num_cores()) as pool:
        # Submitted in batches, so that problems are printed while later images are checked.
        while batch := list(itertools.islice(starts, 8 * num_cores())):
            for results in pool.map(check, batch):
                yield from results


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if records are bad, 2 for a user error, 130 for Ctrl-C."""
    try:
        return _run(_parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(flags: argparse.Namespace) -> int:
    options = {
        # A run may stop at the first bad record; this command lists all bad records.
        "on_bad_record": "skip",
        "num_classes": flags.num_classes,
        "max_megapixels": flags.max_megapixels,
    }
    source = load(
        flags.name,
        flags.split,
        data_dir=flags.data_dir,
        source_dir=flags.dir,
        options=options,
        training=False,
    )
    if not isinstance(source, ImageSource):
        problem = "is not a set of photographs"
        remedy = "use image_folder, or a TFDS set with photographs"
        raise UserError("--name", flags.name, problem, remedy)
    records = source.records
    faults = records.faults if isinstance(records, FolderRecords) else records.notes
    for note in records.notes:
        print(f"{'bad' if note in faults else 'note'}\t{printable(note)}")
    counts = dict.fromkeys(_SUMMARY, 0)
    for kind, name, reason in check_records(records, source.max_pixels):
        counts[kind] += 1
        if name:
            columns = (printable(column) for column in (kind, name, reason) if column)
            print("\t".join(columns), flush=True)
    rotated = counts.pop("rotated")
    listed = ", ".join(f"{count:,} {_SUMMARY[kind]}" for kind, count in counts.items() if count)
    listed += f"; {rotated:,} {_SUMMARY['rotated']}" if rotated else ""
    print(f"{len(source):,} images of {source.num_classes:,} classes: {listed}")
    return 1 if counts["bad"] or faults else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m lamb_tpu.check_images",
        description=(__doc__ or "").partition("\n")[0],
        epilog=terminal.fit(
            "Prints a line for each image that is not an ordinary JPEG, has an EXIF rotation tag, "
            "or is bad (with the reason), and then the counts. Notes name the files that a run "
            "does not read."
        ),
    )
    option = parser.option
    option(
        "--name=SET",
        "image_folder (the default), imagenet2012 or tfds:NAME",
        default="image_folder",
    )
    option("--dir=DIR", "like config.data.dir: for image_folder")
    option("--data-dir=DIR", "like config.data.prepared_dir: for prepared TFDS sets")
    option("--split", "the split to check (default: %(default)s)", default="train")
    option(
        "--num-classes=N",
        "like config.data.options.num_classes (default: the number in the set)",
        type=terminal.count(),
        default=0,
    )
    option(
        "--max-megapixels=N",
        "like config.data.options.max_megapixels (default: %(default)g)",
        type=terminal.number(0, 1e9),
        default=MAX_PIXELS / 1e6,
    )
    return parser.parse_all(arguments)


if __name__ == "__main__":
    terminal.run_and_exit(main)

"""Runs bad inputs through every command, and kills and restarts commands.

  python -m experiments.attack --seed=0 --inputs=1000 --kills=60 --write

Every input is a working command with one random change: to an argument, a config key, a record, a
table, a cached plan, an image, a text, a stored run, a checkpoint, weights, or the command's process.
The command must reject the input in one sentence, or accept it for a reason listed in `reasons`. If a
command is killed and started again, its results must equal those of an uninterrupted command, bit for
bit. The exit status is 1 if any input had a different outcome, or if any killed command showed a fault.
"""

import argparse
import functools
import json
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from absl import logging

from experiments.attack import bases, forks, inputs, kills, page
from experiments.attack.areas import (
    checkpoints,
    commands,
    config,
    images,
    launches,
    plans,
    processes,
    recipes,
    records,
    runs,
    searches,
    tables,
    texts,
    weights,
)
from experiments.attack.inputs import Input
from experiments.attack.outcome import classify
from lamb_tpu import terminal
from lamb_tpu.errors import UserError

# Relative frequency of each area.
AREAS = {
    commands: 5,
    config: 5,
    recipes: 2,
    records: 4,
    tables: 3,
    runs: 3,
    checkpoints: 2,
    plans: 3,
    images: 3,
    texts: 3,
    weights: 2,
    launches: 2,
    searches: 1,
    processes: 2,
}


def draw(seed: int, number: int, prepared: pathlib.Path) -> list[Input]:
    """Draws `number` inputs; a larger number only adds inputs at the end."""
    rng, drawn = random.Random(seed), list[Input]()
    while len(drawn) < number:
        [area] = rng.choices(list(AREAS), list(AREAS.values()))
        drawn.append(area.draw(rng, prepared))
    return drawn


def command(given: Input, root: pathlib.Path, prepared: pathlib.Path) -> forks.Command:
    """Writes an input's files below `root`, and returns the input's command."""
    folder = root / "input"
    folder.mkdir(parents=True)
    inputs.make(given, folder, prepared)
    replaced = {name: text.replace("@/", f"{folder}/") for name, text in given.environment.items()}
    return forks.Command(
        given.module,
        [word.replace("@/", f"{folder}/") for word in given.arguments],
        folder,
        replaced,
        processes.SETTINGS.get(given.setting),
        given.signals,
    )


def _parse() -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m experiments.attack", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seed", type=terminal.count(), default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--inputs", type=terminal.count(), default=1000, help="(default: %(default)s)"
    )
    parser.add_argument("--kills", type=terminal.count(), default=60, help="(default: %(default)s)")
    parser.add_argument(
        "--jobs",
        type=terminal.count(1),
        default=2,
        help="parallel processes (default: %(default)s)",
    )
    parser.add_argument("--only", help="areas or, with a #, numbers of inputs, such as images,#12")
    parser.add_argument(
        "--bases", metavar="DIR", help="folder of the prepared files; made if missing"
    )
    parser.add_argument("--dump", metavar="FILE", help="append every outcome as a line of JSON")
    parser.add_argument("--write", action="store_true", help="write the page")
    return parser.parse_all(None)


def _chosen(drawn: Sequence[Input], only: str | None) -> list[int]:
    names = set((only or "").split(","))
    return [
        number
        for number, given in enumerate(drawn)
        if only is None or given.area in names or f"#{number}" in names
    ]


def _inputs(
    options: argparse.Namespace, root: pathlib.Path, prepared: pathlib.Path
) -> Iterator[page.Row | forks.Command]:
    """Yields each input with its outcome; in a child process, the command that the process must run."""
    drawn = draw(options.seed, options.inputs, prepared)
    chosen = _chosen(drawn, options.only)
    made = (command(drawn[number], root / f"{number:04}", prepared) for number in chosen)
    for item in forks.run(made, options.jobs):
        if isinstance(item, forks.Command):
            yield item
            return
        number, end = chosen[item[0]], item[1]
        shutil.rmtree(root / f"{number:04}")
        yield page.Row(number, drawn[number], classify(end, drawn[number].statuses), end)


def _dump(row: page.Row, file: str) -> None:
    with open(file, "a") as dumped:
        dumped.write(
            json.dumps(
                {
                    "number": row.number,
                    "outcome": row.outcome,
                    "area": row.given.area,
                    "change": row.given.change,
                    "place": row.given.location,
                    "command": row.given.command(),
                    "status": row.end.status,
                    "seconds": round(row.end.seconds, 2),
                    "out": row.end.out[-1500:],
                    "err": row.end.err[-6000:],
                }
            )
            + "\n"
        )


def _make(case: kills.Case, folder: pathlib.Path, prepared: pathlib.Path) -> None:
    for name in case.bases:
        shutil.copytree(prepared / name, folder / name, symlinks=True)
    if "papers" in case.bases and case.name == "reproduce run":
        for path in (folder / "papers" / "small").glob("digits.*json*"):  # remove the records
            path.unlink()


def main() -> int | forks.Command:
    """Returns the exit status; in a child process, the command that the process must run."""
    try:
        options = _parse()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    # Do not use a TemporaryDirectory: the first child process that ends would remove it.
    root = pathlib.Path(tempfile.mkdtemp(prefix="attack-"))
    prepared = root / "bases" if options.bases is None else pathlib.Path(options.bases).absolute()
    if not prepared.exists():
        prepared.mkdir()
        bases.prepare(prepared)
    forks.warm()
    logging.set_verbosity(
        logging.ERROR
    )  # Orbax warns when this process reads the commands' checkpoints
    print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
    rows, killed = list[page.Row](), list[kills.Kill]()
    for row in _inputs(options, root, prepared):
        if isinstance(row, forks.Command):
            return row
        rows.append(row)
        if row.is_fault():
            print(ascii(row.describe()), flush=True)
        if len(rows) % 50 == 0:
            print(f"{len(rows)} inputs after {time.monotonic() - began:.0f} s", flush=True)
        if options.dump is not None:
            _dump(row, options.dump)
    if options.kills:
        make = functools.partial(_make, prepared=prepared)
        for item in kills.attack(options.seed, options.kills, root, make, options.jobs):
            if isinstance(item, forks.Command):
                return item
            killed = item
    shutil.rmtree(root)
    words = (
        f"python -m experiments.attack --seed={options.seed} --inputs={options.inputs} "
        f"--kills={options.kills}"
    )
    text = page.text(rows, killed, words, time.monotonic() - began)
    print(text)
    if options.write:
        page.PAGE.write_text(text)
    return int(any(row.is_fault() for row in rows) or any(kill.fault for kill in killed))


if __name__ == "__main__":
    result = main()
    if isinstance(result, forks.Command):
        forks.become(result)
    sys.exit(result)

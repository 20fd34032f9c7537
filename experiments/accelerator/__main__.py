"""Prepares a folder for a machine with an accelerator and no package index, and measures on that machine.

  python -m experiments.accelerator prepare FOLDER --data=DATA
  python -m experiments.accelerator run FOLDER --minutes=9 --out=OUT

`prepare` needs the extra train and, unless --wheels is given, network access. `run` needs only JAX,
Flax, Optax and Orbax; the folder holds everything else. `run` can be started again: it resumes
unfinished runs and skips finished measurements. Afterwards, add the records to the checkout:

  python -m lamb_tpu.reproduce adopt OUT/mnist.json
"""

import argparse
import pathlib
import sys

from lamb_tpu import terminal
from lamb_tpu.errors import UserError


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = terminal.Parser(
        prog="python -m experiments.accelerator", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare = commands.add_parser("prepare", help="make the folder")
    prepare.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    prepare.add_argument(
        "--data",
        metavar="DATA",
        type=pathlib.Path,
        required=True,
        help="folder with mnist, cifar10 (the JPEGs), bert_vocab/vocab.txt, and "
        "wikitext2_valid_test (or another text; see --text)",
    )
    prepare.add_argument(
        "--text",
        metavar="GLOB",
        help="text files for BERT (default: DATA/wikitext2_valid_test/*.raw)",
    )
    prepare.add_argument(
        "--wheels",
        metavar="DIR",
        type=pathlib.Path,
        help="folder with the wheels (default: pip downloads them)",
    )
    run = commands.add_parser("run", help="measure, the most valuable parts first")
    run.add_argument("folder", metavar="FOLDER", type=pathlib.Path)
    run.add_argument(
        "--out", metavar="OUT", type=pathlib.Path, required=True, help="folder for the results"
    )
    run.add_argument(
        "--minutes",
        metavar="N",
        type=float,
        default=9.0,
        help="total time in minutes (default: %(default)g); each part gets its share",
    )
    run.add_argument(
        "--small",
        action="store_true",
        help="use small shapes and smoke runs, to test the program on a CPU",
    )
    return parser.parse_all(arguments)


def main(options: argparse.Namespace) -> None:
    # Import late: `run` starts before ml_collections and other packages are installed.
    if options.command == "prepare":
        from experiments.accelerator import folder

        text = options.text or str(options.data / "wikitext2_valid_test" / "*.raw")
        for line in folder.prepare(options.folder, options.data, text, options.wheels):
            print(line, flush=True)
    else:
        from experiments.accelerator import running

        running.run(options.folder, options.out, 60 * options.minutes, options.small)


if __name__ == "__main__":
    try:
        main(_parse(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)

"""Lists the networks with their costs: `python -m lamb_tpu.models [--json]`."""

import argparse
import json
from collections.abc import Sequence

from lamb_tpu import terminal
from lamb_tpu.models.costs import COSTS, table

_NOTE = """\
Parameters are those trained; multiply-adds are of the forward pass of one
input, in convolutions and dense layers, with each network's fields at their
defaults. BERT is Base, with 20 masked tokens.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m lamb_tpu.models",
        allow_abbrev=False,
        epilog=_NOTE,
        description="Lists the networks for config.model.name, with their costs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")
    options = parser.parse_args(arguments)
    if options.json:
        print(json.dumps([item._asdict() for item in COSTS], indent=2))
    else:
        print(table(COSTS))
    return 0


if __name__ == "__main__":
    terminal.run_and_exit(main)

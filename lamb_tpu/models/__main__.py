"""The command that lists the networks: `python -m lamb_tpu.models [--json]`."""

import argparse
import json
import sys
from collections.abc import Sequence

import jax

from lamb_tpu import models
from lamb_tpu.models.listing import describe, table

_NOTE = """\
Parameters are those trained; multiply-adds are of the forward pass of one
input, in convolutions and dense layers, with each network's fields at their
defaults. BERT is Base, with 20 masked tokens.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m lamb_tpu.models", allow_abbrev=False, epilog=_NOTE,
        description="Lists the networks that config.model.name can be, with what they cost.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="a list of objects instead of a table"
    )
    options = parser.parse_args(arguments)
    # Nothing is computed, so no accelerator is needed, or taken from a run that has it.
    jax.config.update("jax_platforms", "cpu")
    descriptions = [describe(name) for name in models.MODULES]
    if options.json:
        print(json.dumps([item._asdict() for item in descriptions], indent=2))
    else:
        print(table(descriptions))
    return 0


if __name__ == "__main__":
    sys.exit(main())

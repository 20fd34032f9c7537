"""Lists the networks for config.model.name with their costs."""

import json
import sys
from collections.abc import Sequence

from lamb_tpu import terminal
from lamb_tpu.errors import UserError
from lamb_tpu.models.costs import COSTS, table

_NOTE = """\
The costs are those of each network with its default fields. Parameters are
trained parameters only. Multiply-adds are those of one input's forward pass, in
convolutions, dense layers and the attention of BERT and GNMT. BERT is BERT-Base
with 20 masked tokens.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list; returns the exit status, which is 2 for an unknown argument."""
    parser = terminal.Parser(
        prog="python -m lamb_tpu.models", description=__doc__ or "", epilog=_NOTE
    )
    parser.add_argument(
        "--json", action="store_true", help="print a list of JSON objects, not a table"
    )
    try:
        options = parser.parse_all(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([item._asdict() for item in COSTS], indent=2))
    else:
        print(table(COSTS))
    return 0


if __name__ == "__main__":
    terminal.run_and_exit(main)

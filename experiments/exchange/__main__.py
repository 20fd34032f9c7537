"""Compiles exchanges for TPU slices and writes when compression pays: compression.md.

  python -m experiments.exchange

Programs that rows.json lacks are compiled first; what is compiled stays if it is stopped. All of
them take hours on 2 cores. Needs Linux on x86-64, no TPU.
"""

import json
import sys

from absl import flags

from experiments.exchange import page, programs
from lamb_tpu import cli
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.plan.making import release

_AT_MOST = flags.DEFINE_integer(
    "at_most",
    None,
    "Number of programs to compile before the page is written. Default: all.",
    lower_bound=0,
)
_ONLY = flags.DEFINE_string("only", "", "Compile programs whose key has this text in it.")


def main() -> None:
    """Compiles what is missing and writes the page."""
    kept = programs.load()
    todo = [case for case in programs.cases() if case.key not in kept and _ONLY.value in case.key]
    for place, case in enumerate(todo[: _AT_MOST.value], start=1):
        print(f"{place} of {len(todo)}: {case.key}", file=sys.stderr, flush=True)
        try:
            row = programs.measure(case)
        except UserError as error:  # the page names what is missing
            print(f"refused: {error}", file=sys.stderr, flush=True)
            continue
        # Another process may have kept rows in the meantime.
        kept = programs.load() | {case.key: row}
        writing.replace(programs.FOLDER / "rows.json", json.dumps(kept, indent=1) + "\n")
        release()
    print(page.write(programs.load()))


if __name__ == "__main__":
    cli.run_main(main)

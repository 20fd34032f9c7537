"""Compiles exchanges for TPU slices and writes compression.md, which shows when compression pays.

  python -m experiments.exchange

The command first compiles the programs that rows.json lacks; on 2 cores, compiling all programs takes
hours. An interrupted run keeps the compiled programs. The command needs Linux on x86-64, but no TPU.
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
    """Compiles the missing programs and writes the page."""
    saved = programs.load()
    todo = [case for case in programs.cases() if case.key not in saved and _ONLY.value in case.key]
    for number, case in enumerate(todo[: _AT_MOST.value], start=1):
        print(f"{number} of {len(todo)}: {case.key}", file=sys.stderr, flush=True)
        try:
            row = programs.measure(case)
        except UserError as error:  # continue, because the page lists missing programs
            print(f"rejected: {error}", file=sys.stderr, flush=True)
            continue
        # Another process may have added rows meanwhile.
        saved = programs.load() | {case.key: row}
        writing.replace(programs.FOLDER / "rows.json", json.dumps(saved, indent=1) + "\n")
        release()
    print(page.write(programs.load()))


if __name__ == "__main__":
    cli.run_main(main)

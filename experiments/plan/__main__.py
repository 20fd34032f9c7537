"""Plans published runs, fits the constants of the network to them, and finds fastest layouts.

  python -m experiments.plan
  python -m experiments.plan --add=WORKDIR

The first command compiles the programs of `published.toml` and logged.jsonl that rows.json lacks,
and writes calibration.md and lamb_tpu/cost/calibrated.py; then it makes the searches that
layouts.json lacks and writes layouts.md. A program takes minutes, and all of them three hours on 2
cores; what is compiled stays if it is stopped. Needs Linux on x86-64, no TPU.

The second adds a finished run of this package on a TPU to logged.jsonl, compiles its program, and
fits again. It makes no search.
"""

import json
import sys
from typing import Any

from absl import flags

from experiments.plan import layouts, logged, page, rows
from experiments.plan.rows import Part, load_kept, measure
from lamb_tpu import cli
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.plan.cache import Cache, default_folder
from lamb_tpu.plan.making import make_plan, release
from lamb_tpu.plan.report import Plan

_AT_MOST = flags.DEFINE_integer(
    "at_most",
    None,
    "Number of programs to compile before calibration.md is written; then nothing "
    "is searched. Default: all.",
    lower_bound=0,
)
_ADD = flags.DEFINE_string(
    "add", None, "The folder of a finished run on a TPU: adds it to the calibration and fits again."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "With --add: the slice of the run, as lamb_tpu.plan takes it, where its "
    "number of devices does not say which, such as 2xv5e-256 or v4:4x4x8.",
)


def main() -> None:
    """Compiles what is missing and writes the pages."""
    kept, cache = load_kept(), Cache(default_folder())
    if _ADD.value is not None:
        add(logged.of_workdir(_ADD.value, _TOPOLOGY.value), kept, cache)
        return
    if _TOPOLOGY.value is not None:
        raise UserError("--topology is the slice of a run; give --add=WORKDIR too")
    sources = logged.load_all()
    todo = list(page.missing(sources, kept).values())[: _AT_MOST.value]
    for place, (topology, part) in enumerate(todo, start=1):
        print(f"{place} of {len(todo)}: {part.name} on {topology}", file=sys.stderr, flush=True)
        plan = make_plan(part.config(), topology, examples=part.examples, cache=cache)
        keep(plan, part, topology, kept)
    print(page.write(sources, kept))
    if _AT_MOST.value is None:
        records = layouts.load()
        for topology in layouts.TOPOLOGIES[len(records) :]:
            records.append(layouts.search(topology, cache))
            layouts.write(records)
        print(layouts.page(records))


def keep(plan: Plan, part: Part, topology: str, kept: dict[str, dict[str, Any]]) -> None:
    """Adds a compiled program to rows.json, and to what was read from there."""
    key = part.key(topology)
    kept[key] = measure(plan, key)
    writing.replace(rows.FOLDER / "rows.json", json.dumps(kept, indent=1) + "\n")
    release()


def add(row: logged.Row, kept: dict[str, dict[str, Any]], cache: Cache) -> None:
    """Adds a run to the calibration, fits again, and prints the run beside its plan.

    Raises:
      UserError: the run is there already, or its config does not make the program that ran.
    """
    logged.check_new(row)
    if row.part.key(row.topology) not in kept:
        print(f"compiling {row.part.name} for {row.topology}", file=sys.stderr, flush=True)
        plan = make_plan(row.part.config(), row.topology, examples=row.examples, cache=cache)
        if not plan.fits or plan.mesh != row.mesh:
            reason = f"has the mesh {plan.mesh}" if plan.fits else "does not fit into memory"
            raise UserError(
                f"--add: the run has the mesh {dict(row.mesh)}, and its config compiled for "
                f"{row.topology} {reason}; name its slice with --topology"
            )
        keep(plan, row.part, row.topology, kept)
    logged.add(row)
    sources = logged.load_all()
    page.write(sources, kept)
    _, lines = page.lines_of(sources, kept)
    line = next(line for line in lines if line.run.parts[0] == row.part)
    low, high = line.ends
    each = 1e3 / row.updates
    print(
        f"added to {logged.PATH.name}: {row.part.name} on {row.topology}, "
        f"{each * row.seconds:.4g} ms an update\n"
        f"planned before, without this network's runs: {each * low:.4g} to {each * high:.4g} ms"
        f"{'' if line.is_covered else ', which does not cover it'}\n"
        f"fitted again to {len(lines)} runs: {page.FOLDER / 'calibration.md'}"
    )
    if left := page.missing(sources, kept):
        print(
            f"lamb_tpu/cost/calibrated.py is unchanged, because {len(left)} programs are not "
            "compiled; python -m experiments.plan compiles them"
        )


if __name__ == "__main__":
    cli.run_main(main)

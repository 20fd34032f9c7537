"""Plans published runs, fits the network constants to them, and finds the fastest layouts.

  python -m experiments.plan
  python -m experiments.plan --add=WORKDIR
  python -m experiments.plan --tables

The first command compiles the programs of `published.toml` and logged.jsonl that rows.json lacks,
and writes calibration.md and lamb_tpu/cost/calibrated.py. Then it makes the searches that
layouts.json lacks, and writes layouts.md. A program takes minutes to compile, and all programs
take three hours on 2 cores; an interrupted command keeps its compiled programs. The command needs Linux on
x86-64, but no TPU.

The second command adds a finished run of this package on a TPU to logged.jsonl, compiles its program,
and repeats the fit. It makes no search.

The third command compiles only the programs that the papers' tables need, and writes their planned values
into experiments/planned.json.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.plan import layouts, logged, page, rows, tables
from experiments.plan.rows import Phase, load_rows, measure
from lamb_tpu import cli
from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.plan.cache import Cache, open_cache
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
_TABLES = flags.DEFINE_bool(
    "tables", False, "Compile only what the papers' tables need, and write their planned values."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "With --add: the slice of the run, as lamb_tpu.plan takes it, such as 2xv5e-256 or "
    "v4:4x4x8; needed if the number of devices does not determine the slice.",
)


def main() -> None:
    """Compiles the missing programs and writes the pages."""
    saved, cache = load_rows(), open_cache("")
    if _ADD.value is not None:
        add(logged.of_workdir(_ADD.value, _TOPOLOGY.value), saved, cache)
        return
    if _TOPOLOGY.value is not None:
        raise UserError(
            "--topology", problem="has no effect without --add", remedy="give --add=WORKDIR too"
        )
    sources = logged.load_all()
    if _TABLES.value:
        compile_all(tables.missing(sources, saved)[: _AT_MOST.value], saved, cache)
        print(tables.write(sources, saved))
        return
    todo = list(page.missing(sources, saved).values())[: _AT_MOST.value]
    compile_all(todo, saved, cache)
    print(page.write(sources, saved))
    if _AT_MOST.value is None:
        records = layouts.load()
        for topology in layouts.TOPOLOGIES[len(records) :]:
            records.append(layouts.search(topology, cache))
            layouts.write(records)
        print(layouts.page(records))


def compile_all(
    todo: Sequence[tuple[str, Phase]], saved: dict[str, dict[str, Any]], cache: Cache
) -> None:
    """Compiles programs, and stores them in rows.json."""
    for number, (topology, phase) in enumerate(todo, start=1):
        print(f"{number} of {len(todo)}: {phase.name} on {topology}", file=sys.stderr, flush=True)
        plan = make_plan(phase.config(), topology, examples=phase.examples, cache=cache)
        keep(plan, phase, topology, saved)


def keep(plan: Plan, phase: Phase, topology: str, saved: dict[str, dict[str, Any]]) -> None:
    """Adds a compiled program to rows.json and to the loaded rows."""
    key = phase.key(topology)
    saved[key] = measure(plan, key)
    writing.replace(rows.FOLDER / "rows.json", json.dumps(saved, indent=1) + "\n")
    release()


def add(row: logged.Row, saved: dict[str, dict[str, Any]], cache: Cache) -> None:
    """Adds a run to the calibration, fits again, and prints the run's measured and planned times.

    Raises:
      UserError: the run was added before, or its config compiles to a program that differs from the run's.
    """
    logged.check_new(row)
    if row.phase.key(row.topology) not in saved:
        print(f"compiling {row.phase.name} for {row.topology}", file=sys.stderr, flush=True)
        plan = make_plan(row.phase.config(), row.topology, examples=row.examples, cache=cache)
        if not plan.fits or plan.mesh != row.mesh:
            reason = f"has the mesh {plan.mesh}" if plan.fits else "does not fit into memory"
            raise UserError(
                "--add: mesh of the run",
                dict(row.mesh),
                f"differs from the plan: the config compiled for {row.topology} {reason}",
                "give the slice of the run with --topology",
            )
        keep(plan, row.phase, row.topology, saved)
    logged.add(row)
    sources = logged.load_all()
    page.write(sources, saved)
    _, lines = page.lines_of(sources, saved)
    line = next(line for line in lines if line.run.phases[0] == row.phase)
    low, high = line.ends
    each = 1e3 / row.updates
    print(
        f"added to {logged.PATH.name}: {row.phase.name} on {row.topology}, "
        f"{each * row.seconds:.4g} ms an update\n"
        f"planned before, without this network's runs: {each * low:.4g} to {each * high:.4g} ms"
        f"{'' if line.is_covered else ', which excludes the measured time'}\n"
        f"fitted again to {len(lines)} runs: {page.FOLDER / 'calibration.md'}"
    )
    if left := page.missing(sources, saved):
        print(
            f"lamb_tpu/cost/calibrated.py is unchanged, because {len(left)} programs are not "
            "compiled; python -m experiments.plan compiles them"
        )


if __name__ == "__main__":
    cli.run_main(main)

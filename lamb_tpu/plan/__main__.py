"""Compiles a recipe's training step for a TPU slice, without a TPU, and reports its costs.

  python -m lamb_tpu.plan --config=configs/digits.py:batch=4096 \\
      --topology=v3-2048

The command builds the step that lamb_tpu.train runs, with its mesh, sharding and optimizer, and
compiles it with the TPU compiler. The compiler runs on any Linux machine with x86-64 (`make setup`
or the extra tpu installs it) and takes minutes for large models. The report has four parts:

- Memory: whether the step fits into a device's memory, and the bytes of each type, such as
  arguments and temporaries.
- Traffic: for each type of collective, the size of its groups and the bytes that a device sends.
- Time of a step: the compiler's estimate of the computation and a model of the links, both fitted
  to published runs (experiments/plan/calibration.md). The interval is for a program that is not
  among those runs; it is wider on a TPU generation without published runs. The line `validated`
  says how many published runs lie inside an interval that was fitted without them.
- The run: updates, minutes, chip-hours, and the input that each host must deliver. The totals in
  the last line exclude start-up, compilation on the pod, checkpoints and waiting for the slowest
  chip. If other batches were planned before, this line also names the next larger batch that fits,
  or the next smaller one if this batch does not fit.

If a step does not fit, the report says how much memory it needs, and the exit status is 0. No data
set is needed: shapes and numbers of examples come from the config and published data. Custom text
and images are read if config.data.dir names their folder; if it does not, durations in epochs need
--examples=N.
A config with phases gives one plan for each phase (in JSON, a list of plans).

Four options make several plans and show progress on stderr. Compiled programs are cached (--cache),
so an interrupted command continues when you run it again.

- --find=batch finds the largest batch that fits, with at most 20 plans.
- --find=fastest finds the layout with the shortest step for the config's batch. It varies the
  backend, microbatches, recomputation, scanned layers, sharded state, gradient dtype and mesh axes.
- --batches=512,1024 prints the learning rate, warm-up, updates and time of each batch.
  --price-per-device-hour=X adds the price, and --workdir=RUN shows which batches are larger than
  the noise scale that the run in RUN measured.
- --topologies=v3-512,v3-1024 prints the time of the run on each slice. --measured adds measured
  times, and --html plots the times.

If config.batch_rule changes the batch during the run, the plan adds up the times at all batch
sizes. Only steps of at most eight microbatches are compiled; longer steps are extrapolated. If
the rule chooses the batches during the run, give --batches-of=RUN: the plan uses those of RUN.

If a recipe has an argument `batch`, each batch is passed as this argument, so that the recipe sets
the learning rate and the BatchNorm groups of that batch.

--network-gbps=10 replaces the slice's network between hosts by one link for each host, such as
Ethernet, and works with all options above. On such a network, compressed exchanges of gradients
(config.parallel.exchange) may save time.

Change any config key with --config.KEY=VALUE, such as --config.mesh.model=4 or
--config.parallel.backend=shard_map.
"""

import os
import sys

from absl import flags

from lamb_tpu import cli
from lamb_tpu.cost import slices
from lamb_tpu.plan.guard import guard

if __name__ == "__main__":  # answer --help before the slow imports below
    cli.define_config_flag()
    strings = {
        "topology": "The slice: its TPU version, a hyphen and its size, for example v3-2048 or v5e-256 "
        "(also v5litepod-256). A colon and a shape in chips, such as v4:4x4x8, means any slice "
        "that libtpu knows, up to the version's largest. 2xv5e-256 means two slices; use at most "
        f"{slices.MAX_SLICES} slices and {slices.MAX_CHIPS:,} chips. Sizes:\n{slices.listed()}",
        "batches": "Instead of one plan: a table with a row for each batch, such as 512,1024,2048.",
        "workdir": "With --batches: folder of a run that measured the gradient noise scale; the table "
        "compares the batches with it.",
        "batches-of": "Folder of a run: the plan uses the batches of that run. Required if "
        "config.batch_rule chooses the batches during the run.",
        "topologies": "Instead of --topology: several slices with commas between; each gets a row. "
        "--html then plots the time over the number of devices.",
        "measured": "With --topologies: times of measured runs, such as "
        "v3-1024=150min,v3-2048=76.2min. The units are s, min and h.",
        "html": "Also write the plan to this file as one page: memory by type, the most expensive "
        "kernels with their source lines, and collectives on the torus.",
    }
    for name, text in strings.items():
        flags.DEFINE_string(name, None, text)
    floats = {
        "price-per-device-hour": "With --batches: price of a device for an hour, in any currency. "
        "A device is a core on v2 and v3, half a chip on tpu7x, and a chip on other versions.",
        "network-gbps": "Instead of the slice's network between hosts: one link for each host, "
        "shared by its devices, with this rate in each direction in 10^9 bits per second, such as 10 "
        "for Ethernet. Devices of one host are still connected by the slice's links.",
    }
    for name, text in floats.items():
        flags.DEFINE_float(name, None, text)
    flags.DEFINE_integer(
        "examples",
        None,
        "Number of training examples, if the data set is neither published nor on this machine; "
        "durations in epochs need it.",
        lower_bound=1,
        upper_bound=10**15,
    )
    flags.DEFINE_string(
        "cache",
        "",
        "Folder of compiled programs, so that the same plan is not compiled again. The folder may "
        "be deleted at any time; 'none' disables the cache. "
        "Default: lamb_tpu/plans in the user's cache folder.",
    )
    flags.DEFINE_enum(
        "find",
        None,
        ["batch", "fastest"],
        "Search instead of making one plan. batch: the largest batch that fits; fastest: the "
        "layout with the shortest step for the config's batch.",
    )
    flags.DEFINE_bool("json", False, "Print JSON instead, and nothing else on stdout.")
    cli.answer_help()
    # JAX's compilation cache cannot load programs for a slice that is not attached, and would warn about
    # each program. --cache stores programs instead.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    # Fork before importing JAX, which starts threads. A search continues after a compiler crash.
    guard(any(arg.lstrip("-").startswith(("find", "batches", "topologies")) for arg in sys.argv))

import contextlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import config_flags
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lamb_tpu import terminal
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.topology import topology
from lamb_tpu.plan import advice, curves, fastest, largest, options
from lamb_tpu.plan.cache import open_cache
from lamb_tpu.plan.changing import changes, make_changing_plan
from lamb_tpu.plan.making import make_plan
from lamb_tpu.plan.page import check_page, write_page
from lamb_tpu.plan.report import Plan, decision
from lamb_tpu.plan.trials import Answer, Trials
from lamb_tpu.plan.variants import Variants
from lamb_tpu.run import phases
from lamb_tpu.run.phases import Phase
from lamb_tpu.spec import Spec, parse


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Prints `text` on stderr; a terminal shows it with the elapsed time until the block ends."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(terminal.fit(text), file=sys.stderr, flush=True)
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    page = None if values.html is None else check_page(values.html)
    gbps = values["network-gbps"].value
    options.check_gbps(gbps)
    config = parse(values.config)
    runs = phases.split(config)
    options.check_batches_of(
        values["batches-of"].value, any(changes(phase.config) for phase in runs)
    )
    request = options.check(
        config,
        topology=values.topology,
        find=values.find,
        batches=values.batches,
        topologies=values.topologies,
        workdir=values.workdir,
        price=values["price-per-device-hour"].value,
        measured=values.measured,
        html=values.html,
    )
    # Open the cache last, because this may print a warning: a rejected command prints only its error.
    how = {"examples": values.examples, "cache": open_cache(values.cache), "gbps": gbps}
    if request.kind == "plan":
        _plan(runs, page, how)
        return
    points = _points(request, runs, how) if request.kind == "curves" else []
    answer = curves.answer(points) if points else _search(request, config, how)
    validation = CALIBRATED.validation
    if values.json:
        print(json.dumps({**answer.json, "validation": validation._asdict()}, indent=2))
    else:
        print(f"{answer.text}\n{terminal.fit(f'intervals: {validation.describe()}')}", flush=True)
    # Print the answer before writing the page: the answer took minutes, and the write may fail.
    if page is not None:
        curves.write_page(points, answer, page)


def _search(request: options.PlanRequest, config: Spec, how: dict[str, Any]) -> Answer:
    values, name = flags.FLAGS, request.topologies[0]
    variants = Variants(config_flags.get_config_filename(values["config"]), config)
    if request.kind == "batch":
        with Trials(largest.MOST, **how) as trials:
            return largest.find(variants, name, trials)
    if request.kind == "fastest":
        with Trials(fastest.most(variants, topology(name)), **how) as trials:
            return fastest.find(variants, name, trials)
    price = values["price-per-device-hour"].value
    with Trials(len(request.batches), **how) as trials:
        return advice.advise(variants, request.batches, name, trials, price, values.workdir)


def _points(
    request: options.PlanRequest, runs: Sequence[Phase], how: dict[str, Any]
) -> list[curves.Point]:
    with Trials(len(runs) * len(request.topologies), **how) as trials:
        named = [(phase.name, phase.config) for phase in runs]
        return curves.plan(named, request.topologies, request.measured, trials)


def _plan(runs: Sequence[Phase], page: pathlib.Path | None, how: dict[str, Any]) -> None:
    values, plans = flags.FLAGS, list[tuple[str, Plan]]()
    batches_of = values["batches-of"].value
    for phase in runs:
        config, name = phase.config, values.topology
        with phases.errors_in_phase(phase.name):
            if changes(config):
                plan = make_changing_plan(config, name, _waiting, batches_of=batches_of, **how)
            else:
                plan = make_plan(config, name, _waiting, **how)
        plans.append((phase.name, plan))
        # Compiling a phase takes minutes, so text is printed after each phase. JSON is one
        # document, printed at the end.
        if not values.json:
            print((f"{phase.name}\n" if phase.name else "") + plan.describe(), flush=True)
    if values.json:
        every = [
            {"phase": name} | plan.as_json() if name else plan.as_json() for name, plan in plans
        ]
        print(json.dumps(every if runs[0].name else every[0], indent=2), flush=True)
    elif len(plans) > 1:
        print(terminal.fit(f"all phases: {decision([plan for _, plan in plans])}"))
    if page is not None:
        write_page(plans, page)


if __name__ == "__main__":
    cli.run_main(main, required=("config",))

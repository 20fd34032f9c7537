"""Compiles a recipe's training step for a TPU slice, without a TPU, and reports its costs.

  python -m lamb_tpu.plan --config=configs/digits.py:batch=4096 \\
      --topology=v3-2048

The command builds the very step that lamb_tpu.train runs, with its mesh, sharding and optimizer,
and compiles it with the TPU compiler. The compiler runs on any Linux machine with x86-64 (`make
setup` installs it, as does the extra tpu) and takes minutes for large models. The report says:

- whether the step fits into a device's memory, and what takes how much of it;
- what the devices send each other: each kind of collective, among how many devices, how much;
- how long a step takes: the compiler's estimate of its computation and a model of the links, both
  fitted to published runs (experiments/plan/calibration.md), with an interval for a program that
  has no runs there, which is wider on a generation of TPU without runs. The line `validated` counts
  the runs that such intervals covered, each made without the runs that it is counted on;
- what the run takes: updates, minutes, chip-hours, the input that each host must deliver, and, if
  plans of other batches were made before, the next batch that fits. The last line has the sums.
  Start-up, compilation on the pod, checkpoints and waiting for the slowest chip are left out.

A step that does not fit is reported with its sizes, and the exit status is 0. No data set is
needed: shapes and numbers of examples come from the config and from published facts. Text and
pictures of your own are read if config.data.dir names them; without it, durations in epochs need
--examples=N. A config with phases gives a plan for each phase, in JSON a list of plans.

Four options plan more than once, with a line or a bar of progress on stderr. Programs are kept
(--cache), so a command that was stopped goes on when it is repeated.

- --find=batch tells the largest batch that fits, of at most 20 that are planned.
- --find=fastest tells the layout with the shortest step for the config's batch: backend,
  microbatches, recomputation, scanned layers, split state, dtype of gradients, mesh axes.
- --batches=512,1024 prints for each batch its learning rate and warm-up by the recipe's rule, its
  updates and its time, with --price-per-device-hour=X the price, and with --workdir=RUN whether it
  lies beyond the noise scale that a run measured.
- --topologies=v3-512,v3-1024 prints the time of the whole run on each slice, beside measured ones
  (--measured), and draws it (--html).

A config with a config.batch_rule gives the time along its path of batches, from steps of up to
eight microbatches; a rule that decides during the run needs --batches-of=RUN.

A recipe with an argument `batch` makes the config of each batch itself, with its rates and groups.

--network-gbps=10 plans hosts with Ethernet between them in the place of the slice's own network,
with any of these. Small exchanges of gradients (config.parallel.exchange) pay there.

Change anything with --config.KEY=VALUE: --config.mesh.model=4, --config.parallel.backend=shard_map.
"""

import sys

from absl import flags

from lamb_tpu import cli
from lamb_tpu.plan.guard import guard

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_config_flag()
    flags.DEFINE_string(
        "topology",
        None,
        "The slice: v2, v3, v4, v5p or tpu7x with a hyphen and the number of cores, or v5e "
        "(v5litepod) or v6e with a hyphen and the number of chips; for example v3-2048 or "
        "v5e-256. A colon and a shape in chips, such as v4:4x4x8, is any slice that libtpu knows; "
        "2xv5e-256 is two slices. For an unknown name the error lists the slices.",
    )
    flags.DEFINE_integer(
        "examples",
        None,
        "Number of training examples, for a data set that is not there and is "
        "none of the published ones; durations in epochs need it.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "cache",
        "",
        "Folder of compiled programs, which the same plan takes instead of compiling "
        "again; it may be deleted at any time, and 'none' keeps none. Default: lamb_tpu/plans in "
        "the user's cache folder.",
    )
    flags.DEFINE_enum(
        "find",
        None,
        ["batch", "fastest"],
        "Search instead of one plan. batch: the largest batch "
        "that fits; fastest: the layout with the shortest step, for the config's batch.",
    )
    flags.DEFINE_string(
        "batches",
        None,
        "Advice instead of one plan: a row for each of these batches, such as 512,1024,2048.",
    )
    flags.DEFINE_string(
        "workdir", None, "With --batches: the folder of a run, of which the noise scale is told."
    )
    flags.DEFINE_string(
        "batches-of",
        None,
        "For a config.batch_rule that decides during the run: the folder of a "
        "run whose batches are taken.",
    )
    flags.DEFINE_float(
        "price-per-device-hour",
        None,
        "With --batches: price of a device for an hour, in any "
        "currency. A device is a core of v2 and v3, and of tpu7x half a chip, else a chip.",
    )
    flags.DEFINE_string(
        "topologies",
        None,
        "Instead of --topology: several slices with commas between, a row "
        "each; --html then writes a picture of the time by the number of devices.",
    )
    flags.DEFINE_string(
        "measured",
        None,
        "With --topologies: times of measured runs, such as "
        "v3-1024=150min,v3-2048=76.2min; units are s, min and h.",
    )
    flags.DEFINE_float(
        "network-gbps",
        None,
        "Instead of the slice's network between hosts: one link for each "
        "host, shared by its devices, of this many 10^9 bits a second each way, such as 10 for "
        "Ethernet. The devices of a host keep the slice's links.",
    )
    flags.DEFINE_string(
        "html",
        None,
        "Also write the plan as one page to this file, with memory by kind, the most "
        "expensive kernels with their source lines, and collectives on the torus.",
    )
    flags.DEFINE_bool("json", False, "Print JSON instead, and nothing else on stdout.")
    cli.answer_help()
    # Before JAX is imported, which starts threads; a search goes on where the compiler crashes.
    guard(any(arg.lstrip("-").startswith(("find", "batches", "topologies")) for arg in sys.argv))

import contextlib
import json
import pathlib
from collections.abc import Iterator

from ml_collections import config_flags
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lamb_tpu import terminal
from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.topology import topology
from lamb_tpu.plan import advice, curves, fastest, largest, options
from lamb_tpu.plan.cache import Cache, check_folder
from lamb_tpu.plan.changing import changes, make_changing_plan
from lamb_tpu.plan.making import make_plan
from lamb_tpu.plan.page import check_page, write_page
from lamb_tpu.plan.report import Plan, decision
from lamb_tpu.plan.trials import Answer, Trials
from lamb_tpu.plan.variants import Variants
from lamb_tpu.run import phases


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Prints on stderr what is being waited for; on a terminal also the seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(terminal.fit(text), file=sys.stderr, flush=True)
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def _gbps() -> float | None:
    return flags.FLAGS["network-gbps"].value


def main() -> None:
    """Entry point of the command line."""
    values = flags.FLAGS
    kept = Cache(check_folder(values.cache))
    page = None if values.html is None else check_page(values.html)
    options.check_gbps(_gbps())
    options.check_batches_of(
        values["batches-of"].value,
        any(changes(phase.config) for phase in phases.split(values.config)),
    )
    request = options.check(
        values.config,
        values.topology,
        values.find,
        values.batches,
        values.topologies,
        values.workdir,
        values["price-per-device-hour"].value,
        values.measured,
        values.html,
    )
    if request.kind == "plan":
        _plan(kept, page)
        return
    answer = _curves(request, kept, page) if request.kind == "curves" else _search(request, kept)
    validation = CALIBRATED.validation
    if values.json:
        print(json.dumps({**answer.json, "validation": validation._asdict()}, indent=2))
    else:
        print(f"{answer.text}\n{terminal.fit(f'intervals: {validation.describe()}')}")


def _search(request: options.Request, kept: Cache) -> Answer:
    """Returns the answer to --find and --batches."""
    values, name = flags.FLAGS, request.topologies[0]
    [run] = phases.split(values.config)  # checks the config
    variants = Variants(config_flags.get_config_filename(values["config"]), run.config)
    if request.kind == "batch":
        with Trials(largest.MOST, values.examples, kept, _gbps()) as trials:
            return largest.find(variants, name, trials)
    if request.kind == "fastest":
        most = fastest.most(variants, topology(name))
        with Trials(most, values.examples, kept, _gbps()) as trials:
            return fastest.find(variants, name, trials)
    with Trials(len(request.batches), values.examples, kept, _gbps()) as trials:
        return advice.advise(
            variants,
            request.batches,
            name,
            trials,
            values["price-per-device-hour"].value,
            values.workdir,
        )


def _curves(request: options.Request, kept: Cache, page: pathlib.Path | None) -> Answer:
    """Returns the answer to --topologies, and writes its page."""
    runs = [(phase.name, phase.config) for phase in phases.split(flags.FLAGS.config)]
    most = len(runs) * len(request.topologies)
    with Trials(most, flags.FLAGS.examples, kept, _gbps()) as trials:
        points = curves.plan(runs, request.topologies, request.measured, trials)
    answer = curves.answer(points)
    if page is not None:
        curves.write_page(points, answer, page)
    return answer


def _plan(kept: Cache, page: pathlib.Path | None) -> None:
    """Prints the plan of the config, or of each of its phases."""
    values, found = flags.FLAGS, list[tuple[str, Plan]]()
    for phase in phases.split(values.config):
        with phases.errors_in_phase(phase.name):
            if changes(phase.config):
                plan = make_changing_plan(
                    phase.config,
                    values.topology,
                    _waiting,
                    values.examples,
                    kept,
                    values["batches-of"].value,
                    _gbps(),
                )
            else:
                plan = make_plan(
                    phase.config, values.topology, _waiting, values.examples, kept, _gbps()
                )
        found.append((phase.name, plan))
        # Text is shown as soon as a phase is compiled, which takes minutes. JSON is one document,
        # printed at the end.
        if not values.json:
            print((f"{phase.name}\n" if phase.name else "") + plan.describe(), flush=True)
    if values.json:
        every = [
            {"phase": name} | plan.as_json() if name else plan.as_json() for name, plan in found
        ]
        print(json.dumps(every if values.config.phases else every[0], indent=2))
    elif len(found) > 1:
        print(terminal.fit(f"all phases: {decision([plan for _, plan in found])}"))
    if page is not None:
        write_page(found, page)


if __name__ == "__main__":
    cli.run_main(main, required=("config",))

"""Compiles a recipe's training step for a TPU slice, without a TPU, and reports its costs.

  python -m lamb_tpu.plan --config=configs/digits.py:batch=4096 \\
      --topology=v3-2048

The command builds the very step that lamb_tpu.train runs, with its mesh, sharding and optimizer,
and compiles it with the TPU compiler. The compiler runs on any Linux machine with x86-64 (`make
setup` installs it, as does the extra tpu) and takes minutes for large models. The report says:

- whether the step fits into a device's memory, and what takes how much of it;
- what the devices send each other: each kind of collective, among how many devices, how much;
- how long the compiler expects a step to take. This is a lower bound: the estimate leaves out the
  network, input, evaluation and checkpoints.

A step that does not fit is reported with its sizes, and the exit status is 0. The data set must be
there, or is prepared first, because the step's shapes depend on it. A config with phases gives a
plan for each phase, in JSON a list of plans.

Change anything with --config.KEY=VALUE: --config.mesh.model=4, --config.parallel.backend=shard_map.
"""

from absl import flags

from lamb_tpu import cli

if __name__ == "__main__":  # --help is answered before the imports below, which take seconds
    cli.define_config_flag()
    flags.DEFINE_string(
        "topology",
        None,
        "The slice: v2, v3, v4 or v5p with a hyphen and the number of cores, or v5e (v5litepod) or "
        "v6e with a hyphen and the number of chips; for example v3-2048 or v5e-256. For an unknown "
        "name the error lists the slices.",
    )
    flags.DEFINE_bool("json", False, "Print JSON instead, and nothing else on stdout.")
    cli.answer_help()

import contextlib
import dataclasses
import importlib.metadata
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from ml_collections import ConfigDict
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lamb_tpu import terminal
from lamb_tpu.cost import hlo, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.run import phases
from lamb_tpu.run.build import Run, prepare

T = TypeVar("T")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a compiled step on one device, in bytes.

    Attributes:
      arguments: the state and the batch.
      outputs: the new state and the metrics.
      aliased: the part of the outputs that reuses the memory of arguments.
      temporaries: all intermediate arrays, including those in the chip's own memory.
      program: the compiled code.
      peak: the largest sum of arrays that are alive at the same time.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    program: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler's report on a training step; counts and bytes are of one device and one step.

    Attributes:
      topology: the slice.
      mesh: sizes of the mesh axes.
      hosts: number of machines in the slice.
      batch_size: size of the global batch, in examples.
      backend: config.parallel.backend.
      compile_seconds: time of the compilation on this machine.
      fits: whether the program fits into a device's memory.
      needed: bytes that the program needs; None if the compiler does not say.
      message: the compiler's error message if the program does not fit.
      memory: bytes by kind; None, as all that follows, if the program does not fit.
      flops: FLOPs of matrix products and convolutions; loops count as often as they run.
      model_flops: a device's share of the model FLOPs, see `lamb_tpu.cost.flops`.
      cycles: the compiler's estimate, without the network.
      collectives: sums over the collectives.
      notes: quantities that could not be read, and why.
      program: the optimized HLO, see `lamb_tpu.cost.hlo`; not in the JSON.
    """

    topology: topology_lib.Topology
    mesh: dict[str, int]
    hosts: int
    batch_size: int
    backend: str
    compile_seconds: float
    fits: bool
    needed: float | None
    message: str = ""
    memory: Memory | None = None
    flops: int | None = None
    model_flops: float | None = None
    cycles: int | None = None
    collectives: tuple[traffic.Row, ...] | None = None
    notes: tuple[str, ...] = ()
    program: str = dataclasses.field(default="", repr=False)

    @property
    def seconds(self) -> float | None:
        """The estimated cycles, in seconds."""
        return None if self.cycles is None else self.cycles / self.topology.generation.clock

    def _share_of_peak(self, flops: float) -> float | None:
        return flops / self.seconds / self.topology.generation.peak if self.seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilisation in the estimated time, which leaves out the network."""
        return self._share_of_peak(self.model_flops) if self.model_flops else None

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as a dict of JSON values."""
        generation, rows = self.topology.generation, self.collectives
        return {
            "topology": self.topology.name,
            "devices": self.topology.num_devices,
            "hosts": self.hosts,
            "mesh": self.mesh,
            "batch_size": self.batch_size,
            "backend": self.backend,
            "fits": self.fits,
            "message": self.message,
            "device_bytes": generation.hbm,
            "usable_bytes": round(generation.usable),
            "needed_bytes": self.needed,
            "memory_bytes": self.memory and dataclasses.asdict(self.memory),
            "flops": self.flops,
            "model_flops": self.model_flops,
            "mfu_without_network": self.mfu,
            "peak_flops_per_second": generation.peak,
            "cycles": self.cycles,
            "milliseconds_without_network": self.seconds and 1e3 * self.seconds,
            "collectives": None if rows is None else [row._asdict() for row in rows],
            "compile_seconds": self.compile_seconds,
            "notes": self.notes,
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        }

    def describe(self) -> str:
        """Returns the plan as text of at most 80 columns."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        usable = self.topology.generation.usable
        lines = [
            f"{self.topology.name}: {self.topology.num_devices:,} devices on {self.hosts:,} "
            f"host(s), mesh {mesh}, collectives by {self.backend}",
            f"step: a batch of {self.batch_size:,}, compiled in {self.compile_seconds:.0f} s by "
            f"libtpu {importlib.metadata.version('libtpu')}",
        ]
        if not self.fits:
            needed = "" if self.needed is None else f"the step needs {_size(self.needed)}, "
            lines.append(f"DOES NOT FIT: {needed}a device has {_size(usable)}")
            lines.append(f"the compiler's message: {self.message.splitlines()[0]}")
            return terminal.fit("\n".join(lines))
        assert self.memory is not None and self.needed is not None  # known for a step that fits
        kinds = ", ".join(
            f"{name} {_size(size)}" for name, size in dataclasses.asdict(self.memory).items()
        )
        lines += [
            f"fits: the step needs {_size(self.needed)}, a device has {_size(usable)}",
            f"memory: {kinds}",
        ]
        if self.seconds is not None:
            clock = self.topology.generation.clock
            lines.append(
                f"time: {1e3 * self.seconds:.3g} ms without the network, by the compiler's "
                f"estimate ({self.cycles:,} cycles at {clock / 1e6:,.0f} MHz)"
            )
        if self.flops:
            of_peak = self._share_of_peak(self.flops)
            share = "" if of_peak is None else f", {of_peak:.1%} of the bfloat16 peak in that time"
            lines.append(f"arithmetic: {self.flops:.3g} operations of matrix products{share}")
        if self.model_flops:
            share = "" if self.mfu is None else f", MFU {self.mfu:.1%} without the network"
            lines.append(f"model FLOPs: {self.model_flops:.3g} of a device{share}")
        lines += [f"not known: {note}" for note in self.notes]
        if self.collectives is not None:
            lines += ["collectives, of one device in one step:", *_table(self.collectives)]
        return terminal.fit("\n".join(lines))


def make_plan(
    config: ConfigDict, name: str, waiting: Callable[[str], Any] = contextlib.nullcontext
) -> Plan:
    """Compiles the training step of a config for a slice.

    After this call JAX runs on the CPU alone.

    Args:
      config: a recipe, see `lamb_tpu.config.base_config`.
      name: name of the slice, such as 'v3-2048'.
      waiting: makes a context from a text that says what is being waited for; the context is
        entered while waiting.

    Raises:
      UserError: the config has a mistake, the name is unknown, or the TPU compiler is missing.
    """
    slice_ = topology_lib.topology(name)
    # Before `prepare`: this keeps JAX on the CPU, which must be settled before JAX uses a device.
    devices = topology_lib.devices(slice_)
    run = prepare(config, None, devices)
    start = time.monotonic()
    with waiting(
        f"compiling the training step for {len(devices):,} devices; large models take minutes"
    ):
        compiled, message = compile_step(run)
    plan = Plan(
        topology=slice_,
        mesh=dict(run.mesh.shape),
        hosts=len({device.process_index for device in devices}),
        batch_size=config.batch_size,
        backend=config.parallel.backend,
        compile_seconds=round(time.monotonic() - start, 1),
        fits=compiled is not None,
        needed=_needed(message),
        message=message,
    )
    if compiled is None:
        return plan
    sizes, text = compiled.memory_analysis(), compiled.as_text()
    assert sizes is not None and text is not None  # the TPU compiler returns both
    notes: list[str] = []
    # The text of HLO is no stable format. A plan that lacks one number, with a note why, is still
    # of use.
    cost = _read(hlo.program_cost, text, notes)
    found = _read(traffic.collectives, text, notes)
    return dataclasses.replace(
        plan,
        needed=sizes.peak_memory_in_bytes,
        memory=Memory(
            sizes.argument_size_in_bytes,
            sizes.output_size_in_bytes,
            sizes.alias_size_in_bytes,
            sizes.temp_size_in_bytes,
            sizes.generated_code_size_in_bytes,
            sizes.peak_memory_in_bytes,
        ),
        flops=_read(hlo.program_flops, text, notes),
        model_flops=run.model_flops and run.model_flops / len(devices),
        cycles=cost and cost.cycles,
        collectives=None if found is None else tuple(traffic.table(found)),
        # Several readers can fail for one reason, which is told once.
        notes=tuple(dict.fromkeys(notes)),
        program=text,
    )


def compile_step(run: Run) -> tuple[jax.stages.Compiled | None, str]:
    """Returns the compiled training step, or None and the compiler's out-of-memory message."""
    lowered = run.make_train_step().lower(run.abstract_state, run.abstract_batch())
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        # A step that does not fit is a result of planning, not a failure.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, str(error)


def _needed(message: str) -> float | None:
    """Returns the bytes that a program needs, from the compiler's out-of-memory message.

    >>> _needed("the total memory required for HLO temporaries (24.00G) exceeds available HBM")
    25769803776.0
    >>> _needed("Used 16.50G of 15.48G hbm. Exceeded hbm capacity by 1.02G.")
    17716740096.0
    """
    found = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT]?)", message)
    return float(found[1]) * 2 ** (10 * " KMGT".index(found[2] or " ")) if found else None


def _read(reader: Callable[[str], T], text: str, notes: list[str]) -> T | None:
    """Returns what `reader` reads from HLO; if it fails, returns None and adds a note."""
    try:
        return reader(text)
    except ValueError as error:
        notes.append(str(error))
        return None


def _size(size: float) -> str:
    """
    >>> _size(1536), _size(15.48 * 2**30), _size(7)
    ('1.5 KiB', '15.48 GiB', '7 B')
    """
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def _table(rows: tuple[traffic.Row, ...]) -> list[str]:
    cells = [("kind", "among", "dtype", "count", "puts in", "gets out", "sends at least")]
    cells += [
        (row.kind, f"{row.group_size:,}", row.dtype, f"{row.count:,}", _size(row.operand_bytes),
         _size(row.result_bytes), _size(row.sent_bytes))
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # Kind and dtype are text; the other columns are numbers.
    left = (0, 2)
    return [
        "  " + "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


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


def main() -> None:
    """Entry point of the command line."""
    config, found = flags.FLAGS.config, []
    for phase in phases.split(config):
        with phases.errors_in_phase(phase.name):
            plan = make_plan(phase.config, flags.FLAGS.topology, _waiting)
        found.append({"phase": phase.name} | plan.as_json() if phase.name else plan.as_json())
        # Text is shown as soon as a phase is compiled, which takes minutes. JSON is one document,
        # printed at the end.
        if not flags.FLAGS.json:
            print((f"{phase.name}\n" if phase.name else "") + plan.describe(), flush=True)
    if flags.FLAGS.json:
        print(json.dumps(found if config.phases else found[0], indent=2))


if __name__ == "__main__":
    cli.run_main(main, required=("config", "topology"))

"""The plan of a training step and of its run: its numbers, as text and as JSON."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any, NamedTuple

from lamb_tpu import terminal
from lamb_tpu.cost import hlo, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Calibration, Constants, Network, Route
from lamb_tpu.cost.timeline import Timeline, timeline
from lamb_tpu.plan import sending
from lamb_tpu.plan import stages as stages_lib
from lamb_tpu.plan import totals as totals_lib
from lamb_tpu.plan.totals import Totals, Work, span_text
from lamb_tpu.run.recipe import Recipe

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


class Traffic(NamedTuple):
    """Sums over collectives of one kind, group size and dtype, with their time.

    Attributes:
      row: the sums.
      seconds: time on the network in one step, by the expected constants.
      exposed: the part of it for which the computation waits.
      route: the links that they occupy; of several the first.
      algorithm: the compiler's name of its algorithm; '' if unknown.
    """

    row: traffic.Row
    seconds: float
    exposed: float
    route: Route
    algorithm: str


class Row(NamedTuple):
    """Updates of one batch size in a run whose batch changes.

    Attributes:
      updates: their number.
      examples: their examples together.
      compute: seconds of an update's computation: shortest, expected, longest; None if unknown.
      network: seconds for which an update waits for the network, likewise.
    """

    updates: float
    examples: float
    compute: tuple[float, ...] | None
    network: tuple[float, ...] | None


@dataclasses.dataclass(frozen=True)
class Along:
    """A run whose batch changes, along its path.

    Attributes:
      microbatch: examples of a microbatch over all devices.
      rows: the updates, in their order.
    """

    microbatch: int
    rows: tuple[Row, ...]

    def seconds(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Returns the computation and the network of all updates; None if a time is unknown."""
        sums = [[0.0] * 3, [0.0] * 3]
        for row in self.rows:
            if row.compute is None or row.network is None:
                return None
            for place in range(3):
                sums[0][place] += row.updates * row.compute[place]
                sums[1][place] += row.updates * row.network[place]
        return tuple(sums[0]), tuple(sums[1])

    def describe(self, listed: int = 8) -> list[str]:
        """Returns a table of the first stretches and the last one."""
        cells: list[tuple[str, ...]] = [("batch", "updates", "examples", "ms", "time")]
        for row in self.rows:
            step = (
                None
                if row.compute is None or row.network is None
                else (row.compute[1] + row.network[1])
            )
            cells.append(
                (
                    f"{row.examples / row.updates:,.0f}",
                    f"{row.updates:,.0f}",
                    f"{row.examples:,.0f}",
                    "?" if step is None else f"{1e3 * step:.3g}",
                    "?" if step is None else span_text(row.updates * step, row.updates * step),
                )
            )
        if len(cells) > listed + 2:
            skipped = len(cells) - listed - 2
            cells[listed + 1 : -1] = [(f"{skipped:,} more", "", "", "", "")]
        head = f"along the run, in microbatches of {self.microbatch:,}:"
        return [head, *terminal.columns(cells, right=range(5)).splitlines()]


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
      is_cached: whether the program was compiled before, and then kept.
      fits: whether the program fits into a device's memory.
      needed: bytes that the program needs; None if the compiler does not say.
      calibration: the constants of `times`, and how far plans by them are off.
      message: the compiler's error message if the program does not fit.
      leaves: what the optimizer does with the parameters, in one line; '' if unknown.
      other_batch: the next larger batch that is known to fit; for a step that does not fit, the
        next smaller one; None if none is known.
      memory: bytes by kind; None, as all that follows, if the program does not fit.
      flops: FLOPs of matrix products and convolutions; loops count as often as they run.
      model_flops: a device's share of the model FLOPs, see `lamb_tpu.cost.flops`.
      cycles: the compiler's estimate, without the network.
      times: the schedule with the shortest, the expected and the longest time of the network.
      collectives: sums over the collectives.
      work: what the whole run does.
      recipe: its durations and learning rate.
      along: the path of a batch that changes; None for one batch size.
      stages: programs of the run, if it has several; this plan is of the one of most updates.
      notes: quantities that could not be read, and why.
      program: the optimized HLO, see `lamb_tpu.cost.hlo`; not in the JSON.
      network: the links between the devices; not in the JSON.
    """

    topology: topology_lib.Topology
    mesh: dict[str, int]
    hosts: int
    batch_size: int
    backend: str
    compile_seconds: float
    fits: bool
    needed: float | None
    calibration: Calibration
    is_cached: bool = False
    message: str = ""
    leaves: str = ""
    other_batch: int | None = None
    memory: Memory | None = None
    flops: int | None = None
    model_flops: float | None = None
    cycles: int | None = None
    times: tuple[Timeline, ...] | None = None
    collectives: tuple[Traffic, ...] | None = None
    work: Work | None = None
    recipe: Recipe | None = None
    along: Along | None = None
    stages: tuple[stages_lib.Row, ...] = ()
    notes: tuple[str, ...] = ()
    program: str = dataclasses.field(default="", repr=False)
    network: Network | None = dataclasses.field(default=None, repr=False)

    def timelines(self, constants: Sequence[Constants]) -> tuple[Timeline, ...]:
        """Returns the schedules of the program by several constants of the network.

        Raises:
          ValueError: the program cannot be read.
        """
        assert self.network is not None  # the program fits
        program, clock = hlo.parse(self.program), self.topology.generation.clock
        return tuple(
            timeline(
                program,
                each.compute_factor / clock,
                functools.partial(self.network.seconds, constants=each),
            )
            for each in constants
        )

    @property
    def seconds(self) -> float | None:
        """The estimated cycles, in seconds."""
        return None if self.cycles is None else self.cycles / self.topology.generation.clock

    @property
    def step_seconds(self) -> tuple[float, ...] | None:
        """Time of a step with the network: shortest, expected, longest."""
        return None if self.times is None else tuple(each.seconds for each in self.times)

    def share_of_peak(self, flops: float | None, seconds: float | None) -> float | None:
        """Returns the share of the peak that FLOPs in a time are; None if either is unknown."""
        if not flops or not seconds:
            return None
        return flops / seconds / self.topology.generation.peak

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilisation in the estimated time, which leaves out the network."""
        return self.share_of_peak(self.model_flops, self.seconds)

    @property
    def share_of_memory(self) -> float | None:
        """Share of a device's usable memory that the step needs."""
        return self.needed and self.needed / self.topology.generation.usable

    @property
    def totals(self) -> Totals | None:
        """Times of the whole run; None if the step's are not known."""
        if self.times is None or self.work is None:
            return None
        found = totals_lib.totals(
            self.work,
            [each.compute for each in self.times],
            [each.exposed for each in self.times],
            self.topology.num_chips,
        )
        if self.along is None and not self.stages:
            return found
        parts = self.along.seconds() if self.along else stages_lib.seconds(self.stages)
        return parts and found._replace(compute=parts[0], network=parts[1])

    @property
    def left_out(self) -> str:
        """The parts of a run that are in none of the times."""
        return (
            f"start-up, compiling on the pod ({self.compile_seconds:.0f} s here), checkpoints, and "
            "waiting for the slowest chip"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as a dict of JSON values."""
        generation = self.topology.generation
        total, work = self.totals, self.work
        return {
            "topology": self.topology.name,
            "devices": self.topology.num_devices,
            "chips": self.topology.num_chips,
            "hosts": self.hosts,
            "mesh": self.mesh,
            "batch_size": self.batch_size,
            "backend": self.backend,
            "fits": self.fits,
            "message": self.message,
            "leaves": self.leaves,
            "other_batch_that_fits": self.other_batch,
            "device_bytes": generation.hbm,
            "usable_bytes": round(generation.usable),
            "needed_bytes": self.needed,
            "memory_bytes": self.memory and dataclasses.asdict(self.memory),
            "flops": self.flops,
            "model_flops": self.model_flops,
            "mfu_without_network": self.mfu,
            "mfu": self.share_of_peak(
                self.model_flops, self.times[1].seconds if self.times else None
            ),
            "peak_flops_per_second": generation.peak,
            "cycles": self.cycles,
            "milliseconds_without_network": self.seconds and 1e3 * self.seconds,
            # Each of the next four: shortest, expected, longest.
            "compute_milliseconds": self.times and [1e3 * each.compute for each in self.times],
            "network_milliseconds": self.times and [1e3 * each.network for each in self.times],
            "network_exposed_milliseconds": self.times
            and [1e3 * each.exposed for each in self.times],
            "step_milliseconds": self.step_seconds and [1e3 * each for each in self.step_seconds],
            **sending.as_json(self.times[1] if self.times else None, self.network),
            "calibrated_by": self.calibration.fitted_to,
            "validation": self.calibration.validation._asdict(),
            "collectives": None
            if self.collectives is None
            else [
                each.row._asdict()
                | {
                    "milliseconds": 1e3 * each.seconds,
                    "exposed_milliseconds": 1e3 * each.exposed,
                    "route": each.route.describe(),
                    "algorithm": each.algorithm,
                }
                for each in self.collectives
            ],
            "run": work
            and {
                "updates": work.updates,
                "batches": self.along and [row._asdict() for row in self.along.rows],
                "stages": [row._asdict() for row in self.stages],
                "evaluations": work.evaluations,
                "compute_seconds": total and list(total.compute),
                "network_seconds": total and list(total.network),
                "evaluation_seconds": total and total.evaluation,
                "seconds": total and list(total.seconds),
                "chip_hours": total and total.chip_hours,
                "input": work.input._asdict(),
            },
            "compile_seconds": self.compile_seconds,
            "notes": self.notes,
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        }

    def describe(self) -> str:
        """Returns the plan as text of at most 80 columns; its last line is that of `decision`."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        usable = size_text(self.topology.generation.usable)
        lines = [
            f"{self.topology.name}: {self.topology.num_devices:,} devices on {self.hosts:,} "
            f"host(s), mesh {mesh}, collectives by {self.backend}",
            f"step: a batch of {self.batch_size:,}, compiled in {self.compile_seconds:.0f} s by "
            f"libtpu {importlib.metadata.version('libtpu')}" + " (kept)" * self.is_cached,
            *([self.leaves] if self.leaves else []),
        ]
        if self.memory is None or self.needed is None:
            lines.append(f"the compiler's message: {self.message.splitlines()[0]}")
            return terminal.fit("\n".join([*lines, decision([self])]))
        kinds = ", ".join(
            f"{name} {size_text(size)}" for name, size in dataclasses.asdict(self.memory).items()
        )
        lines.append(f"memory: {size_text(self.needed)} of the {usable} that a device has: {kinds}")
        lines += self._describe_time()
        if self.flops:
            of_peak = self.share_of_peak(self.flops, self.seconds)
            share = "" if of_peak is None else f", {of_peak:.1%} of the bfloat16 peak in that time"
            lines.append(f"arithmetic: {self.flops:.3g} operations of matrix products{share}")
        if self.model_flops:
            share = "" if self.mfu is None else f", MFU {self.mfu:.1%} without the network"
            lines.append(f"model FLOPs: {self.model_flops:.3g} of a device{share}")
        if self.work and self.step_seconds:
            lines.append(
                totals_lib.describe_input(
                    self.work, self.step_seconds[1], self.hosts, self.topology.version
                )
            )
            lines.append(f"left out: {self.left_out}")
        lines += [f"not known: {note}" for note in self.notes]
        if self.collectives is not None:
            lines += ["collectives, of one device in one step:", *_table(self.collectives)]
        if self.stages:
            lines += stages_lib.describe(self.stages)
        if self.along is not None:
            lines += self.along.describe()
        return terminal.fit("\n".join([*lines, decision([self])]))

    def _describe_time(self) -> list[str]:
        if self.seconds is None:
            return []
        clock = self.topology.generation.clock
        lines = [
            f"time: {1e3 * self.seconds:.3g} ms without the network, by the compiler's "
            f"estimate ({self.cycles:,} cycles at {clock / 1e6:,.0f} MHz)"
        ]
        if self.times is not None:
            low, middle, high = self.times
            least, factor, most = (each.compute / self.seconds for each in self.times)
            lines.append(
                f"runs: {factor:.2f} ({least:.2f} to {most:.2f}) times that estimate, by a fit "
                f"to {self.calibration.fitted_to}"
            )
            lines.append(f"validated: {self.calibration.validation.describe()}")
            hidden = middle.network - middle.exposed
            hidden = hidden if hidden > 1e-6 * middle.network else 0.0  # beyond rounding
            lines.append(
                f"network: {1e3 * middle.exposed:.3g} ms ({1e3 * low.exposed:.3g} to "
                f"{1e3 * high.exposed:.3g}), and {1e3 * hidden:.3g} ms behind computation; a step "
                f"takes {1e3 * middle.seconds:.3g} ms ({1e3 * low.seconds:.3g} to "
                f"{1e3 * high.seconds:.3g})"
            )
            lines += [f"{name}: {text}" for name, text in self.sending]
        return lines

    @property
    def sending(self) -> list[tuple[str, str]]:
        """What is sent, and what takes most of a step, as names and texts; none if unknown."""
        if self.times is None:
            return []
        schedule, facts = self.times[1], list[tuple[str, str]]()
        if isinstance(self.network, HostNetwork):
            carried = sending.link_bytes(schedule, self.network)
            facts.append(
                (
                    "hosts",
                    f"one link of {self.network.gbps:g} Gb/s each way for the "
                    f"{self.network.host_devices} devices of each, which carries {size_text(carried)} "
                    "a step",
                )
            )
        sent = traffic.sent_by_dtype(event.collective for event in schedule.events)
        if sent:
            each = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in sent.items())
            facts.append(("sends", f"{size_text(sum(sent.values()))} of a device a step: {each}"))
        name, whole = sending.limit(schedule, self.network), schedule.seconds
        part = schedule.compute if name == "computation" else schedule.exposed
        if whole:
            facts.append(("limit", f"the {name}, {part / whole:.0%} of a step"))
        return facts


def decision(plans: Sequence[Plan]) -> str:
    """Returns the line that decides: whether the steps fit, and what the whole run takes.

    Args:
      plans: one plan; for a run of several phases, those of all.
    """
    if not all(plan.fits for plan in plans):
        plan = next(plan for plan in plans if not plan.fits)
        usable = size_text(plan.topology.generation.usable)
        needed = "" if plan.needed is None else f"the step needs {size_text(plan.needed)}, "
        known = plan.other_batch
        smaller = f"; the next batch that fits: {known:,}" if known else ""
        return f"DOES NOT FIT: {needed}a device has {usable}{smaller}"
    shares = [plan.share_of_memory for plan in plans if plan.share_of_memory]
    parts = [f"fits ({100 * max(shares):.2g} % of memory)" if shares else "fits"]
    found = [plan.totals for plan in plans]
    known_totals = [total for total in found if total is not None]
    if len(known_totals) == len(found):
        compute, network = (
            span_text(*(sum(times[place] for times in each) for place in (0, 2)))
            for each in (
                [total.compute for total in known_totals],
                [total.network for total in known_totals],
            )
        )
        parts.append(
            f"{sum(total.updates for total in known_totals):,} updates, {compute} of compute and "
            f"{network} of network"
        )
        evaluations = [total.evaluation for total in known_totals]
        if None in evaluations:
            parts.append("evaluation of unknown length")
        else:
            evaluation = sum(each or 0.0 for each in evaluations)
            parts.append(f"{span_text(evaluation, evaluation)} of evaluation")
        hours = sum(total.chip_hours for total in known_totals)
        parts.append(f"{hours:,.0f} chip-hours" if hours >= 9.5 else f"{hours:.2g} chip-hours")
    if len(plans) == 1 and plans[0].other_batch:
        parts.append(f"the next batch that fits: {plans[0].other_batch:,}")
    return "; ".join(parts)


def size_text(size: float) -> str:
    """Returns a number of bytes with its unit.

    >>> size_text(1536), size_text(15.48 * 2**30), size_text(7)
    ('1.5 KiB', '15.48 GiB', '7 B')
    """
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"


def _along(route: Route) -> str:
    parts = [f"{axis.name}{axis.length}" for axis in route.axes]
    parts += ["hosts"] * (route.hosts > 1)
    return " ".join(parts + ["slices"] * (route.slices > 1)) or "-"


def _table(found: Sequence[Traffic]) -> list[str]:
    cells: list[tuple[str, ...]] = [
        ("kind", "among", "dtype", "count", "puts in", "sends", "ms", "along")
    ]
    cells += [
        (
            each.row.kind,
            f"{each.row.group_size:,}",
            each.row.dtype,
            f"{each.row.count:,}",
            size_text(each.row.operand_bytes),
            size_text(each.row.sent_bytes),
            f"{1e3 * each.seconds:.2g}",
            _along(each.route),
        )
        for each in found
    ]
    # Kind, dtype and axes are text; the other columns are numbers.
    return terminal.columns(cells, right=(1, 3, 4, 5, 6)).splitlines()

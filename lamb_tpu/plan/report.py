"""The plan of a training step and of its run, as numbers, text and JSON."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lamb_tpu import terminal
from lamb_tpu.cost import hlo, traffic
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.hosts import HostNetwork
from lamb_tpu.cost.network import Calibration, Constants, Network, Route
from lamb_tpu.cost.timeline import Timeline, timeline
from lamb_tpu.plan import sending
from lamb_tpu.plan import stages as stages_lib
from lamb_tpu.plan import totals as totals_lib
from lamb_tpu.plan.cache import Memory
from lamb_tpu.plan.totals import Totals, Work, span_text
from lamb_tpu.run.recipe import Recipe

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Traffic(NamedTuple):
    """Traffic and time of all collectives of one type, group size and dtype."""

    row: traffic.TrafficRow
    seconds: float  # time on the network in one step, with the expected constants
    exposed: float  # the part of `seconds` during which the computation waits
    route: Route  # the links that the first of these collectives uses
    algorithm: str  # the compiler's name for the algorithm; '' if unknown

    def as_json(self) -> dict[str, Any]:
        """Returns the numbers as a dict of JSON values."""
        return self.row._asdict() | {
            "milliseconds": 1e3 * self.seconds,
            "exposed_milliseconds": 1e3 * self.exposed,
            "route": self.route.describe(),
            "algorithm": self.algorithm,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """The compiler's report on a training step; counts and bytes are for one device and one step.

    Attributes:
      mesh: sizes of the mesh axes.
      hosts: number of machines in the slice.
      compile_seconds: time of the compilation on this machine.
      is_cached: whether the program came from the cache.
      needed: bytes that the program needs; None if the compiler does not report them.
      calibration: the fitted constants that determine `times`, and their errors for published runs.
      message: the compiler's error message if the program does not fit.
      leaves: one line on how the optimizer treats the parameters; '' if unknown.
      other_batch: the next larger batch that is known to fit, or the next smaller one if this step
        does not fit; None if none is known.
      memory: bytes by type. If the program does not fit, then `memory`, `flops`, `model_flops`,
        `cycles`, `times` and `collectives` are None.
      flops: FLOPs of matrix products and convolutions, in all iterations of loops.
      model_flops: a device's share of the model FLOPs, see `lamb_tpu.cost.flops`.
      cycles: the compiler's estimate of the computation in cycles, without the network.
      times: three schedules, with the shortest, the expected and the longest time.
      along: the updates by batch size, if the batch changes during the run; None if it does not.
      stages: the stages of a run with several programs; this plan describes the stage with the most
        updates.
      notes: quantities that could not be read, with the reasons.
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
    along: stages_lib.Along | None = None
    stages: tuple[stages_lib.StageRow, ...] = ()
    notes: tuple[str, ...] = ()
    program: str = dataclasses.field(default="", repr=False)
    network: Network | None = dataclasses.field(default=None, repr=False)

    def timelines(self, constants: Sequence[Constants]) -> tuple[Timeline, ...]:
        """Returns the schedule of the program for each set of network constants.

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
        """Returns `flops / seconds` as a fraction of the peak; None if either is unknown."""
        if not flops or not seconds:
            return None
        return flops / seconds / self.topology.generation.peak

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilisation over the estimated time without the network."""
        return self.share_of_peak(self.model_flops, self.seconds)

    @property
    def share_of_memory(self) -> float | None:
        """Share of a device's usable memory that the step needs."""
        return self.needed and self.needed / self.topology.generation.usable

    @property
    def totals(self) -> Totals | None:
        """Times of the whole run; None if the time of a step is unknown."""
        if self.times is None or self.work is None:
            return None
        total = totals_lib.totals(
            self.work,
            [each.compute for each in self.times],
            [each.exposed for each in self.times],
            self.topology.num_chips,
        )
        if self.along is None and not self.stages:
            return total
        sums = stages_lib.seconds(self.along.rows if self.along else self.stages)
        return sums and total._replace(compute=sums[0], network=sums[1])

    @property
    def left_out(self) -> str:
        """The times of a run that the plan does not include, as text."""
        return (
            f"start-up, compiling on the pod ({self.compile_seconds:.0f} s here), checkpoints, and "
            "waiting for the slowest chip"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as a dict of JSON values."""
        generation, times = self.topology.generation, self.times
        expected = times[1] if times else None
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
            "memory_bytes": self.memory and msgspec.structs.asdict(self.memory),
            "flops": self.flops,
            "model_flops": self.model_flops,
            "mfu_without_network": self.mfu,
            "mfu": self.share_of_peak(self.model_flops, expected and expected.seconds),
            "peak_flops_per_second": generation.peak,
            "cycles": self.cycles,
            "milliseconds_without_network": self.seconds and 1e3 * self.seconds,
            # Each of the next four lists has the shortest, the expected and the longest time.
            "compute_milliseconds": times and [1e3 * each.compute for each in times],
            "network_milliseconds": times and [1e3 * each.network for each in times],
            "network_exposed_milliseconds": times and [1e3 * each.exposed for each in times],
            "step_milliseconds": times and [1e3 * each.seconds for each in times],
            **sending.as_json(expected, self.network),
            "calibrated_by": self.calibration.fitted_to,
            "validation": self.calibration.validation._asdict(),
            "collectives": self.collectives and [each.as_json() for each in self.collectives],
            "run": self.work and self._run_as_json(self.work),
            "compile_seconds": self.compile_seconds,
            "notes": self.notes,
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        }

    def _run_as_json(self, work: Work) -> dict[str, Any]:
        total = self.totals
        return {
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
        }

    def describe(self) -> str:
        """Returns the plan as text of at most 80 columns, which ends with the `decision`."""
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        usable = size_text(self.topology.generation.usable)
        lines = [
            f"{self.topology.name}: {self.topology.num_devices:,} devices on {self.hosts:,} "
            f"host(s), mesh {mesh}, collectives by {self.backend}",
            f"step: a batch of {self.batch_size:,}, compiled in {self.compile_seconds:.0f} s by "
            f"libtpu {importlib.metadata.version('libtpu')}" + " (cached)" * self.is_cached,
            *([self.leaves] if self.leaves else []),
        ]
        if self.memory is None or self.needed is None:
            lines.append(f"the compiler's message: {self.message.splitlines()[0]}")
            return terminal.fit("\n".join([*lines, decision([self])]))
        sizes = msgspec.structs.asdict(self.memory)
        types = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items())
        lines.append(f"memory: {size_text(self.needed)} of the {usable} that a device has: {types}")
        lines += self._describe_time()
        if self.flops:
            of_peak = self.share_of_peak(self.flops, self.seconds)
            share = "" if of_peak is None else f", {of_peak:.1%} of the bfloat16 peak in that time"
            lines.append(f"arithmetic: {self.flops:.3g} operations in matrix products{share}")
        if self.model_flops:
            share = "" if self.mfu is None else f", MFU {self.mfu:.1%} without the network"
            lines.append(f"model FLOPs: {self.model_flops:.3g} per device{share}")
        if self.work and self.step_seconds:
            lines.append(
                totals_lib.describe_input(
                    self.work, self.step_seconds[1], self.hosts, self.topology.version
                )
            )
            lines.append(f"left out: {self.left_out}")
        lines += [f"not known: {note}" for note in self.notes]
        if self.collectives is not None:
            lines += ["collectives of one device in one step:", *_table(self.collectives)]
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
                f"{1e3 * high.exposed:.3g}), and {1e3 * hidden:.3g} ms hidden by computation; a step "
                f"takes {1e3 * middle.seconds:.3g} ms ({1e3 * low.seconds:.3g} to "
                f"{1e3 * high.seconds:.3g})"
            )
            lines += [f"{name}: {text}" for name, text in self.sending]
        return lines

    @property
    def sending(self) -> list[tuple[str, str]]:
        """Bytes sent and the bottleneck of a step, as (name, text) pairs; [] if unknown."""
        if self.times is None:
            return []
        schedule, details = self.times[1], list[tuple[str, str]]()
        if isinstance(self.network, HostNetwork):
            carried = sending.link_bytes(schedule, self.network)
            details.append(
                (
                    "hosts",
                    f"the {self.network.host_devices} devices of each share one link of "
                    f"{self.network.gbps:g} Gb/s in each direction, which carries "
                    f"{size_text(carried)} per step",
                )
            )
        sent = traffic.sent_by_dtype(event.collective for event in schedule.events)
        if sent:
            each = ", ".join(f"{dtype} {size_text(size)}" for dtype, size in sent.items())
            details.append(
                ("sends", f"{size_text(sum(sent.values()))} from each device per step: {each}")
            )
        name, total = sending.limit(schedule, self.network), schedule.seconds
        share = schedule.compute if name == "computation" else schedule.exposed
        if total:
            details.append(("limit", f"the {name}, {share / total:.0%} of a step"))
        return details


def decision(plans: Sequence[Plan]) -> str:
    """Returns the summary line: whether all phases fit, and the time and cost of the whole run."""
    if not all(plan.fits for plan in plans):
        plan = next(plan for plan in plans if not plan.fits)
        usable = size_text(plan.topology.generation.usable)
        needed = "" if plan.needed is None else f"the step needs {size_text(plan.needed)}, "
        known = plan.other_batch
        smaller = f"; the next smaller batch that fits: {known:,}" if known else ""
        return f"DOES NOT FIT: {needed}a device has {usable}{smaller}"
    shares = [plan.share_of_memory for plan in plans if plan.share_of_memory]
    texts = [f"fits ({100 * max(shares):.2g} % of memory)" if shares else "fits"]
    known_totals = [plan.totals for plan in plans if plan.totals is not None]
    if len(known_totals) == len(plans):
        compute, network = (
            span_text(*(sum(times[bound] for times in each) for bound in (0, 2)))
            for each in (
                [total.compute for total in known_totals],
                [total.network for total in known_totals],
            )
        )
        texts.append(
            f"{sum(total.updates for total in known_totals):,} updates, {compute} of compute and "
            f"{network} of network"
        )
        evaluations = [total.evaluation for total in known_totals]
        if None in evaluations:
            texts.append("evaluation of unknown length")
        else:
            evaluation = sum(each or 0.0 for each in evaluations)
            texts.append(f"{span_text(evaluation, evaluation)} of evaluation")
        hours = sum(total.chip_hours for total in known_totals)
        texts.append(f"{hours:,.0f} chip-hours" if hours >= 9.5 else f"{hours:.2g} chip-hours")
    if len(plans) == 1 and plans[0].other_batch:
        texts.append(f"the next larger batch that fits: {plans[0].other_batch:,}")
    return "; ".join(texts)


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
    names = [f"{axis.name}{axis.length}" for axis in route.axes]
    names += ["hosts"] * (route.hosts > 1)
    return " ".join(names + ["slices"] * (route.slices > 1)) or "-"


def _table(collectives: Sequence[Traffic]) -> list[str]:
    cells: list[tuple[str, ...]] = [
        ("type", "among", "dtype", "count", "operand", "sends", "ms", "along")
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
        for each in collectives
    ]
    # Right-align the numbers; the type, the dtype and the axes are text.
    return terminal.columns(cells, right=(1, 3, 4, 5, 6)).splitlines()

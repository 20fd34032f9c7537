"""The time of a compiled program: computation, and network time that computation does not hide.

The text of a TPU program is its schedule. `timeline` walks through the schedule and adds up the
estimated cycles. An asynchronous collective runs in the background between its start and its
end. At the end of the collective the program waits for the remaining time. For a synchronous
collective it waits for the entire time. Collectives within a slice run one after the other.
Collectives between slices also run one after the other, in parallel with those within a slice.
"""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

from lamb_tpu.cost import traffic
from lamb_tpu.cost.hlo import Computation, Instruction, Program
from lamb_tpu.cost.traffic import Collective

_CHANNEL = re.compile(r"channel_id=(\d+)")
_ALGORITHM = re.compile(r'"strategy":"(\w+)","debug":"[^"]*?dim_sizes:([\d,]+)')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')


class Event(NamedTuple):
    """A collective in the schedule; seconds are per run of the program."""

    name: str
    collective: Collective  # the collective; `count` is the number of executions
    operation: str  # the program's operation that caused the collective; '' if unknown
    algorithm: str  # the compiler's strategy and ring sizes; '' if unknown
    seconds: float  # time on the network
    exposed: float  # time for which the computation waits

    def repeated(self, times: int) -> "Event":
        """Returns the event's totals for a loop with `times` iterations."""
        return self._replace(
            collective=self.collective._replace(count=times * self.collective.count),
            seconds=times * self.seconds,
            exposed=times * self.exposed,
        )


class Timeline(NamedTuple):
    """Times of one run of a program, in seconds."""

    compute: float  # computation time
    exposed: float  # time for which the computation waits for the network
    events: tuple[Event, ...]  # the collectives, in the order of the schedule

    @property
    def seconds(self) -> float:
        """Total time of the program."""
        return self.compute + self.exposed

    @property
    def network(self) -> float:
        """Time that the collectives take, hidden or not."""
        return sum(event.seconds for event in self.events)


def timeline(
    program: Program, cycle_seconds: float, seconds: Callable[[Collective], float]
) -> Timeline:
    """Returns the times of a TPU program.

    Collectives in a loop do not overlap with computation outside of the loop. A conditional takes
    as long as its longest branch.

    Args:
      program: a TPU program.
      cycle_seconds: duration of an estimated cycle.
      seconds: returns the time of one execution of a collective.

    Raises:
      ValueError: a loop's number of iterations is unknown.
    """

    @functools.cache
    def of(name: str) -> Timeline:
        return _walk(program.computations[name], program, cycle_seconds, seconds, of)

    return of(program.entry)


def _walk(
    computation: Computation,
    program: Program,
    cycle_seconds: float,
    seconds: Callable[[Collective], float],
    of: Callable[[str], Timeline],
) -> Timeline:
    clock = compute = exposed = 0.0
    # Times at which the network within the slice and the network between slices are free again.
    free = {False: 0.0, True: 0.0}
    events: list[Event] = []
    # End time and event index of each asynchronous collective in progress.
    in_progress: dict[str, tuple[float, int]] = {}

    def wait(end: float, index: int | None) -> None:
        nonlocal clock, exposed
        waited = max(0.0, end - clock)
        clock, exposed = clock + waited, exposed + waited
        if index is not None:
            events[index] = events[index]._replace(exposed=events[index].exposed + waited)

    for instruction in computation.instructions.values():
        own = instruction.cycles() * cycle_seconds
        compute, clock = compute + own, clock + own
        if instruction.opcode in ("while", "conditional", "call"):
            times, called = program.called(instruction, computation, lambda name: of(name).seconds)
            inner = [of(name) for name in called]
            computed = sum(each.compute for each in inner)
            waited = sum(each.exposed for each in inner)
            compute, exposed = compute + times * computed, exposed + times * waited
            clock += times * (computed + waited)
            events += [event.repeated(times) for each in inner for event in each.events]
            continue
        if (ended := _ended(instruction, computation, program, in_progress)) is not None:
            wait(*in_progress.pop(ended))
            continue
        for found in _started(instruction, computation, program):
            taken = seconds(found)
            between = instruction.opcode == "send"
            free[between] = max(clock, free[between]) + taken
            events.append(_event(instruction, program, found, taken))
            if (key := _key(instruction, program)) is not None:
                in_progress[key] = free[between], len(events) - 1
            else:
                wait(free[between], len(events) - 1)
    for end, index in in_progress.values():
        wait(end, index)
    return Timeline(compute, exposed, tuple(events))


def _event(
    instruction: Instruction, program: Program, collective: Collective, seconds: float
) -> Event:
    text = _text(instruction, program)
    operation, algorithm = _OPERATION.search(text), _ALGORITHM.search(text)
    return Event(
        name=instruction.name,
        collective=collective,
        operation=operation[1] if operation else "",
        algorithm=f"{algorithm[1]} {algorithm[2].replace(',', ' x ')}" if algorithm else "",
        seconds=seconds,
        exposed=0.0,
    )


def _started(
    instruction: Instruction, computation: Computation, program: Program
) -> list[Collective]:
    """Returns the collectives that an instruction performs or starts."""
    if instruction.opcode != "async-start":
        return list(traffic.collectives_of(instruction, computation, program))
    inner = [program.computations[name] for name in instruction.attribute("calls")]
    return [
        found
        for each in inner
        for part in each.instructions.values()
        for found in traffic.collectives_of(part, each, program)
    ]


def _text(instruction: Instruction, program: Program) -> str:
    """Returns an instruction's text, including the computation that it fuses or starts."""
    texts = [instruction.rest]
    if instruction.opcode in ("fusion", "async-start"):
        texts += [
            part.rest
            for name in instruction.attribute("calls")
            for part in program.computations[name].instructions.values()
        ]
    return "\n".join(texts)


def _key(instruction: Instruction, program: Program) -> str | None:
    """Returns the key that links an asynchronous collective to its end; None if it is synchronous."""
    if instruction.opcode.endswith("-start"):
        return instruction.name
    if instruction.opcode == "send":
        return _rendezvous(instruction)
    if instruction.opcode == "fusion" and '"AsyncCollectiveStart"' in (
        text := _text(instruction, program)
    ):
        channel = _CHANNEL.search(text)
        return channel[1] if channel else instruction.name
    return None


def _ended(
    instruction: Instruction,
    computation: Computation,
    program: Program,
    in_progress: dict[str, tuple[float, int]],
) -> str | None:
    """Returns the key of the collective that an instruction ends; None if it ends none."""
    if instruction.opcode == "recv-done":
        # End of a transfer between slices.
        key = _rendezvous(computation.instructions[instruction.operands()[0]])
        return key if key in in_progress else None
    if instruction.opcode.endswith("-done"):
        name = instruction.operands()[0]
        while name not in in_progress:
            before = computation.instructions[name]
            # An async-start may be followed by async-updates before its async-done.
            if before.opcode != "async-update":
                return None
            name = before.operands()[0]
        return name
    if in_progress and instruction.opcode == "fusion":
        text = _text(instruction, program)
        channel = _CHANNEL.search(text)
        if '"AsyncCollectiveDone"' in text and channel and channel[1] in in_progress:
            return channel[1]
    return None


def _rendezvous(instruction: Instruction) -> str:
    found = _RENDEZVOUS.search(instruction.rest)
    return found[1] if found else instruction.name

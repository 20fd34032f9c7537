"""The time of a compiled program: computation, and the part of the network that it does not hide.

The text of a TPU program is its schedule. The walk through it takes each instruction's estimated
cycles, and lets an asynchronous collective run from its start on, beside what is computed until its
end. What is left of it then is waited for, as a collective is that is not asynchronous. Collectives
of a slice run one after the other, and so do those between slices, beside them.
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
    """A collective in the schedule; seconds are of one run of the program.

    Attributes:
      name: name of the instruction.
      collective: the collective; `count` is the number of executions.
      operation: the operation of the program that it comes from; '' if unknown.
      algorithm: the compiler's strategy and the sizes of its rings; '' if unknown.
      seconds: time on the network.
      exposed: time for which the computation waits.
    """

    name: str
    collective: Collective
    operation: str
    algorithm: str
    seconds: float
    exposed: float


class Timeline(NamedTuple):
    """Times of one run of a program, in seconds.

    Attributes:
      compute: time of the computation.
      exposed: time for which the computation waits for the network.
      events: the collectives, in the order of the schedule.
    """

    compute: float
    exposed: float
    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Time of the program."""
        return self.compute + self.exposed

    @property
    def network(self) -> float:
        """Time that the collectives take, hidden or not."""
        return sum(event.seconds for event in self.events)


def timeline(
    program: Program, cycle_seconds: float, seconds: Callable[[Collective], float]
) -> Timeline:
    """Returns the times of a program.

    A loop's collectives do not overlap with what is outside of the loop. Of a conditional, the
    longest branch is taken.

    Args:
      program: a TPU program.
      cycle_seconds: seconds of an estimated cycle.
      seconds: gives the time of one execution of a collective.

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
    # When the network within the slice, and that between slices, is free again.
    free = {False: 0.0, True: 0.0}
    events: list[Event] = []
    # Of an asynchronous collective under way: when it ends, and the place of its event.
    under_way: dict[str, tuple[float, int]] = {}

    def wait(end: float, place: int | None) -> None:
        nonlocal clock, exposed
        waited = max(0.0, end - clock)
        clock, exposed = clock + waited, exposed + waited
        if place is not None:
            events[place] = events[place]._replace(exposed=events[place].exposed + waited)

    for instruction in computation.instructions.values():
        own = instruction.cycles() * cycle_seconds
        compute, clock = compute + own, clock + own
        if instruction.opcode in ("while", "conditional", "call"):
            times, inner = _inner(instruction, computation, program, of)
            compute, exposed = compute + times * inner.compute, exposed + times * inner.exposed
            clock += times * inner.seconds
            events += [
                event._replace(
                    collective=event.collective._replace(count=times * event.collective.count),
                    seconds=times * event.seconds,
                    exposed=times * event.exposed,
                )
                for event in inner.events
            ]
            continue
        if (ended := _ended(instruction, computation, program, under_way)) is not None:
            wait(*under_way.pop(ended))
            continue
        for found in _started(instruction, computation, program):
            taken = seconds(found)
            between = instruction.opcode == "send"
            free[between] = max(clock, free[between]) + taken
            text = _text(instruction, program)
            operation, algorithm = _OPERATION.search(text), _ALGORITHM.search(text)
            events.append(
                Event(
                    instruction.name,
                    found,
                    operation[1] if operation else "",
                    f"{algorithm[1]} {algorithm[2].replace(',', ' x ')}" if algorithm else "",
                    taken,
                    0.0,
                )
            )
            if (key := _key(instruction, program)) is not None:
                under_way[key] = free[between], len(events) - 1
            else:
                wait(free[between], len(events) - 1)
    for end, place in under_way.values():
        wait(end, place)
    return Timeline(compute, exposed, tuple(events))


def _inner(
    instruction: Instruction,
    computation: Computation,
    program: Program,
    of: Callable[[str], Timeline],
) -> tuple[int, Timeline]:
    """Returns how often an instruction runs what it calls, and the times of one run."""
    if instruction.opcode == "while":
        parts = [of(name) for key in ("body", "condition") for name in instruction.attribute(key)]
        if not any(part.seconds for part in parts):
            return 0, Timeline(0.0, 0.0, ())
        return program.turns(instruction, computation), Timeline(
            sum(part.compute for part in parts),
            sum(part.exposed for part in parts),
            tuple(event for part in parts for event in part.events),
        )
    keys = ("branch_computations", "true_computation", "false_computation", "to_apply", "calls")
    called = [of(name) for key in keys for name in instruction.attribute(key)]
    return 1, max(called, key=lambda part: part.seconds)


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
    """Returns an instruction's text with that of the computation it fuses or starts."""
    texts = [instruction.rest]
    if instruction.opcode in ("fusion", "async-start"):
        texts += [
            part.rest
            for name in instruction.attribute("calls")
            for part in program.computations[name].instructions.values()
        ]
    return "\n".join(texts)


def _key(instruction: Instruction, program: Program) -> str | None:
    """Returns by what the end of an asynchronous collective knows it; None for one that is not."""
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
    under_way: dict[str, tuple[float, int]],
) -> str | None:
    """Returns the key of the collective that an instruction ends; None if it ends none."""
    if instruction.opcode == "recv-done":
        # What comes back of a transfer to other slices.
        key = _rendezvous(computation.instructions[instruction.operands()[0]])
        return key if key in under_way else None
    if instruction.opcode.endswith("-done"):
        name = instruction.operands()[0]
        while name not in under_way:
            before = computation.instructions[name]
            # Between an async-start and its end, updates pass the same collective on.
            if before.opcode != "async-update":
                return None
            name = before.operands()[0]
        return name
    if under_way and instruction.opcode == "fusion":
        text = _text(instruction, program)
        channel = _CHANNEL.search(text)
        if '"AsyncCollectiveDone"' in text and channel and channel[1] in under_way:
            return channel[1]
    return None


def _rendezvous(instruction: Instruction) -> str:
    found = _RENDEZVOUS.search(instruction.rest)
    return found[1] if found else instruction.name

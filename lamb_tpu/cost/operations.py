"""Kernels of a compiled program by type and cost, with their source lines."""

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from lamb_tpu.cost.hlo import Instruction, Program

_LAYOUTS = "copy transpose concatenate pad slice dynamic-slice dynamic-update-slice reshape reverse"
# A kernel has the first type that contains one of its operations. A kernel has the
# last type only if this type contains all its operations.
TYPES = (
    ("matrix products and convolutions", {"convolution", "dot"}),
    ("random bits", {"rng-bit-generator", "rng"}),
    ("sorting", {"sort"}),
    ("gathers and scatters", {"gather", "scatter"}),
    ("reductions", {"reduce", "reduce-window", "select-and-scatter"}),
    ("copies and layouts", {*_LAYOUTS.split()}),
)
REST = "elementwise operations"
# Operations that do not affect the type of a kernel.
_PLAIN = {*"parameter constant bitcast tuple get-tuple-element broadcast convert iota".split()}
_OPERATION = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\](.*)")


class Operation(NamedTuple):
    """A kernel of a program."""

    name: str
    kind: str  # one of `TYPES`, or `REST`
    # Path of the operation in the model, for example 'Bert/encoder/layer_0/dot_general'.
    operation: str
    source: str  # file and line of the innermost frame outside of libraries; '' if unknown
    times: int  # number of executions in one run of the program
    cycles: int  # the compiler's estimate for all executions


def operations(program: Program) -> list[Operation]:
    """Returns the kernels that have an estimate, the most expensive first.

    Raises:
      ValueError: a loop's number of iterations is unknown.
    """
    sources = _Sources(program.text)
    found = []
    for times, instruction, _ in program.executions(lambda each, _: each.cycles()):
        path = _OPERATION.search(instruction.rest)
        frame = _FRAME.search(instruction.rest)
        found.append(
            Operation(
                name=instruction.name,
                kind=_kind(instruction, program),
                operation=_shortened(path[1] if path else ""),
                source=sources.of(int(frame[1])) if frame else "",
                times=times,
                cycles=times * instruction.cycles(),
            )
        )
    return sorted(found, key=lambda each: (-each.cycles, each.name))


def by_kind(found: list[Operation]) -> dict[str, int]:
    """Returns the cycles of each type of kernel that occurs, the most expensive type first."""
    cycles: dict[str, int] = {}
    for each in found:
        cycles[each.kind] = cycles.get(each.kind, 0) + each.cycles
    return dict(sorted(cycles.items(), key=lambda item: -item[1]))


def _kind(instruction: Instruction, program: Program) -> str:
    opcodes = set(_opcodes(instruction, program)) - _PLAIN
    for kind, known in TYPES[:-1]:
        if opcodes & known:
            return kind
    copies, opcodes_of_copies = TYPES[-1]
    return copies if opcodes and opcodes <= opcodes_of_copies else REST


def _opcodes(instruction: Instruction, program: Program) -> Iterator[str]:
    if instruction.opcode != "fusion":
        yield instruction.opcode.removesuffix("-start")
        return
    for name in instruction.attribute("calls"):
        for part in program.computations[name].instructions.values():
            yield from _opcodes(part, program)


def _shortened(path: str) -> str:
    """Returns the path of an operation without the JAX functions that enclose the model.

    >>> _shortened("jit(train_step)/shard_map/transpose(jvp(Bert))/encoder/dot_general")
    'transpose(jvp(Bert))/encoder/dot_general'
    """
    return re.sub(r"^(?:jit\(train_step\)/|shard_map/)*", "", path)


class _Sources:
    """The tables of files and stack frames at the start of a program's text."""

    def __init__(self, text: str) -> None:
        self._files = {
            number: line.strip('"') for number, line in _table(text, "FileNames").items()
        }
        self._locations = _table(text, "FileLocations")
        self._frames = _table(text, "StackFrames")

    def of(self, frame: int) -> str:
        """Returns 'file:line' of the innermost frame outside of libraries, or else of `frame` itself."""
        first = ""
        while line := self._frames.get(frame):
            location = self._locations.get(_number(line, "file_location_id"), "")
            path = self._files.get(_number(location, "file_name_id"), "")
            location_text = f"{_relative(path)}:{_number(location, 'line')}" if path else ""
            if path and not _LIBRARIES.search(path):
                return location_text
            first = first or location_text
            # `parent_frame_id` is the id of the parent plus 1, and no frame has the id 0.
            frame = _number(line, "parent_frame_id") - 1
        return first


def _table(text: str, name: str) -> dict[int, str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    lines = (line.split(" ", 1) for line in found[1].splitlines()) if found else ()
    return {int(number): rest for number, rest in lines}


def _number(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0


def _relative(path: str) -> str:
    """Returns a path relative to site-packages, the checkout or the current folder, if inside one of them."""
    if library := _LIBRARIES.search(path):
        return library[1]
    for folder in (pathlib.Path(__file__).parents[2], pathlib.Path.cwd()):
        if pathlib.Path(path).is_relative_to(folder):
            return str(pathlib.Path(path).relative_to(folder))
    return path

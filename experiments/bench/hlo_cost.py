"""What the TPU compiler expects a program to cost, read from its optimized HLO.

The compiler writes on an instruction how many cycles of the core it expects. A program's cycles are
the sum of them, with loops counted as often as they run; the network is not in these estimates.
"""

import math
import re
from typing import NamedTuple

_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = .*?\s([a-z][a-z0-9-]*)\((.*)")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_CONSTANT = re.compile(r"(-?\d+)\)")


class Cost(NamedTuple):
    """What one run of a program takes."""

    cycles: int  # of one core, as the compiler estimates them
    fusions: int  # fused kernels started


class _Instruction(NamedTuple):
    name: str
    opcode: str
    rest: str  # operands and attributes

    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,)]+)", self.rest.partition(")")[0])

    def attribute(self, key: str) -> list[str]:
        """The names that an attribute such as body=%name or calls={%a, %b} holds."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[^\s,]+)", self.rest)
        return re.findall(r"[^\s,%{}]+", found[1]) if found else []


class _Computation(NamedTuple):
    root: _Instruction
    instructions: dict[str, _Instruction]


def program_cost(hlo: str) -> Cost:
    """The cost of one run of a compiled program.

    A fusion's estimate covers all that it fuses. A loop counts its body and its condition as often
    as it runs, a conditional its dearest branch.

    >>> program_cost('''
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %f = f32[8]{0} fusion(%x), calls=%g, backend_config={"estimated_cycles":"300"}
    ... }''')
    Cost(cycles=300, fusions=1)

    Args:
      hlo: `as_text()` of what `jax.jit(...).lower(...).compile()` gave for a TPU.

    Returns:
      Its cycles and fusions.

    Raises:
      ValueError: text that is no HLO module; a loop whose number of turns it does not tell.
    """
    entry, computations = _parse(hlo)
    return _cost(computations[entry], computations)


def _parse(hlo: str) -> tuple[str, dict[str, _Computation]]:
    computations, entry = {}, None
    name, root, instructions = None, None, {}
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            name, root, instructions = header[2], None, {}
            entry = name if header[1] else entry
        elif name and line.startswith("}"):
            computations[name], name = _Computation(root, instructions), None
        elif name and (found := _INSTRUCTION.match(line)):
            instruction = _Instruction(*found.groups()[1:])
            instructions[instruction.name] = instruction
            root = instruction if found[1] else root
    if entry not in computations:
        raise ValueError("the text is no HLO module: it has no entry computation")
    return entry, computations


def _cost(computation: _Computation, computations: dict[str, _Computation]) -> Cost:
    cycles = fusions = 0
    for instruction in computation.instructions.values():
        estimate = _CYCLES.search(instruction.rest)
        cycles += int(estimate[1]) if estimate else 0
        fusions += instruction.opcode == "fusion"
        for turns, called in _called(instruction, computation, computations):
            cycles += turns * called.cycles
            fusions += turns * called.fusions
    return Cost(cycles, fusions)


def _called(
    instruction: _Instruction, computation: _Computation, computations: dict[str, _Computation]
) -> list[tuple[int, Cost]]:
    """What an instruction runs, and how often; what a fusion or a reduction holds is its own."""

    def costs(*keys):
        names = [name for key in keys for name in instruction.attribute(key)]
        return [_cost(computations[name], computations) for name in names]

    if instruction.opcode == "while":
        turns = _turns(instruction, computation, computations)
        return [(turns, cost) for cost in costs("body", "condition")]
    if instruction.opcode == "conditional":
        return [(1, max(costs("branch_computations", "true_computation", "false_computation")))]
    if instruction.opcode in ("call", "async-start"):
        return [(1, cost) for cost in costs("to_apply", "calls")]
    return []


def _turns(
    loop: _Instruction, computation: _Computation, computations: dict[str, _Computation]
) -> int:
    """How often a loop runs: a counter goes by a constant step to a constant limit."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    body = computations[loop.attribute("body")[0]]
    condition = computations[loop.attribute("condition")[0]]
    try:
        if condition.root.opcode != "compare" or "direction=LT" not in condition.root.rest:
            raise KeyError(condition.root.opcode)
        counter, limit = condition.root.operands()
        index = int(re.search(r"index=(\d+)", condition.instructions[counter].rest)[1])
        start = computation.instructions[loop.operands()[0]].operands()[index]
        step = body.instructions[body.root.operands()[index]]
        if step.opcode != "add":
            raise KeyError(step.opcode)
        return math.ceil(
            (_value(limit, condition) - _value(start, computation))
            / _value(step.operands()[1], body)
        )
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"the loop %{loop.name} does not tell how often it runs") from None


def _value(name: str, computation: _Computation) -> int:
    """The constant that an instruction is, or is a copy of."""
    instruction = computation.instructions[name]
    if instruction.opcode == "copy":
        return _value(instruction.operands()[0], computation)
    if instruction.opcode != "constant":
        raise KeyError(name)
    return int(_CONSTANT.match(instruction.rest)[1])

"""Parser of optimized HLO (a compiled program as text); counts the cycles and FLOPs of a program.

The TPU compiler annotates instructions with the estimated cycles of a TPU core. The estimates
exclude the network.
"""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

# Header of a computation: 'ENTRY %main (x: f32[8]) -> f32[8] {'.
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
# Line of an instruction: ' ROOT %y = f32[8]{0} add(%x, %x), metadata={...}'.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*?)\s([a-z][a-z0-9-]*)\((.*)")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_CONSTANT = re.compile(r"(-?\d+)\)")
# A type: 'f32[8,3]' or 'f8e4m3fn[8]'; a scalar is 'f32[]'.
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+[a-z]*)?)\[([\d,]*)\]")


class Cost(NamedTuple):
    """The estimated cycles, and the number of fused kernels, of one run of a program."""

    cycles: int  # cycles of one core
    fusions: int  # number of fused kernels that run


class Array(NamedTuple):
    """The type of an array, or of one array in a tuple."""

    dtype: str  # HLO's name: f32, bf16, s32, pred
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without the padding of a layout."""
        bits = re.search(r"\d+", self.dtype)  # 'pred' names no number of bits and takes a byte
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    result: str  # type of the result, as text
    opcode: str
    rest: str  # operands and attributes

    def operands(self) -> list[str]:
        """Returns the names of the operands."""
        return re.findall(r"%([^\s,)]+)", self.rest.partition(")")[0])

    def attribute(self, key: str) -> list[str]:
        """Returns the names in an attribute such as body=%name or calls={%a, %b}."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[^\s,]+)", self.rest)
        return re.findall(r"[^\s,%{}]+", found[1]) if found else []

    def cycles(self) -> int:
        """Returns the cycles that the compiler estimates; 0 if there is no estimate."""
        estimate = _CYCLES.search(self.rest)
        return int(estimate[1]) if estimate else 0

    def arrays(self) -> list[Array]:
        """Returns the types of the result: one array, or all arrays of a tuple."""
        return [
            Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
            for dtype, sizes in _ARRAY.findall(self.result)
        ]


class Computation(NamedTuple):
    """A function of a program."""

    name: str
    root: Instruction
    instructions: dict[str, Instruction]

    def inputs(self, instruction: Instruction) -> list[Array]:
        """Returns the types of the operands of an instruction."""
        return [
            array for name in instruction.operands() for array in self.instructions[name].arrays()
        ]


class Execution(NamedTuple):
    """An instruction, and the number of its executions in one run of the program."""

    times: int
    instruction: Instruction
    computation: Computation


class Program:
    """A compiled program.

    Args:
      hlo: `as_text()` of a compiled program.

    Attributes:
      text: the argument `hlo`.
      computations: the program's functions, by name.
      entry: name of the computation where the program starts.
      num_devices: number of devices that run the program together.

    Raises:
      ValueError: the text is not an HLO module.
    """

    def __init__(self, hlo: str) -> None:
        self.text = hlo
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        name: str | None = None
        root: Instruction | None = None
        instructions: dict[str, Instruction] = {}
        for line in hlo.splitlines():
            if header := _HEADER.match(line):
                name, root, instructions = header[2], None, {}
                self.entry = name if header[1] else self.entry
            elif name and line.startswith("}"):
                if root is not None:  # always the case in a complete module
                    self.computations[name] = Computation(name, root, instructions)
                name = None
            elif name and (found := _INSTRUCTION.match(line)):
                instruction = Instruction(*found.groups()[1:])
                instructions[instruction.name] = instruction
                root = instruction if found[1] else root
        if self.entry not in self.computations:
            raise ValueError("the text is not an HLO module: it has no entry computation")
        # The first line has one of these two counts or both; for a single device it has neither.
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", hlo.partition("\n")[0])
        self.num_devices = math.prod(int(count) for count in counts)

    def executions(self, size: Callable[[Instruction, Computation], int]) -> list[Execution]:
        """Returns the instructions that one run of the program executes, with their counts.

        A fusion is one instruction. Counts in a loop are multiplied by the loop's iterations. Of a
        conditional, the branch with the largest total `size` runs. Instructions of `size` 0 are omitted.

        Raises:
          ValueError: a loop with counted instructions has an unknown number of iterations.
        """

        # A computation may have several callers, so cache its executions and size.
        @functools.cache
        def of(name: str) -> tuple[list[Execution], int]:
            computation = self.computations[name]
            runs, total = [], 0
            for instruction in computation.instructions.values():
                if own := size(instruction, computation):
                    runs.append(Execution(1, instruction, computation))
                    total += own
                times, called = self.called(instruction, computation, lambda name: of(name)[1])
                for parts, amount in map(of, called):
                    runs += [part._replace(times=times * part.times) for part in parts]
                    total += times * amount
            return runs, total

        return of(self.entry)[0]

    def called(
        self, instruction: Instruction, computation: Computation, size: Callable[[str], float]
    ) -> tuple[int, list[str]]:
        """Returns how many times an instruction calls other computations, and these computations' names.

        A conditional calls its branch with the largest `size`. Fusions and reductions call no
        computations: what they compute counts as the instruction itself.
        """
        if instruction.opcode == "while":
            called = instruction.attribute("body") + instruction.attribute("condition")
            # Only a loop with counted instructions needs a known number of iterations.
            if not any(map(size, called)):
                return 0, []
            return self.iterations(instruction, computation), called
        if instruction.opcode == "conditional":
            keys = ("branch_computations", "true_computation", "false_computation")
            branches = [name for key in keys for name in instruction.attribute(key)]
            return 1, [max(branches, key=size)]
        if instruction.opcode in ("call", "async-start"):
            return 1, [*instruction.attribute("to_apply"), *instruction.attribute("calls")]
        return 0, []

    def iterations(self, loop: Instruction, computation: Computation) -> int:
        """Returns the number of iterations of a loop that counts by a constant step to a constant limit.

        If the condition also allows the loop to end earlier, returns the full number.

        Raises:
          ValueError: the number is unknown.
        """
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        body = self.computations[loop.attribute("body")[0]]
        condition = self.computations[loop.attribute("condition")[0]]
        found, demanded = list[int](), [condition.root]
        for demand in demanded:  # the body of this loop appends to the list
            if demand.opcode == "and":
                demanded += [condition.instructions[name] for name in demand.operands()]
            # Other forms of counters raise: a name is missing, or there are too few operands.
            with contextlib.suppress(KeyError, IndexError, TypeError, ZeroDivisionError):
                found.append(_iterations(demand, condition, body, loop, computation))
        if not found:
            raise ValueError(f"the loop %{loop.name} has an unknown number of iterations")
        return min(found)


def _iterations(
    demand: Instruction,
    condition: Computation,
    body: Computation,
    loop: Instruction,
    computation: Computation,
) -> int:
    """Returns the number of iterations for which `demand`, of the form counter < limit, holds.

    Raises:
      KeyError, IndexError, TypeError, ZeroDivisionError: `demand` or the counter has another form.
    """
    # The counter is an element of the loop's tuple.
    if demand.opcode != "compare" or "direction=LT" not in demand.rest:
        raise KeyError(demand.opcode)
    counter, limit = demand.operands()
    found = re.search(r"index=(\d+)", condition.instructions[counter].rest)
    if found is None:
        raise KeyError(counter)
    index = int(found[1])
    # The counter in the loop's operand, and in the tuple that the body returns.
    start = computation.instructions[loop.operands()[0]].operands()[index]
    step = body.instructions[body.root.operands()[index]]
    if step.opcode != "add":
        raise KeyError(step.opcode)
    return max(
        0,
        math.ceil(
            (_value(limit, condition) - _value(start, computation))
            / _value(step.operands()[1], body)
        ),
    )


@functools.lru_cache(maxsize=1)
def parse(hlo: str) -> Program:
    """Parses the text of a program, and caches only the most recent result; see `Program`."""
    return Program(hlo)


def _value(name: str, computation: Computation) -> int:
    """Returns the value of a constant, or of a copy of a constant."""
    instruction = computation.instructions[name]
    if instruction.opcode == "copy":
        return _value(instruction.operands()[0], computation)
    found = _CONSTANT.match(instruction.rest)
    if instruction.opcode != "constant" or found is None:
        raise KeyError(name)
    return int(found[1])


def program_cost(hlo: str) -> Cost:
    """Returns the cost of one run of a program that is compiled for a TPU.

    A fusion's estimate covers all its operations. The body and condition of a loop count once per
    iteration. Of a conditional, the most expensive branch counts.

    >>> program_cost('''
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %f = f32[8]{0} fusion(%x), calls=%g, backend_config={"estimated_cycles":"300"}
    ... }''')
    Cost(cycles=300, fusions=1)

    Raises:
      ValueError: the text is not an HLO module, or a loop's number of iterations is unknown.
    """
    program = parse(hlo)
    runs = program.executions(lambda instruction, _: instruction.cycles())
    fusions = program.executions(lambda instruction, _: instruction.opcode == "fusion")
    return Cost(
        sum(times * instruction.cycles() for times, instruction, _ in runs),
        sum(times for times, _, _ in fusions),
    )


def program_flops(hlo: str) -> int:
    """Returns the floating-point operations of a program's matrix products and convolutions.

    A multiplication and its addition are two operations. Unlike JAX's `cost_analysis`, this counts
    all iterations of a loop, and omits all other arithmetic, which is small in comparison. The
    program may be for any platform whose compiler does not call a library for matrix products.

    >>> program_flops('''
    ... ENTRY %main (x: f32[8,3], y: f32[3,5]) -> f32[8,5] {
    ...   %x = f32[8,3]{1,0} parameter(0)
    ...   %y = f32[3,5]{1,0} parameter(1)
    ...   ROOT %dot = f32[8,5] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''')
    240

    Raises:
      ValueError: see `program_cost`.
    """
    program = parse(hlo)

    @functools.cache
    def inside(name: str) -> int:
        computation = program.computations[name]
        return sum(flops(part, computation) for part in computation.instructions.values())

    def flops(instruction: Instruction, computation: Computation) -> int:
        if instruction.opcode == "dot":
            return 2 * _dot(instruction, computation)
        if instruction.opcode == "convolution":
            return 2 * _convolution(instruction, computation)
        if instruction.opcode == "fusion":
            return sum(inside(name) for name in instruction.attribute("calls"))
        return 0

    runs = program.executions(flops)
    return sum(times * flops(instruction, computation) for times, instruction, computation in runs)


def _dot(dot: Instruction, computation: Computation) -> int:
    """Returns the number of multiplications of a matrix product."""
    left = computation.inputs(dot)[0].shape
    contracted = [left[int(axis)] for axis in dot.attribute("lhs_contracting_dims")]
    return math.prod(dot.arrays()[0].shape) * math.prod(contracted)


def _convolution(convolution: Instruction, computation: Computation) -> int:
    """Returns the number of multiplications in a convolution, excluding those by padding or dilation zeros.

    The TPU compiler writes every matrix product as a convolution. A batch of products becomes a
    convolution over a spatial axis whose length is the batch size. The dilation of this axis gives each
    output position one product.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.rest)
    if labels is None:
        raise ValueError(f"the convolution %{convolution.name} has no dim_labels")
    shapes = [array.shape for array in computation.inputs(convolution)[:2]]
    shapes.append(convolution.arrays()[0].shape)
    inputs, kernel, output = (
        dict(zip(names, shape, strict=True))
        for names, shape in zip(labels.groups(), shapes, strict=True)
    )
    braces = re.search(r"\bwindow=\{([^}]*)\}", convolution.rest)
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", braces[1] if braces else ""))

    def each(key: str, default: str) -> list[str]:
        return window[key].split("x") if key in window else [default] * len(spatial)

    spatial = sorted(label for label in inputs if label.isdigit())
    # Count the pairs of an output and a kernel position that read an input value, not a zero. The
    # axes are independent, so the counts of the axes multiply.
    pairs = 1
    for axis, size, stride, pad, spread, dilation in zip(
        spatial,
        each("size", "1"),
        each("stride", "1"),
        each("pad", "0_0"),
        each("lhs_dilate", "1"),
        each("rhs_dilate", "1"),
        strict=True,
    ):
        # Padding is 'low_high', and the high side does not shift positions.
        low = int(pad.split("_")[0])
        positions = (
            place * int(stride) + offset * int(dilation) - low
            for place, offset in itertools.product(range(output[axis]), range(int(size)))
        )
        reach = (inputs[axis] - 1) * int(spread)
        pairs *= sum(0 <= place <= reach and place % int(spread) == 0 for place in positions)
    groups = re.search(r"batch_group_count=(\d+)", convolution.rest)
    return pairs * kernel["i"] * kernel["o"] * inputs["b"] // int(groups[1] if groups else 1)

"""Traffic between the devices of a compiled program, extracted from its optimized HLO."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from lamb_tpu.cost.hlo import Array, Computation, Instruction, Program, parse

TYPES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# A transfer to other slices: the participating slices and devices, and its type.
_BETWEEN_SLICES = re.compile(
    r'_xla_megascale_target="\{([\d,:]+)\}.*_xla_megascale_transfer_type="(\w+)"'
)
Groups = tuple[tuple[int, ...], ...]


class Collective(NamedTuple):
    """One operation in which devices exchange data."""

    kind: str  # one of `TYPES`
    groups: Groups  # device indices in the program; for a permutation, (from, to) pairs
    arrays: tuple[Array, ...]  # operands of each device
    count: int  # type: ignore[assignment]  # number of executions in one run of the program

    @property
    def group_size(self) -> int:
        """Number of devices in the largest group."""
        return max(map(len, self.groups))

    @property
    def dtype(self) -> str:
        """HLO's name of the operands' dtype; for example 'bf16+f32' if there are several."""
        return "+".join(sorted({array.dtype for array in self.arrays}))

    @property
    def operand_bytes(self) -> int:
        """Bytes of one device's operands, for one execution."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def result_bytes(self) -> int:
        """Bytes of one device's results, for one execution."""
        if self.kind == "all-gather":
            return self.operand_bytes * self.group_size
        return self.operand_bytes // (self.group_size if self.kind == "reduce-scatter" else 1)

    @property
    def sent_bytes(self) -> int:
        """Lower bound on the bytes that a device sends in one execution.

        With n devices the bound is the operand's bytes times 2 (n - 1) / n for an all-reduce,
        (n - 1) / n for a reduce-scatter, and n - 1 for an all-gather.
        """
        others, size = self.group_size - 1, self.operand_bytes
        if self.kind in ("all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"):
            # An all-reduce sends as much as a reduce-scatter and an all-gather of the shards.
            return (2 if self.kind == "all-reduce" else 1) * size * others // (others + 1)
        return size * others if self.kind == "all-gather" else size


class TrafficRow(NamedTuple):
    """Sums over collectives of the same type, group size and dtype; bytes are per device."""

    kind: str
    group_size: int
    dtype: str
    count: int  # type: ignore[assignment]
    operand_bytes: int
    result_bytes: int
    sent_bytes: int


def collectives(hlo: str) -> list[Collective]:
    """Returns all collectives in the text of a compiled program, in the program's order.

    An asynchronous collective counts where it starts. Collectives inside the TPU compiler's fusions
    are included. If a fusion slices each device's shard out of an all-reduce, the TPU runs a
    reduce-scatter, which is returned. An all-reduce followed by a slice outside of a fusion is
    returned as an all-reduce. The bytes include padding that the compiler adds.

    >>> [reduced] = collectives('''HloModule f, num_partitions=4
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %y = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
    ... }''')
    >>> reduced.kind, reduced.groups, reduced.operand_bytes, reduced.sent_bytes
    ('all-reduce', ((0, 1), (2, 3)), 32, 32)

    Raises:
      ValueError: the text is not an HLO module, or a loop with collectives has an unknown number of
        iterations.
    """
    program = parse(hlo)

    def size(instruction: Instruction, computation: Computation) -> int:
        found = collectives_of(instruction, computation, program)
        # `executions` leaves out size 0, but an empty collective counts too.
        return sum(max(collective.operand_bytes, 1) for collective in found)

    return [
        collective._replace(count=run.times)
        for run in program.executions(size)
        for collective in collectives_of(run.instruction, run.computation, program)
    ]


def sent_by_dtype(found: Iterable[Collective]) -> dict[str, int]:
    """Returns the bytes that a device sends in one run of a program, by HLO's name of the dtype.

    If an operation has arrays of several dtypes, each array counts under its own dtype. The largest
    sum comes first.
    """
    sums: dict[str, int] = {}
    for one in found:
        for dtype in {array.dtype for array in one.arrays}:
            arrays = tuple(array for array in one.arrays if array.dtype == dtype)
            sent = one.count * one._replace(arrays=arrays).sent_bytes
            sums[dtype] = sums.get(dtype, 0) + sent
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def table(found: Iterable[Collective]) -> list[TrafficRow]:
    """Returns one row per type, group size and dtype of collectives, largest traffic first."""
    totals: dict[tuple[str, int, str], list[int]] = {}
    for one in found:
        total = totals.setdefault((one.kind, one.group_size, one.dtype), [0, 0, 0, 0])
        for index, size in enumerate((1, one.operand_bytes, one.result_bytes, one.sent_bytes)):
            total[index] += one.count * size
    rows = [TrafficRow(*key, *total) for key, total in totals.items()]
    return sorted(rows, key=lambda row: (-row.sent_bytes, row))


def collectives_of(
    instruction: Instruction, computation: Computation, program: Program, started: bool = False
) -> Iterator[Collective]:
    """Yields the collectives that one execution of an instruction performs or starts.

    `started`: the instruction is in a fusion that starts an asynchronous collective.
    """
    if instruction.opcode == "fusion":
        for name in instruction.attribute("calls"):
            inner = program.computations[name]
            parts = inner.instructions.values()
            starts = started or any('"AsyncCollectiveStart"' in part.rest for part in parts)
            for part in parts:
                # The compiler copies an asynchronous collective into the fusions of the matrix
                # products that overlap with it, and into the fusion that ends it. These copies do
                # not count.
                taken_on = '"async_collective_fusion_config"' in part.rest and not starts
                if not taken_on:
                    yield from collectives_of(part, inner, program, starts)
        return
    if instruction.opcode == "send" and (between := _BETWEEN_SLICES.search(instruction.rest)):
        yield _between_slices(instruction, computation, program, *between.groups())
    kind = instruction.opcode.removesuffix("-start")
    if kind in TYPES:
        # The TPU compiler writes a fused reduce-scatter as an all-reduce and a slice.
        if kind == "all-reduce" and _keeps_part(instruction, computation):
            kind = "reduce-scatter"
        arrays = tuple(computation.inputs(instruction))
        yield Collective(kind, replica_groups(instruction.rest, program.num_devices), arrays, 1)


def _between_slices(
    send: Instruction, computation: Computation, program: Program, slices: str, transfer: str
) -> Collective:
    """Returns a collective between slices, which the compiler writes as a transfer by the hosts.

    The program describes the devices of one slice; the indices of the devices in further slices
    follow.
    """
    ends = [list(map(int, part.split(":"))) for part in slices.split(",")]
    count, own = sum(part[-1] - part[0] + 1 for part in ends), program.num_devices
    groups = tuple(tuple(range(first, count * own, own)) for first in range(own))
    kind = transfer.lower().replace("_", "-")
    arrays = computation.instructions[send.operands()[0]].arrays()
    # Any other transfer is from one slice to another.
    return Collective(kind if kind in TYPES else "collective-permute", groups, tuple(arrays), 1)


def _keeps_part(reduction: Instruction, computation: Computation) -> bool:
    """Returns whether the fusion that has an all-reduce also slices each device's shard out of it."""
    names = {reduction.name}
    for instruction in computation.instructions.values():
        if instruction.operands()[:1] and instruction.operands()[0] in names:
            if instruction.opcode == "dynamic-slice":
                return True
            if instruction.opcode in ("get-tuple-element", "bitcast", "reshape"):
                names.add(instruction.name)
    return False


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """Parses a collective's groups of devices, in any of the compiler's notations.

    An empty list of groups means all devices.

    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'b'}", 4)
    ((0, 1), (2, 3))
    >>> replica_groups("source_target_pairs={{0,1},{1,0}}", 2)
    ((0, 1), (1, 0))

    Raises:
      ValueError: there are no groups, or they are in an unknown notation.
    """
    found = re.search(r"\b(?:replica_groups|source_target_pairs)=(.*)", attributes)
    text = found[1] if found else ""
    # The notations are '{}', all devices; '{{0,1},{2,3}}'; '[2,2]<=[4]', an iota cut into groups;
    # and axes of a mesh by name.
    if text.startswith("{}"):
        return (tuple(range(num_devices)),)
    if text.startswith("{{"):
        lists = re.findall(r"\{([\d,]+)\}", text.partition("}}")[0] + "}")
        return tuple(tuple(map(int, numbers.split(","))) for numbers in lists)
    if tiles := re.match(r"\[([\d,]+)\](<=\S+)", text):
        groups = _counted(tiles[2].removeprefix("<=")).reshape(_numbers(tiles[1]))
    elif mesh := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", text):
        groups = _on_mesh(*mesh.groups())
    else:
        raise ValueError(f"{attributes[:200]!r} has no replica groups in a known notation")
    return tuple(tuple(group) for group in groups.tolist())


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text or "")]


def _counted(text: str) -> np.ndarray:
    """Parses '[2,4]T(1,0)', a transposed iota of shape (2, 4), or a list; returns a flat array."""
    tiles = re.match(r"\[([\d,]+)\](?:T\(([\d,]+))?", text)
    if not tiles:
        return np.array(_numbers(text))
    sizes = _numbers(tiles[1])
    order = _numbers(tiles[2]) or None
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()


def _on_mesh(axes: str, ids: str | None, within: str) -> np.ndarray:
    """Parses groups along mesh axes, such as 'a', or 'b':(2)3: the second factor of b, split as 2 x 3."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    # Axis -> the coordinate of every device along it.
    places = dict(zip(sizes, np.indices([*sizes.values()]).reshape(len(sizes), -1), strict=True))
    own = np.zeros_like(next(iter(places.values())))  # index of a device within its group
    # A subaxis is one digit of the coordinate. Move it from there to the index within the group.
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", within):
        size = int(size or sizes[name])
        after = sizes[name] // (int(before or 1) * size)
        digit = places[name] // after % size
        places[name] = places[name] - digit * after
        own = own * size + digit
    others = np.ravel_multi_index([*places.values()], [*sizes.values()])
    numbers = np.arange(len(own)) if ids is None else _counted(ids)
    # Sort by the coordinates that the members of a group share, then by the index within the group.
    return numbers[np.lexsort((own, others))].reshape(len(set(others.tolist())), -1)

"""TPU slices by generation: shapes, memory, peaks, and the sizes in their names.

`lamb_tpu.cost.topology` names the sources. This module does not import JAX, so that --help can list
the slices without delay.
"""

import dataclasses
import math

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """Properties that all slices of one TPU generation share."""

    counted: int  # 2 if the number in a slice's name counts cores, 1 if it counts chips
    devices: int  # number of JAX devices of a chip
    # Shapes, in chips, of the slices that are smaller than a cube of 4 x 4 x 4 chips. For a
    # two-dimensional network: the shapes of all slices.
    shapes: tuple[tuple[int, ...], ...]
    max_cubes: int  # number of such cubes in the largest slice; 0 for a two-dimensional network
    hbm: int  # memory of a device, in bytes
    # Bytes of that memory that programs can use, from the compiler's out-of-memory error (libtpu
    # 0.0.42; 0.0.50 allows 0.02 GiB less on a v5p).
    usable: float
    peak: float  # floating-point operations per second of a device, in bfloat16
    # Frequency of the core in Hz: the peak divided by the operations of the matrix units per cycle,
    # rounded. Each unit does 2 x 128 x 128 operations per cycle; a device of v2, v3, v4, v5e and v5p
    # has 1, 2, 8, 4 and 8 units. The v6e documents mention two units in one place and four in
    # another. The compiler's counts exceed the capacity of two, so four units of 256 x 256 are
    # assumed. Four are also assumed for a core of tpu7x, because its documents give no number.
    clock: float


_SMALL_CUBOIDS = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LITE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_V2 = ((2, 2, 1), (4, 4, 1), (8, 8, 1), (8, 16, 1), (16, 16, 1))
_V3 = ((2, 2, 1), (4, 4, 1), (4, 8, 1), *_V2[2:], (16, 32, 1), (32, 32, 1))
GENERATIONS = {
    version: Generation(
        counted=counted,
        devices=devices,
        shapes=smaller,
        max_cubes=cubes,
        hbm=hbm * GIB,
        usable=usable * GIB,
        peak=teraflops * 1e12,
        clock=megahertz * 1e6,
    )
    # hbm and usable are in GiB.
    for version, counted, devices, smaller, cubes, hbm, usable, teraflops, megahertz in (
        ("v2", 2, 2, _V2, 0, 8, 7.48, 23, 700),
        ("v3", 2, 2, _V3, 0, 16, 15.48, 61.5, 940),
        ("v4", 2, 1, _SMALL_CUBOIDS, 64, 32, 30.75, 275, 1050),
        ("v5e", 1, 1, _LITE, 0, 16, 15.75, 197, 1500),
        ("v5p", 2, 1, _SMALL_CUBOIDS, 96, 96, 95.74, 459, 1750),
        ("v6e", 1, 1, _LITE, 0, 32, 31.25, 918, 1750),
        ("tpu7x", 2, 2, _SMALL_CUBOIDS, 144, 96, 94.75, 1153.5, 2200),
    )
}
OTHER_NAMES = {"v5litepod": "v5e"}
# The largest published job had 50,944 chips in 199 slices of v5e (cloud.google.com/blog, "the
# world's largest distributed LLM training job on TPU v5e"). libtpu's descriptions of far larger
# systems take gigabytes.
MAX_CHIPS = 65_536
# A larger number crashes the compiler: "Check failed: NumSlices() < kMaxNumSlices".
MAX_SLICES = 511


def shapes(version: str) -> dict[int, tuple[int, ...]]:
    """Returns the number in a slice's name -> the slice's shape, for all slices of a version."""
    generation = GENERATIONS[version]
    cubes = [_cuboid(number) for number in range(1, generation.max_cubes + 1)]
    found = [*generation.shapes, *cubes]
    return {generation.counted * math.prod(shape): shape for shape in found}


def max_side(version: str) -> int:
    """Returns the length of the longest side of any slice, in chips."""
    generation = GENERATIONS[version]
    # A slice that consists of cubes may be a single row of cubes.
    return 4 * generation.max_cubes or max(map(max, generation.shapes))


def _cuboid(cubes: int) -> tuple[int, ...]:
    """Returns the most compact shape, in chips, of `cubes` cubes of 4 x 4 x 4 chips."""
    found = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        if cubes % a == 0
        # Sides ascend, so each shape occurs once.
        for b in range(a, cubes + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    return tuple(4 * side for side in min(found, key=sum))


def sizes(version: str) -> str:
    """Returns the numbers in the names of a version's slices, as text.

    >>> sizes("v4")
    '8, 16, 32, 64 and the multiples of 128 up to 8192'
    """
    generation = GENERATIONS[version]
    found = ", ".join(str(generation.counted * math.prod(shape)) for shape in generation.shapes)
    if not generation.max_cubes:
        return found
    cube = generation.counted * 64
    return f"{found} and the multiples of {cube} up to {cube * generation.max_cubes}"


def listed() -> str:
    """Returns a line for each generation with its slices, for --help."""
    return "\n".join(
        f"{version}-SIZE, in {'chips' if each.counted == 1 else 'cores'}: {sizes(version)}"
        for version, each in GENERATIONS.items()
    )

"""TPU slices by name, devices to compile for without a TPU, and peak FLOP/s.

Names, shapes, memory and peaks are those of `cloud.google.com/tpu/docs/` v2, v3, v4, v5e, v5p, v6e,
tpu7x and types-topologies; v2's memory and peak are from
`docs.jax.dev/en/latest/pallas/tpu/hardware`. The number in a name counts chips for v5e and v6e,
cores for the others. JAX has one device for each core of v2, v3 and tpu7x, and one for each chip of
the others. A name with a shape in chips, such as v4:4x4x8, is any slice that libtpu knows. In
front of either, 2x stands for two slices that a data-centre network connects.

Peaks of NVIDIA's GPUs are of dense products in bfloat16 (in float16 for V100, which has no other),
by NVIDIA: `developer.nvidia.com/programming-tensor-cores-cuda-9-0` for V100, and its data sheets as
`glennklockwood.com/garden/processors/` A100, h100 and B200 quote them.
"""

import dataclasses
import difflib
import importlib.metadata
import importlib.util
import math
import os
import re
import tempfile
from typing import Any

import jax
from jax.experimental import topologies

from lamb_tpu.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Generation:
    """Properties that all slices of one TPU generation share.

    Attributes:
      counted: units that a slice's name counts for each chip: 2 (its cores) or 1 (the chip).
      devices: JAX devices of a chip.
      shapes: shapes of the slices smaller than a cube of 4 x 4 x 4 chips, in chips; for a
        two-dimensional network, of all slices.
      max_cubes: number of such cubes in the largest slice; 0 for a two-dimensional network.
      hbm: memory of a device, in bytes.
      usable: bytes of that memory that the compiler gives to programs, by its out-of-memory error
        (libtpu 0.0.42; 0.0.50 gives 0.02 GiB less on a v5p).
      peak: floating-point operations a second of a device, in bfloat16.
      clock: frequency of the core in Hz: the peak divided by the operations of the matrix units in
        a cycle, rounded. Each unit does 2 x 128 x 128; a device has 1, 2, 8, 4 and 8 units from v2
        to v5p. For v6e the documents name two units in one place and four in another; the
        compiler's counts exceed what two could do, so four units of 256 x 256 are assumed, and as
        many for a core of tpu7x, whose documents name none.
    """

    counted: int
    devices: int
    shapes: tuple[tuple[int, ...], ...]
    max_cubes: int
    hbm: int
    usable: float
    peak: float
    clock: float


_SMALL_CUBOIDS = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_LITE = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Values are in the order of the fields of `Generation`.
GENERATIONS = {
    "v2": Generation(
        2,
        2,
        ((2, 2, 1), (4, 4, 1), (8, 8, 1), (8, 16, 1), (16, 16, 1)),
        0,
        8 * GIB,
        7.48 * GIB,
        23e12,
        700e6,
    ),
    "v3": Generation(
        2,
        2,
        (
            (2, 2, 1),
            (4, 4, 1),
            (4, 8, 1),
            (8, 8, 1),
            (8, 16, 1),
            (16, 16, 1),
            (16, 32, 1),
            (32, 32, 1),
        ),
        0,
        16 * GIB,
        15.48 * GIB,
        61.5e12,
        940e6,
    ),
    "v4": Generation(2, 1, _SMALL_CUBOIDS, 64, 32 * GIB, 30.75 * GIB, 275e12, 1050e6),
    "v5e": Generation(1, 1, _LITE, 0, 16 * GIB, 15.75 * GIB, 197e12, 1500e6),
    "v5p": Generation(2, 1, _SMALL_CUBOIDS, 96, 96 * GIB, 95.74 * GIB, 459e12, 1750e6),
    "v6e": Generation(1, 1, _LITE, 0, 32 * GIB, 31.25 * GIB, 918e12, 1750e6),
    "tpu7x": Generation(2, 2, _SMALL_CUBOIDS, 144, 96 * GIB, 94.75 * GIB, 1153.5e12, 2200e6),
}
_OTHER_NAMES = {"v5litepod": "v5e"}
# Versions by `device_kind`, as JAX 0.10 knows them (jax/_src/pallas/mosaic/tpu_info.py).
_TPU_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
# Whole names: a part of a GPU (MIG) and cards with a slower clock have others.
_GPU_PEAKS = {
    "Tesla V100-SXM2-16GB": 125e12,
    "Tesla V100-SXM2-32GB": 125e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA B200": 2250e12,
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One slice, or several of a kind.

    Attributes:
      name: the name that was asked for, such as 'v3-2048'.
      version: the chip's version, a key of `GENERATIONS`.
      shape: a slice's shape, in chips.
      slices: number of slices; a data-centre network connects them.
    """

    name: str
    version: str
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def generation(self) -> Generation:
        """Properties of the slice's TPU generation."""
        return GENERATIONS[self.version]

    @property
    def num_devices(self) -> int:
        """Number of JAX devices."""
        return self.num_chips * self.generation.devices

    @property
    def num_chips(self) -> int:
        """Number of chips."""
        return self.slices * math.prod(self.shape)

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each of the three sides, True if the links wrap around along it."""
        if self.generation.max_cubes:
            # Slices of whole cubes of 4 x 4 x 4 chips wrap around along all three sides.
            return (all(side % 4 == 0 for side in self.shape),) * 3
        # The links wrap around along the sides that are as long as the pod's.
        longest = max(max(shape) for shape in self.generation.shapes)
        return tuple(side == longest for side in (*self.shape, 1)[:3])

    def compiler_options(self) -> dict[str, Any]:
        """Arguments of `jax.experimental.topologies.get_topology_desc` for the slice."""
        # A host has four chips; a lite slice of up to eight chips is one host.
        lite = self.generation.counted == 1 and math.prod(self.shape) <= 8
        host = (*self.shape, 1) if lite else (2, 2, 1)
        options: dict[str, Any] = {
            "topology_name": f"{self.version}:{'x'.join(map(str, self.shape))}",
            "chips_per_host_bounds": host,
            "wrap": self.wrap,
        }
        if self.slices > 1:
            options["num_slices"] = self.slices
        # By default the compiler takes each core of a v4 for a device.
        return options | ({"chip_config_name": "megacore"} if self.version == "v4" else {})


def topology(name: str) -> Topology:
    """Returns the slice that a name stands for.

    >>> topology("v3-2048")
    Topology(name='v3-2048', version='v3', shape=(32, 32, 1), slices=1)
    >>> topology("v5litepod-16").num_devices
    16
    >>> topology("2xv4:4x4x8").shape
    (4, 4, 8)

    Raises:
      UserError: no slice has the name; the message lists those that are near.
    """
    found = re.fullmatch(r"(?:(\d+)x)?([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+){1,2}))", name)
    slices, version, size, sides = found.groups("") if found else ("",) * 4
    version = _OTHER_NAMES.get(version, version)
    if version not in GENERATIONS or slices == "0":
        if sides and _is_known_to_libtpu(f"{version}:{sides}"):
            raise UserError(
                f"--topology is {name!r}, which libtpu knows, but lamb_tpu has neither memory nor "
                f"peak nor links of {version}: give one of {', '.join(GENERATIONS)}, or add it to "
                "GENERATIONS in lamb_tpu/cost/topology.py and LINKS in lamb_tpu/cost/network.py"
            )
        raise UserError(
            f"--topology is {name!r}; it must be one of {', '.join(GENERATIONS)}, a hyphen and the "
            f"size{_perhaps(name)}, or a colon and a shape in chips, such as v4:4x4x8"
        )
    if sides:
        shape = tuple(map(int, sides.split("x")))
        wanted = len(GENERATIONS[version].shapes[0])
        if len(shape) < wanted:
            shape = (*shape, 1)
        if len(shape) != wanted or min(shape) < 1:
            raise UserError(
                f"--topology is {name!r}; a shape of {version} has {wanted} sides, such as "
                f"{version}:{'x'.join(map(str, GENERATIONS[version].shapes[-1]))}"
            )
        return Topology(name, version, shape, int(slices or 1))
    shapes, count = _shapes(version), int(size)
    if count not in shapes:
        near = sorted(sorted(shapes, key=lambda size: abs(size - count))[:2])
        unit = "cores" if GENERATIONS[version].counted == 2 else "chips"
        raise UserError(
            f"--topology is {name!r}, and no slice of {version} has {count} {unit}; the nearest "
            f"are {' and '.join(f'{version}-{size}' for size in near)}, of {_sizes(version)}"
        )
    return Topology(name, version, shapes[count], int(slices or 1))


def devices(slice_: Topology) -> list[jax.Device]:
    """Returns devices for which the real TPU compiler can compile programs without a TPU.

    After this call JAX runs on the CPU alone, and nothing looks for a TPU.

    Raises:
      UserError: libtpu, which holds the compiler, is not installed, is held by another process, or
        does not know the slice.
    """
    try:
        return list(_describe(**slice_.compiler_options()).devices)
    # libtpu has no errors of its own: JAX passes on its status with the text.
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        if re.search("lockfile|already in use|in use by", text):
            raise UserError(
                "another process holds libtpu; end it, or, if there is none, remove its lock file "
                f"{os.path.join(tempfile.gettempdir(), 'libtpu_lockfile')} ({text})"
            ) from None
        raise UserError(
            f"--topology is {slice_.name!r}, and libtpu {importlib.metadata.version('libtpu')} "
            f"refuses a slice of {slice_.version} of shape {'x'.join(map(str, slice_.shape))}; "
            f"{slice_.version} has {_sizes(slice_.version)} ({text})"
        ) from None


def _describe(**options: Any) -> topologies.TopologyDescription:
    """Returns a topology of libtpu, after settings under which libtpu looks for no TPU."""
    # Looked up and not imported: the environment must be set before libtpu is loaded.
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed; it is a library for Linux on x86-64 that comes "
            "with the extra tpu: .venv/bin/pip install -e '.[tpu]'"
        )
    # Otherwise JAX would look for a TPU as soon as an array is created.
    jax.config.update("jax_platforms", "cpu")
    os.environ.update(
        # The compiler must neither look for a TPU nor ask Google's cloud where it runs.
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v3-8",
        # No device is used, so several processes may compile at a time.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        # libtpu would leave log files in a folder that all users share.
        TPU_LOG_DIR="disabled",
    )
    return topologies.get_topology_desc(platform="tpu", **options)


def _is_known_to_libtpu(name: str) -> bool:
    """Returns whether libtpu has a slice of this name; False without libtpu."""
    try:
        return bool(_describe(topology_name=name).devices)
    except (UserError, jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        return False


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of one JAX device, by `jax.Device.device_kind`; None for an unknown kind.

    The peak is of matrix products in bfloat16. On TPU v2 and v3 a device is a core.

    >>> peak_flops("TPU v3"), peak_flops("NVIDIA H200"), peak_flops("cpu")
    (61500000000000.0, 989400000000000.0, None)
    """
    version = _TPU_KINDS.get(device_kind)
    return GENERATIONS[version].peak if version else _GPU_PEAKS.get(device_kind)


def tpu_version(device_kind: str) -> str:
    """Returns the version of a TPU by `jax.Device.device_kind`, such as 'v5e' of 'TPU v5 lite'.

    Raises:
      UserError: the device is unknown.
    """
    if device_kind not in _TPU_KINDS:
        raise UserError(
            f"the device {device_kind!r} is unknown; lamb_tpu knows {', '.join(_TPU_KINDS)}, and "
            "GENERATIONS in lamb_tpu/cost/topology.py has their properties"
        )
    return _TPU_KINDS[device_kind]


def slice_name(device_kind: str, devices: int) -> str:
    """Returns the name of the slice that has so many JAX devices.

    >>> slice_name("TPU v4", 64), slice_name("TPU v3", 32), slice_name("TPU v5 lite", 16)
    ('v4-128', 'v3-32', 'v5e-16')

    Args:
      device_kind: `jax.Device.device_kind`.
      devices: number of devices.

    Raises:
      UserError: the device is unknown, or no slice has that number of devices.
    """
    version = tpu_version(device_kind)
    generation = GENERATIONS[version]
    count = devices * generation.counted // generation.devices
    if count * generation.devices != devices * generation.counted or count not in _shapes(version):
        raise UserError(
            f"no one slice of {version} has {devices:,} devices ({device_kind}); name it with "
            f"--topology, such as 2x{version}-{max(1, count // 2)} for two slices"
        )
    return f"{version}-{count}"


def _shapes(version: str) -> dict[int, tuple[int, ...]]:
    """Shapes of a version's slices, by the number in their names."""
    generation = GENERATIONS[version]
    cubes = [_cuboid(number) for number in range(1, generation.max_cubes + 1)]
    shapes = [*generation.shapes, *cubes]
    return {generation.counted * math.prod(shape): shape for shape in shapes}


def _cuboid(cubes: int) -> tuple[int, ...]:
    """The shape nearest to a cube that consists of `cubes` cubes of 4 x 4 x 4 chips."""
    shapes = [
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        if cubes % a == 0
        # Sides ascend, so each shape occurs once.
        for b in range(a, cubes + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    ]
    return tuple(4 * side for side in min(shapes, key=sum))


def _sizes(version: str) -> str:
    generation = GENERATIONS[version]
    sizes = ", ".join(str(generation.counted * math.prod(shape)) for shape in generation.shapes)
    if not generation.max_cubes:
        return sizes
    cube = generation.counted * 64
    return f"{sizes} and the multiples of {cube} up to {cube * generation.max_cubes}"


def _perhaps(name: str) -> str:
    names = [
        f"{shown}-{size}"
        for shown in (*GENERATIONS, *_OTHER_NAMES)
        for size in _shapes(_OTHER_NAMES.get(shown, shown))
    ]
    near = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    return f", such as {' or '.join(near or ['v3-2048'])}"

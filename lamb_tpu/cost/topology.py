"""TPU slices by name, devices to compile for without a TPU, and peak FLOP/s.

Names, shapes, memory and peaks come from `cloud.google.com/tpu/docs/` v2, v3, v4, v5e, v5p, v6e,
tpu7x and types-topologies; the memory and peak of v2 are from
`docs.jax.dev/en/latest/pallas/tpu/hardware`. The number in a name counts chips for v5e and v6e,
cores for all other versions. JAX has one device for each core of v2, v3 and tpu7x, and one for each
chip of the other versions.

Peaks of NVIDIA's GPUs are for dense products in bfloat16 (float16 for V100, which lacks bfloat16).
The sources are `developer.nvidia.com/programming-tensor-cores-cuda-9-0` for V100, and NVIDIA's data
sheets as quoted by `glennklockwood.com/garden/processors/` A100, h100 and B200.
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

from lamb_tpu import environment
from lamb_tpu.cost import slices as slices_lib
from lamb_tpu.cost.slices import GENERATIONS, MAX_CHIPS, MAX_SLICES, OTHER_NAMES, Generation
from lamb_tpu.errors import UserError, listed

_LONGEST = 64  # characters of a name
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
# Full names, because MIG partitions of a GPU and cards with a slower clock have different names.
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
    """One slice, or several slices of the same size."""

    name: str  # the requested name, such as 'v3-2048'
    version: str  # the chip's version, a key of `GENERATIONS`
    shape: tuple[int, ...]  # a slice's shape, in chips
    slices: int = 1  # number of slices; a data-centre network connects them

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
        """For each of the three sides, True if its links wrap around."""
        if self.generation.max_cubes:
            # Slices that consist of cubes of 4 x 4 x 4 chips wrap around along all three sides.
            return (all(side % 4 == 0 for side in self.shape),) * 3
        # The links wrap around only along sides of the maximum length of this generation.
        longest = max(max(shape) for shape in self.generation.shapes)
        return tuple(side == longest for side in (*self.shape, 1)[:3])

    def compiler_options(self) -> dict[str, Any]:
        """Returns arguments of `jax.experimental.topologies.get_topology_desc` for the slice."""
        # A host has four chips; a slice of v5e or v6e with up to eight chips is a single host.
        lite = self.generation.counted == 1 and math.prod(self.shape) <= 8
        host = (*self.shape, 1) if lite else (2, 2, 1)
        options: dict[str, Any] = {
            "topology_name": f"{self.version}:{'x'.join(map(str, self.shape))}",
            "chips_per_host_bounds": host,
            "wrap": self.wrap,
        }
        if self.slices > 1:
            options["num_slices"] = self.slices
        # By default the compiler treats each core of a v4 as a device.
        return options | ({"chip_config_name": "megacore"} if self.version == "v4" else {})


def topology(name: str) -> Topology:
    """Returns the slice of a given name.

    A name such as v4:4x4x8 has a shape in chips in place of a size. All shapes that libtpu knows are
    allowed, up to the size of the generation's largest slice. The prefix 2x means two slices, which a
    data-centre network connects.

    >>> topology("v3-2048")
    Topology(name='v3-2048', version='v3', shape=(32, 32, 1), slices=1)
    >>> topology("v5litepod-16").num_devices
    16
    >>> topology("2xv4:4x4x8").shape
    (4, 4, 8)

    Raises:
      UserError: no slice has the name, or the slices have more chips than any existing system.
    """
    if len(name) > _LONGEST:
        problem = f"has {len(name):,} characters"
        raise UserError("--topology", name, problem, "give a name such as v3-2048")
    # re.ASCII, because int() accepts digits of all scripts.
    found = re.fullmatch(r"(?:(\d+)x)?([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+){1,2}))", name, re.ASCII)
    slices, version, size, sides = found.groups("") if found else ("",) * 4
    version = OTHER_NAMES.get(version, version)
    if version not in GENERATIONS or (slices and not int(slices)):
        # A shape with more than MAX_CHIPS chips could crash libtpu.
        few = sides and math.prod(map(int, sides.split("x"))) <= MAX_CHIPS
        if few and _is_known_to_libtpu(f"{version}:{sides}"):
            problem = "has a TPU generation with unknown memory, peak and links"
            remedy = f"use {listed(GENERATIONS)}, or extend lamb_tpu/cost/slices.py and network.py"
            raise UserError("--topology", name, problem, remedy)
        size = f"a hyphen and the size{_perhaps(name)}"
        remedy = f"use {listed(GENERATIONS)} with {size}, or a colon and a shape, such as v4:4x4x8"
        raise UserError("--topology", name, "is not a slice", remedy)
    shape = _given_shape(name, version, sides) if sides else _sized(name, version, int(size))
    most = min(MAX_SLICES, MAX_CHIPS // math.prod(shape))
    if int(slices or 1) > most:
        raise UserError(
            "--topology",
            name,
            f"has {int(slices):,} slices of {math.prod(shape):,} chips, more than any system has",
            f"use at most {most:,} slices",
        )
    return Topology(name, version, shape, int(slices or 1))


def _given_shape(name: str, version: str, sides: str) -> tuple[int, ...]:
    """Returns the shape after the colon of a name."""
    generation, shape = GENERATIONS[version], tuple(map(int, sides.split("x")))
    wanted = len(generation.shapes[0])
    if len(shape) < wanted:
        shape = (*shape, 1)
    if len(shape) != wanted or min(shape) < 1:
        such = f"{version}:{'x'.join(map(str, generation.shapes[-1]))}"
        problem = "has the wrong number of sides, or a side of 0 chips"
        raise UserError("--topology", name, problem, f"use {wanted} sides, such as {such}")
    largest = max(slices_lib.shapes(version).values(), key=math.prod)
    side = slices_lib.max_side(version)
    # libtpu also describes slices that do not exist, and crashes for a far larger slice.
    if math.prod(shape) > math.prod(largest) or max(shape) > side:
        such = f"{version}:{'x'.join(map(str, largest))}"
        remedy = f"use at most {math.prod(largest):,} chips, such as {such}, and sides up to {side}"
        raise UserError("--topology", name, f"is larger than any slice of {version}", remedy)
    return shape


def _sized(name: str, version: str, count: int) -> tuple[int, ...]:
    """Returns the shape of the slice whose name has the number `count`, of cores or of chips."""
    shapes = slices_lib.shapes(version)
    if count not in shapes:
        near = sorted(sorted(shapes, key=lambda size: abs(size - count))[:2])
        unit = "cores" if GENERATIONS[version].counted == 2 else "chips"
        problem = f"has {count} {unit}, unlike any slice of {version}"
        remedy = f"use {listed(f'{version}-{size}' for size in near)}; sizes: {slices_lib.sizes(version)}"
        raise UserError("--topology", name, problem, remedy)
    return shapes[count]


def devices(slice_: Topology) -> list[jax.Device]:
    """Returns devices for which the real TPU compiler can compile programs without a TPU.

    After this call JAX uses only the CPU and does not look for a TPU.

    Raises:
      UserError: libtpu, which contains the compiler, is not installed, is locked by another
        process, or does not know the slice.
    """
    try:
        return list(_describe(**slice_.compiler_options()).devices)
    # JAX passes on libtpu's status and text, as one of several general exceptions.
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        text = " ".join(str(error).split())
        if re.search("lockfile|already in use|in use by", text):
            raise UserError(
                "another process",
                ...,
                f"holds libtpu ({text})",
                "end that process; if it does not exist, remove the lock file "
                f"{os.path.join(tempfile.gettempdir(), 'libtpu_lockfile')}",
            ) from None
        libtpu = f"libtpu {importlib.metadata.version('libtpu')}"
        problem = (
            f"has the shape {'x'.join(map(str, slice_.shape))}, which {libtpu} rejects ({text})"
        )
        remedy = f"use a size of {slice_.version}: {slices_lib.sizes(slice_.version)}"
        raise UserError("--topology", slice_.name, problem, remedy) from None


def _describe(**options: Any) -> topologies.TopologyDescription:
    """Returns a topology from libtpu, which is loaded with settings that prevent a search for a TPU."""
    # Do not import libtpu here: it reads the variables below only when it is loaded.
    if importlib.util.find_spec("libtpu") is None:
        remedy = "on Linux with x86-64, install it with .venv/bin/pip install -e '.[tpu]'"
        raise UserError("the TPU compiler", ..., "is not installed", remedy)
    # Otherwise creating an array would make JAX look for a TPU.
    jax.config.update("jax_platforms", "cpu")
    with environment.variables(
        # The compiler must not look for a TPU, or ask Google's metadata server about this machine.
        TPU_SKIP_MDS_QUERY="1",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_ACCELERATOR_TYPE="v3-8",
        # No device is used, so several processes may compile at the same time.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        # libtpu would leave log files in a folder that all users share.
        TPU_LOG_DIR="disabled",
    ):
        return topologies.get_topology_desc(platform="tpu", **options)


def _is_known_to_libtpu(name: str) -> bool:
    """Returns whether libtpu has a slice of this name; False without libtpu."""
    try:
        return bool(_describe(topology_name=name).devices)
    except (UserError, jax.errors.JaxRuntimeError, RuntimeError, ValueError):
        return False


def peak_flops(device_kind: str) -> float | None:
    """Returns the peak FLOP/s of one JAX device, by `jax.Device.device_kind`; None if unknown.

    The peak is for matrix products in bfloat16. On TPU v2 and v3 a device is a core.

    >>> peak_flops("TPU v3"), peak_flops("NVIDIA H200"), peak_flops("cpu")
    (61500000000000.0, 989400000000000.0, None)
    """
    version = _TPU_KINDS.get(device_kind)
    return GENERATIONS[version].peak if version else _GPU_PEAKS.get(device_kind)


def tpu_version(device_kind: str) -> str:
    """Returns the version of a TPU by `jax.Device.device_kind`, such as 'v5e' for 'TPU v5 lite'.

    Raises:
      UserError: the device is unknown.
    """
    if device_kind not in _TPU_KINDS:
        remedy = f"use {listed(_TPU_KINDS)}, or add it to _TPU_KINDS in lamb_tpu/cost/topology.py"
        raise UserError(f"the device {device_kind!r}", ..., "is unknown", remedy)
    return _TPU_KINDS[device_kind]


def slice_name(device_kind: str, devices: int) -> str:
    """Returns the name of the slice that has `devices` JAX devices of the type `device_kind`.

    >>> slice_name("TPU v4", 64), slice_name("TPU v3", 32), slice_name("TPU v5 lite", 16)
    ('v4-128', 'v3-32', 'v5e-16')

    Raises:
      UserError: the device is unknown, or no slice has that number of devices.
    """
    version = tpu_version(device_kind)
    generation = GENERATIONS[version]
    count = devices * generation.counted // generation.devices
    shapes = slices_lib.shapes(version)
    if count * generation.devices != devices * generation.counted or count not in shapes:
        raise UserError(
            f"no slice of {version}",
            ...,
            f"has {devices:,} devices ({device_kind})",
            f"give several slices with --topology, such as 2x{version}-{max(1, count // 2)} for two",
        )
    return f"{version}-{count}"


def _perhaps(name: str) -> str:
    names = [
        f"{shown}-{size}"
        for shown in (*GENERATIONS, *OTHER_NAMES)
        for size in slices_lib.shapes(OTHER_NAMES.get(shown, shown))
    ]
    near = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.5)
    return f", such as {' or '.join(near or ['v3-2048'])}"

"""Slices by their names, and what the compiler's library makes of them."""

import doctest
import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import pytest

from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.topology import GENERATIONS, topology
from lamb_tpu.errors import UserError
from tests.shared import ROOT

# From Google's pages on the generations: name, chips along each side, devices that JAX sees.
DOCUMENTED = [
    ("v2-8", (2, 2, 1), 8),
    ("v2-32", (4, 4, 1), 32),
    ("v2-128", (8, 8, 1), 128),
    ("v2-256", (8, 16, 1), 256),
    ("v2-512", (16, 16, 1), 512),
    ("v3-8", (2, 2, 1), 8),
    ("v3-32", (4, 4, 1), 32),
    ("v3-1024", (16, 32, 1), 1024),
    ("v3-2048", (32, 32, 1), 2048),
    ("v4-8", (2, 2, 1), 4),
    ("v4-16", (2, 2, 2), 8),
    ("v4-64", (2, 4, 4), 32),
    ("v4-128", (4, 4, 4), 64),
    ("v4-384", (4, 4, 12), 192),
    ("v4-512", (4, 8, 8), 256),
    ("v4-1024", (8, 8, 8), 512),
    ("v4-4096", (8, 16, 16), 2048),
    ("v5p-8", (2, 2, 1), 4),
    ("v5p-256", (4, 4, 8), 128),
    ("v5p-1024", (8, 8, 8), 512),
    ("v5p-3072", (8, 12, 16), 1536),
    ("v5p-12288", (16, 16, 24), 6144),
    ("v5e-1", (1, 1), 1),
    ("v5litepod-8", (2, 4), 8),
    ("v5litepod-16", (4, 4), 16),
    ("v5e-128", (8, 16), 128),
    ("v5e-256", (16, 16), 256),
    ("v6e-1", (1, 1), 1),
    ("v6e-4", (2, 2), 4),
    ("v6e-256", (16, 16), 256),
    ("tpu7x-8", (2, 2, 1), 8),
    ("tpu7x-128", (4, 4, 4), 128),
    ("tpu7x-2048", (8, 8, 16), 2048),
    # By their shapes, and several.
    ("v4:4x4x8", (4, 4, 8), 128),
    ("v3:16x16", (16, 16, 1), 512),
    ("v5litepod:4x8", (4, 8), 32),
    ("tpu7x:2x2x4", (2, 2, 4), 32),
    ("2xv5e-16", (4, 4), 32),
    ("4xtpu7x:4x4x4", (4, 4, 4), 512),
]


@pytest.mark.parametrize("name, shape, num_devices", DOCUMENTED)
def test_names(name: str, shape: tuple[int, ...], num_devices: int) -> None:
    assert (topology(name).shape, topology(name).num_devices) == (shape, num_devices)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "v3-2000",
            "'v3-2000', and no slice of v3 has 2000 cores; the nearest are v3-1024 and "
            "v3-2048, of 8, 32, 64, 128, 256, 512, 1024, 2048$",
        ),
        ("v3-4096", "the nearest are v3-1024 and v3-2048"),
        ("v5litepod-3", "no slice of v5e has 3 chips; the nearest are v5e-1 and v5e-4"),
        (
            "v5p-1000",
            "the nearest are v5p-896 and v5p-1024, of 8, 16, 32, 64 and the multiples of 128 "
            "up to 12288$",
        ),
        (
            "v4",
            "--topology is 'v4'; it must be one of v2, v3, v4, v5e, v5p, v6e, tpu7x, a hyphen and "
            "the size, such as v4-8 or .*, or a colon and a shape in chips, such as v4:4x4x8$",
        ),
        ("v5e:4x4x4", "'v5e:4x4x4'; a shape of v5e has 2 sides, such as v5e:16x16$"),
        ("v4:0x4x4", "a shape of v4 has 3 sides, such as v4:2x4x4$"),
        ("0xv4-8", "'0xv4-8'; it must be one of "),
        ("V3-8", "'V3-8'; it must be one of .*, such as v3-8 or "),
        ("pod", "'pod'; it must be one of .*, such as "),
        ("v7-8", "'v7-8'; it must be one of "),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        topology(name)


def test_sides_that_go_round() -> None:
    def wrap(name: str) -> object:
        return topology(name).compiler_options()["wrap"]

    assert wrap("v3-2048") == (True, True, False)
    assert wrap("v3-1024") == wrap("v2-256") == wrap("v5e-128") == (False, True, False)
    assert wrap("v3-512") == wrap("v5e-64") == (False, False, False)
    assert wrap("v4-128") == wrap("v5p-256") == (True, True, True)
    assert wrap("v4-64") == (False, False, False)


@pytest.mark.parametrize(
    "version, units, size",
    [
        # Matrix units of a device, and their side.
        ("v2", 1, 128),
        ("v3", 2, 128),
        ("v4", 8, 128),
        ("v5e", 4, 128),
        ("v5p", 8, 128),
        ("v6e", 4, 256),
        ("tpu7x", 4, 256),
    ],
)
def test_clock_and_peak_agree(version: str, units: int, size: int) -> None:
    generation = GENERATIONS[version]
    assert generation.peak == pytest.approx(generation.clock * 2 * units * size**2, rel=0.005)
    assert 0.9 < generation.usable / generation.hbm < 1


@pytest.mark.parametrize(
    "kind, teraflops",
    [
        ("TPU v2", 23),
        ("TPU v3", 61.5),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5e", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU v6e", 918),
        ("TPU7x", 1153.5),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks(kind: str, teraflops: float) -> None:
    assert topology_lib.peak_flops(kind) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "kind", ["cpu", "TPU v4 lite", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""]
)
def test_no_known_peak(kind: str) -> None:
    assert topology_lib.peak_flops(kind) is None
    assert topology_lib.peak_flops(jax.devices()[0].device_kind) is None


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    platforms = jax.config.jax_platforms
    with pytest.raises(UserError, match=r"TPU compiler is not installed; .* install -e '.\[tpu\]'"):
        topology_lib.devices(topology("v3-8"))
    assert jax.config.jax_platforms == platforms


def test_a_slice_that_libtpu_knows_and_the_table_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Described:
        devices = ("a chip",)

    monkeypatch.setattr(topology_lib, "_describe", lambda **options: Described)
    with pytest.raises(
        UserError,
        match=(
            "'v9:2x2x1', which libtpu knows, but lamb_tpu has neither memory nor peak nor links of v9"
        ),
    ):
        topology("v9:2x2x1")


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "Internal error when accessing libtpu multi-process lockfile",
            "another process holds libtpu;"
            " end it, or, if there is none, remove its lock file .*/libtpu_lockfile ",
        ),
        ("The TPU is already in use by process with pid 7", "another process holds libtpu"),
        (
            "Topology layout is not\ndivisible",
            "--topology is 'v4:3x3x3', and libtpu .* refuses a slice "
            r"of v4 of shape 3x3x3; v4 has 8, 16, .* \(Topology layout is not divisible\)",
        ),
    ],
)
def test_what_libtpu_refuses(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    def describe(**options: object) -> None:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(topology_lib, "_describe", describe)
    monkeypatch.setattr(topology_lib.importlib.metadata, "version", lambda name: "0.0")
    with pytest.raises(UserError, match=message):
        topology_lib.devices(topology("v4:3x3x3"))


PROBE = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from lamb_tpu.cost.topology import GENERATIONS, devices, topology

found = {}
for name in sys.argv[1:]:
    all_devices = devices(topology(name))
    x = jax.ShapeDtypeStruct((2**38,), jnp.int8, sharding=SingleDeviceSharding(all_devices[0]))
    try:
        jax.jit(lambda x: x + 1).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        usable = re.search(r"available HBM \\(([0-9.]+)G\\)", str(error))[1]
    hosts = len({device.process_index for device in all_devices})
    found[name] = len(all_devices), hosts, all_devices[0].device_kind, float(usable)
print(json.dumps(found))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here")
def test_the_compiler_knows_them() -> None:
    hosts = {
        "v2-8": 1,
        "v3-2048": 256,
        "v4-128": 16,
        "v4-384": 48,
        "v5e-1": 1,
        "v5e-8": 1,
        "v5e-16": 4,
        "v5p-12288": 1536,
        "v6e-256": 64,
        "tpu7x-128": 16,
        "2xv5e-16": 8,
    }
    # A process of its own: this one simulates 8 devices.
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *hosts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    kinds = {
        "v2": "TPU v2",
        "v3": "TPU v3",
        "v4": "TPU v4",
        "v5e": "TPU v5 lite",
        "v5p": "TPU v5",
        "v6e": "TPU v6 lite",
        "tpu7x": "TPU7x",
    }
    for name, (num_devices, num_hosts, kind, usable) in json.loads(done.stdout).items():
        slice_ = topology(name)
        assert (num_devices, num_hosts) == (slice_.num_devices, hosts[name]), name
        assert kind == kinds[slice_.version]
        assert topology_lib.peak_flops(kind) == slice_.generation.peak
        assert usable == pytest.approx(slice_.generation.usable / 2**30, abs=0.05), name


def test_all_shapes_hold_what_their_names_count() -> None:
    for version, generation in GENERATIONS.items():
        sizes = topology_lib._shapes(version)
        assert len(sizes) == len(generation.shapes) + generation.max_cubes
        for size, shape in sizes.items():
            assert size == generation.counted * math.prod(shape)


def test_docstrings() -> None:
    assert doctest.testmod(topology_lib) == (0, 5)

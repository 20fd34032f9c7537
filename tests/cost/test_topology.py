"""Tests slices by name, and their descriptions by libtpu."""

import importlib.util
import json
import math
import os
import subprocess
import sys

import jax
import pytest

from lamb_tpu.cost import slices
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.cost.topology import GENERATIONS, topology
from tests.raising import rejected
from tests.shared import ROOT

# From Google's pages on the generations: name, chips along each side, number of JAX devices.
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
    # Names with shapes, and several slices.
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
    "name, problem, remedy",
    [
        (
            *("v3-2000", "has 2000 cores, unlike any slice of v3"),
            "use v3-1024 or v3-2048; sizes: 8, 32, 64,",
        ),
        ("v3-4096", "has 4096 cores, unlike any slice of v3", ""),
        ("v5litepod-3", "has 3 chips, unlike any slice of v5e", ""),
        ("v5p-1000", "has 1000 cores, unlike any slice of v5p", ""),
        ("v4", "is not a slice", "use v2, v3, v4, v5e, v5p, v6e or tpu7x"),
        ("v5e:4x4x4", "has the wrong number of sides", ""),
        ("v4:0x4x4", "has the wrong number of sides", ""),
        ("0xv4-8", "is not a slice", ""),
        ("V3-8", "is not a slice", ""),
        ("pod", "is not a slice", ""),
        ("v7-8", "is not a slice", ""),
        ("1000000xv3-8", "has 1,000,000 slices of 4 chips, more than any system has", ""),
        ("65xv3-2048", "has 65 slices of 1,024 chips, more than", ""),
        ("v4:1000x1000x1000", "is larger than any slice of v4", "use at most 4,096 chips, such as"),
        ("v3:64x64", "is larger than any slice of v3", "use at most 1,024 chips, such as"),
        ("v3:16x64", "is larger than any slice of v3", ""),
        ("v5e:1x256", "is larger than any slice of v5e", ""),
        ("v3-" + "9" * 30, "has", ""),
        ("v3-" + "9" * 5000, "has 5,003 characters", "give a name such as v3-2048"),
        ("v3-\N{ARABIC-INDIC DIGIT EIGHT}", "is not a slice", ""),
        ("v9:1000x1000x1000", "is not a slice", ""),  # libtpu would crash
    ],
)
def test_unknown_names(name: str, problem: str, remedy: str) -> None:
    with rejected("--topology", name, problem, remedy):
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
        # Number of matrix units of a device, and the length of their sides.
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
    with rejected("the TPU compiler", ..., "is not installed"):
        topology_lib.devices(topology("v3-8"))
    assert jax.config.jax_platforms == platforms


def test_a_slice_that_libtpu_knows_and_the_table_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Described:
        devices = ("a chip",)

    monkeypatch.setattr(topology_lib, "_describe", lambda **options: Described)
    with rejected("--topology", "v9:2x2x1", "has a TPU generation with unknown memory"):
        topology("v9:2x2x1")


@pytest.mark.parametrize(
    "text, key, problem, remedy",
    [
        (
            *("Internal error when accessing libtpu multi-process lockfile", "another process"),
            *("holds libtpu (Internal error when", "end that process; if it does not exist"),
        ),
        (
            *("The TPU is already in use by process with pid 7", "another process"),
            *("holds libtpu (The TPU is already in use", ""),
        ),
        (
            *("Topology layout is not\ndivisible", "--topology"),
            "has the shape 3x3x3, which libtpu 0.0 rejects (Topology layout is not",
            "use a size of v4: 8, 16, 32, 64 and the",
        ),
    ],
)
def test_slices_that_libtpu_rejects(
    monkeypatch: pytest.MonkeyPatch, text: str, key: str, problem: str, remedy: str
) -> None:
    def describe(**options: object) -> None:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(topology_lib, "_describe", describe)
    monkeypatch.setattr(topology_lib.importlib.metadata, "version", lambda name: "0.0")
    with rejected(key, ... if key == "another process" else "v4:3x3x3", problem, remedy):
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
    # Uses a separate process, because this one simulates 8 devices.
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *hosts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    for name, (num_devices, num_hosts, kind, usable) in json.loads(done.stdout).items():
        slice_ = topology(name)
        assert (num_devices, num_hosts) == (slice_.num_devices, hosts[name]), name
        assert topology_lib.tpu_version(kind) == slice_.version
        assert topology_lib.peak_flops(kind) == slice_.generation.peak
        assert usable == pytest.approx(slice_.generation.usable / 2**30, abs=0.05), name


def test_all_shapes_hold_what_their_names_count() -> None:
    for version, generation in GENERATIONS.items():
        sizes = slices.shapes(version)
        assert len(sizes) == len(generation.shapes) + generation.max_cubes
        for size, shape in sizes.items():
            assert size == generation.counted * math.prod(shape)

"""The real TPU compiler on the step that trains, for slices that nobody here has."""

import doctest
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lamb_tpu import plan as plan_lib
from lamb_tpu.cost import traffic
from lamb_tpu.cost.topology import topology
from lamb_tpu.plan import Memory, Plan
from tests import tiny

DIGITS = "--config=configs/digits.py:batch=1024"
WEIGHTS = (64 * 128, 128 * 64, 64 * 10)  # of its network
PARAMETERS = sum(WEIGHTS) + 128 + 64 + 10
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here"
)


def planned(*arguments: str) -> dict[str, Any]:
    """Runs the command with --json in a process of its own, as this one simulates 8 devices."""
    done = tiny.command("lamb_tpu.plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    [waiting] = done.stderr.splitlines()
    assert waiting.startswith("compiling the training step for ")
    return json.loads(done.stdout)


@needs_compiler
@pytest.mark.parametrize("name, num_devices, hosts", [("v3-8", 8, 1), ("v5e-16", 16, 4)])
def test_the_digits_step(name: str, num_devices: int, hosts: int) -> None:
    found = planned(DIGITS, f"--topology={name}")
    assert (found["topology"], found["devices"], found["hosts"]) == (name, num_devices, hosts)
    assert found["mesh"] == {"data": num_devices}
    assert found["fits"] and found["message"] == "" and found["notes"] == []
    # Forward, and backward twice but for the input's own gradient.
    products = 3 * sum(WEIGHTS) - WEIGHTS[0]
    assert found["flops"] == 2 * (1024 // num_devices) * products
    # The convention has no such exception.
    assert found["model_flops"] == 2 * 1024 * 3 * sum(WEIGHTS) / num_devices
    # One sum of all gradients, beside them those of a few metrics.
    [row] = found["collectives"]
    assert (row["kind"], row["group_size"], row["dtype"]) == ("all-reduce", num_devices, "f32")
    assert 0 <= row["operand_bytes"] - 4 * PARAMETERS < 100
    least = 2 * (num_devices - 1) * row["operand_bytes"] // num_devices
    assert row["sent_bytes"] == row["count"] * least
    # Parameters and two moments, and a device's part of the images; layouts add padding.
    state = 12 * PARAMETERS + 1024 // num_devices * 64
    memory = found["memory_bytes"]
    assert state < memory["arguments"] < 2 * state
    assert memory["aliased"] >= 12 * PARAMETERS
    assert found["needed_bytes"] == memory["peak"] > memory["arguments"]
    assert memory["peak"] < found["usable_bytes"] < found["device_bytes"]
    clock = {"v3-8": 940e6, "v5e-16": 1500e6}[name]
    expected = 1e3 * found["cycles"] / clock
    assert found["milliseconds_without_network"] == pytest.approx(expected)
    peak = {"v3-8": 61.5e12, "v5e-16": 197e12}[name]
    mfu = found["model_flops"] / (expected / 1e3) / peak
    assert 0 < found["mfu_without_network"] == pytest.approx(mfu)


@needs_compiler
def test_a_step_that_does_not_fit() -> None:
    arguments = (DIGITS, "--topology=v5e-4", "--config.model.hidden_sizes=(65536,65536)")
    found = planned(*arguments)
    assert not found["fits"] and found["memory_bytes"] is found["cycles"] is None
    assert found["needed_bytes"] > 3 * 4 * 65536**2 > found["usable_bytes"]
    assert "RESOURCE_EXHAUSTED" in found["message"]
    done = tiny.command("lamb_tpu.plan", *arguments)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[2]
    assert line.startswith("DOES NOT FIT: the step needs ")
    assert line.endswith(" GiB, a device has 15.75 GiB")


@needs_compiler
def test_accumulation_counts_as_often_as_it_runs() -> None:
    arguments = (DIGITS, "--topology=v2-8", "--config.accumulation_steps=4")
    products = 3 * sum(WEIGHTS) - WEIGHTS[0]
    assert planned(*arguments)["flops"] == 2 * (1024 // 8) * products


@needs_compiler
def test_the_program_is_a_tpus() -> None:
    """The sums of LAMB's norms have a form for CPUs alone, with |b| in them: not here."""
    code = (
        "import runpy\n"
        "from lamb_tpu.run.build import prepare\n"
        "from lamb_tpu.cost.topology import devices, topology\n"
        "config = runpy.run_path('configs/digits.py')['get_config']('batch=1024')\n"
        "config.model.hidden_sizes = (4096,)\n"
        "for places in (devices(topology('v3-8')), None):\n"
        "    run = prepare(config, None, places)\n"
        "    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch())\n"
        "    print(step.as_text().count('stablehlo.abs %arg'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tiny.ROOT, capture_output=True, text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    tpu, cpu = map(int, done.stdout.split())
    assert tpu == 0 < cpu


@pytest.mark.parametrize("arguments, message", [
    ((DIGITS, "--topology=v3-9"), "--topology is 'v3-9', and no slice of v3 has 9 cores; the "
                                  "nearest are v3-8 and v3-32"),
    ((DIGITS,), "--topology is missing; see --help"),
    (("--topology=v3-8",), "--config is missing; see --help"),
    (("--config=configs/none.py", "--topology=v3-8"), "'configs/none.py', which does not exist"),
    ((DIGITS, "--topology=v3-8", "--workdir=x"), "workdir"),
])
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    done = tiny.command("lamb_tpu.plan", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


@needs_compiler
def test_a_batch_that_does_not_divide() -> None:
    done = tiny.command("lamb_tpu.plan", "--config=configs/digits.py", "--topology=v3-2048")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: config.batch_size is 32, which does not divide over the 2048 devices of "
        "config.mesh; 2048 would\n"
    )


def test_without_the_compiler() -> None:
    code = (
        "import runpy, sys; sys.modules['libtpu'] = None; "
        "sys.argv = ['plan', *sys.argv[1:]]; "
        "runpy.run_module('lamb_tpu.plan', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, DIGITS, "--topology=v3-8"],
        cwd=tiny.ROOT, capture_output=True, text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: the TPU compiler is not installed; it is a library for Linux on x86-64 that comes "
        "with the extra tpu: .venv/bin/pip install -e '.[tpu]'\n"
    )


def plan(**changes: Any) -> Plan:
    values = {
        "topology": topology("v3-2048"), "mesh": {"data": 64, "fsdp": 32}, "hosts": 256,
        "batch_size": 65536, "backend": "shard_map", "compile_seconds": 63.2, "fits": True,
        "needed": 5 * 2**30,
        "memory": Memory(2**30, 2**30, 2**30, 4 * 2**30, 2**20, 5 * 2**30),
        "flops": 2_890_500_000_000, "model_flops": 2_460_000_000_000, "cycles": 94_000_000,
        "collectives": (traffic.Row("all-reduce", 2048, "bf16", 7, 2**29, 2**29, 2**30),),
    }
    return Plan(**values | changes)


@needs_compiler
def test_what_the_terminal_shows() -> None:
    lines = plan().describe().splitlines()
    assert lines[:2] == [
        "v3-2048: 2,048 devices on 256 host(s), mesh data=64, fsdp=32, collectives by",
        "    shard_map",
    ]
    assert lines[2].startswith("step: a batch of 65,536, compiled in 63 s by libtpu ")
    assert lines[3:] == [
        "fits: the step needs 5 GiB, a device has 15.48 GiB",
        "memory: arguments 1 GiB, outputs 1 GiB, aliased 1 GiB, temporaries 4 GiB,",
        "    program 1 MiB, peak 5 GiB",
        "time: 100 ms without the network, by the compiler's estimate (94,000,000 cycles",
        "    at 940 MHz)",
        "arithmetic: 2.89e+12 operations of matrix products, 47.0% of the bfloat16 peak",
        "    in that time",
        "model FLOPs: 2.46e+12 of a device, MFU 40.0% without the network",
        "collectives, of one device in one step:",
        "  kind        among  dtype  count  puts in  gets out  sends at least",
        "  all-reduce  2,048  bf16       7  512 MiB   512 MiB           1 GiB",
    ]
    unknown = plan(cycles=None, flops=None, collectives=None, notes=("the loop %w does not tell",))
    assert unknown.describe().splitlines()[6:] == [
        "model FLOPs: 2.46e+12 of a device", "not known: the loop %w does not tell",
    ]
    assert unknown.as_json()["milliseconds_without_network"] is None


def test_help_teaches() -> None:
    done = tiny.command("lamb_tpu.plan", "--help")
    assert done.returncode == 0
    for part in (
        "python -m lamb_tpu.plan --config=configs/", "leaves out the network",
        "--topology: The slice", "v5litepod", "--[no]json",
    ):
        assert part in tiny.unbroken(done.stdout), part


def test_docstrings() -> None:
    assert doctest.testmod(plan_lib) == (0, 3)

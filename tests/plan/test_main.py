"""The real TPU compiler on the step that trains, for slices that nobody here has."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from lamb_tpu.cost.calibrated import CALIBRATED
from tests import tiny

DIGITS = "--config=configs/digits.py:batch=1024"
WEIGHTS = (64 * 128, 128 * 64, 64 * 10)  # of its network
PARAMETERS = sum(WEIGHTS) + 128 + 64 + 10
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here"
)


def planned(*arguments: str) -> dict[str, Any]:
    """Runs the command with --json in a process of its own, as this one simulates 8 devices."""
    done = tiny.command("lamb_tpu.plan", *arguments, "--json", "--cache=none")
    assert done.returncode == 0, done.stderr
    [waiting] = done.stderr.splitlines()
    assert waiting.startswith("compiling the training step for ")
    return json.loads(done.stdout)


@pytest.mark.long
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
    # The network waits once, along both axes of the torus; there is no run to compare with.
    assert (
        row["route"]
        == {"v3-8": "x line of 2, y line of 2", "v5e-16": "x line of 4, y line of 4"}[name]
    )
    low, middle, high = found["network_exposed_milliseconds"]
    assert 0 < low < middle < high and "published runs" in found["calibrated_by"]
    assert [row["milliseconds"], row["exposed_milliseconds"]] == pytest.approx([middle] * 2)
    calibration = CALIBRATED.for_generation(name.partition("-")[0])
    factors = [each.compute_factor for each in calibration.each]
    assert found["step_milliseconds"] == pytest.approx(
        [
            expected * factor + each
            for factor, each in zip(factors, (low, middle, high), strict=True)
        ]
    )
    # 30 epochs of 1,437 scans; after each an evaluation of 360, padded to the devices.
    run = found["run"]
    assert (run["updates"], run["evaluations"]) == (43, 30)
    assert run["compute_seconds"] == pytest.approx([43 * expected * each / 1e3 for each in factors])
    assert run["network_seconds"] == pytest.approx(
        [43 * each / 1e3 for each in (low, middle, high)]
    )
    expected *= factors[1]
    forward = 30 * -(-360 // num_devices) * num_devices * expected / 1e3 / 3 / 1024
    assert run["evaluation_seconds"] == pytest.approx(forward)
    hours = (43 * (expected + middle) / 1e3 + forward) / 3600
    assert run["chip_hours"] == pytest.approx(hours * found["chips"])


@pytest.mark.long
@needs_compiler
def test_hosts_with_ethernet(tmp_path: pathlib.Path) -> None:
    """One program, between hosts with the torus and with 10 Gb/s."""
    cache = f"--cache={tmp_path}"
    arguments = ("lamb_tpu.plan", DIGITS, "--topology=v3-32", cache, "--json")
    torus, slow = (
        json.loads(tiny.command(*arguments, *more).stdout) for more in ((), ("--network-gbps=10",))
    )
    assert torus["network_gbps"] is None and slow["network_gbps"] == 10
    assert torus["sent_bytes"] == slow["sent_bytes"]
    [row] = slow["collectives"]
    assert slow["sent_bytes"]["f32"] == row["sent_bytes"]
    assert row["route"] == "x line of 2, y line of 2, 4 hosts"
    # Four hosts send three quarters of the gradient twice, in four steps between hosts.
    assert slow["host_link_bytes"] == pytest.approx(1.5 * row["operand_bytes"])
    middle = CALIBRATED.for_generation("v3").each.middle
    between = 1.5 * row["operand_bytes"] / 1.25e9 / middle.datacenter_efficiency
    between += 4 * middle.datacenter_seconds
    assert between < slow["network_milliseconds"][1] / 1e3 < 1.2 * between
    assert slow["limited_by"] == "network between hosts"
    assert slow["compute_milliseconds"] == torus["compute_milliseconds"]
    # Other answers take the option too.
    done = tiny.command(
        "lamb_tpu.plan", DIGITS, "--topologies=v3-32", cache, "--json", "--network-gbps=10"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (
        answer["validation"]
        == slow["validation"]
        == json.loads(json.dumps(CALIBRATED.validation._asdict()))
    )
    [point] = answer["points"]
    assert point["phases"][0]["step_milliseconds"] == pytest.approx(slow["step_milliseconds"])


@pytest.mark.long
@needs_compiler
def test_a_step_that_does_not_fit() -> None:
    arguments = (DIGITS, "--topology=v5e-4", "--config.model.hidden_sizes=(65536,65536)")
    found = planned(*arguments)
    assert not found["fits"] and found["memory_bytes"] is found["cycles"] is None
    assert found["needed_bytes"] > 3 * 4 * 65536**2 > found["usable_bytes"]
    assert "RESOURCE_EXHAUSTED" in found["message"]
    done = tiny.command("lamb_tpu.plan", *arguments, "--cache=none")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("DOES NOT FIT: the step needs ")
    assert line.endswith(" GiB, a device has 15.75 GiB")


@pytest.mark.long
@needs_compiler
def test_the_same_plan_again(tmp_path: pathlib.Path) -> None:
    """The second takes the program that the first has kept, and gives the same numbers."""
    arguments = (
        "lamb_tpu.plan",
        DIGITS,
        "--topology=v3-8",
        f"--cache={tmp_path / 'kept'}",
        "--json",
        f"--html={tmp_path / 'plan.html'}",
    )
    first, second = tiny.command(*arguments), tiny.command(*arguments)
    assert first.stderr.startswith("compiling the training step for 8 devices")
    assert second.returncode == 0 and second.stderr == ""
    assert first.stdout == second.stdout
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 3 and "x line of 2, y line of 2" in page
    assert re.search(r"lamb_tpu/\w+/\w+\.py:\d+", page)
    # A smaller batch learns of this one.
    smaller = tiny.command("lamb_tpu.plan", "--config=configs/digits.py:batch=512", *arguments[2:4])
    assert smaller.returncode == 0
    assert tiny.unbroken(smaller.stdout).rstrip().endswith("; the next batch that fits: 1,024")


@needs_compiler
@pytest.mark.long
def test_the_largest_batch(tmp_path: pathlib.Path) -> None:
    """The second search takes what the first has compiled, and says the same."""
    arguments = (
        "lamb_tpu.plan",
        "--config=configs/digits.py:batch=524288",
        "--topology=v5e-4",
        "--config.duration=9 steps",
        "--config.model.hidden_sizes=(16384,16384)",
        "--find=batch",
        f"--cache={tmp_path}",
        "--json",
    )
    first, second = tiny.command(*arguments), tiny.command(*arguments)
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout and second.stderr == ""
    assert first.stderr.splitlines()[:2] == [
        "compiling batch 524,288 (1 of at most 20)",
        "compiling batch 262,144 (2 of at most 20)",
    ]
    found = json.loads(first.stdout)
    largest = found["batch_size"]
    assert 262_144 <= largest < 524_288
    for trial in found["trials"]:
        assert trial["fits"] == (trial["batch_size"] <= largest)
        assert trial["fits"] == (trial["share_of_memory"] < 1)


@pytest.mark.long
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
        [sys.executable, "-c", code],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stderr
    tpu, cpu = map(int, done.stdout.split())
    assert tpu == 0 < cpu


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            (DIGITS, "--topology=v3-9"),
            "--topology is 'v3-9', and no slice of v3 has 9 cores; the nearest are v3-8 and v3-32",
        ),
        ((DIGITS,), "--topology is missing; see --help"),
        (("--topology=v3-8",), "--config is missing; see --help"),
        (
            ("--config=configs/none.py", "--topology=v3-8"),
            "'configs/none.py', which does not exist",
        ),
        ((DIGITS, "--topology=v3-8", "--workdir=x"), "workdir"),
        (
            (DIGITS, "--topology=v3-8", "--html=plan.txt"),
            "--html plan.txt must be a .html file in a folder that exists",
        ),
        (
            (DIGITS, "--topology=v3-8", "--cache=README.md"),
            "--cache is 'README.md', which is no folder; give one, or 'none'",
        ),
    ],
)
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


@pytest.mark.long
def test_without_the_compiler() -> None:
    code = (
        "import runpy, sys; sys.modules['libtpu'] = None; "
        "sys.argv = ['plan', *sys.argv[1:]]; "
        "runpy.run_module('lamb_tpu.plan', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, DIGITS, "--topology=v3-8"],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: the TPU compiler is not installed; it is a library for Linux on x86-64 that comes "
        "with the extra tpu: .venv/bin/pip install -e '.[tpu]'\n"
    )


def test_a_crash_of_the_compiler() -> None:
    code = (
        "import os, runpy, sys, types; "
        "making = types.SimpleNamespace(loader=None, make_plan=lambda *_: os.abort(), "
        "release=None); "
        "sys.modules['lamb_tpu.plan.making'] = making; sys.argv = ['plan', *sys.argv[1:]]; "
        "runpy.run_module('lamb_tpu.plan', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, DIGITS, "--topology=v3-8", "--cache=none"],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the TPU compiler crashed (SIGABRT); change the mesh, ")


def test_help_teaches() -> None:
    done = tiny.command("lamb_tpu.plan", "--help")
    assert done.returncode == 0
    for part in (
        "python -m lamb_tpu.plan --config=configs/",
        "experiments/plan/calibration.md",
        "--topology: The slice",
        "v5litepod",
        "--[no]json",
        "--html",
        "--cache",
        "--examples",
        "--find",
        "--batches",
        "--price-per-device-hour",
        "--topologies",
        "--measured",
    ):
        assert part in tiny.unbroken(done.stdout), part

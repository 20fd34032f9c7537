"""The plan command, with the real TPU compiler and the real training step."""

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from lamb_tpu.cost.calibrated import CALIBRATED
from tests import tiny
from tests.plan.planned import needs_compiler

DIGITS = "--config=configs/digits.py:batch=1024"
WEIGHTS = (64 * 128, 128 * 64, 64 * 10)  # sizes of the weight matrices
PARAMETERS = sum(WEIGHTS) + 128 + 64 + 10


def planned(*arguments: str) -> dict[str, Any]:
    """Runs the command with --json in a new process, because the test's process simulates 8 devices."""
    done = tiny.command("lamb_tpu.plan", *arguments, "--json", "--cache=none")
    assert done.returncode == 0, done.stderr
    [waiting] = done.stderr.splitlines()
    assert waiting.startswith("compiling the training step for ")
    return json.loads(done.stdout)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("name, num_devices, hosts", [("v3-8", 8, 1), ("v5e-16", 16, 4)])
def test_the_digits_step(name: str, num_devices: int, hosts: int) -> None:
    actual = planned(DIGITS, f"--topology={name}")
    assert (actual["topology"], actual["devices"], actual["hosts"]) == (name, num_devices, hosts)
    assert actual["mesh"] == {"data": num_devices}
    assert actual["fits"] and actual["message"] == "" and actual["notes"] == []
    # One forward and two backward products per weight matrix, but no gradient of the input.
    products = 3 * sum(WEIGHTS) - WEIGHTS[0]
    assert actual["flops"] == 2 * (1024 // num_devices) * products
    # Model FLOPs count the gradient of the input too.
    assert actual["model_flops"] == 2 * 1024 * 3 * sum(WEIGHTS) / num_devices
    # One all-reduce of all gradients and a few metrics.
    [row] = actual["collectives"]
    assert (row["kind"], row["group_size"], row["dtype"]) == ("all-reduce", num_devices, "f32")
    assert 0 <= row["operand_bytes"] - 4 * PARAMETERS < 100
    least = 2 * (num_devices - 1) * row["operand_bytes"] // num_devices
    assert row["sent_bytes"] == row["count"] * least
    # Parameters, two moments and a device's shard of the images; layouts add padding.
    state = 12 * PARAMETERS + 1024 // num_devices * 64
    memory = actual["memory_bytes"]
    assert state < memory["arguments"] < 2 * state
    assert memory["aliased"] >= 12 * PARAMETERS
    assert actual["needed_bytes"] == memory["peak"] > memory["arguments"]
    assert memory["peak"] < actual["usable_bytes"] < actual["device_bytes"]
    clock = {"v3-8": 940e6, "v5e-16": 1500e6}[name]
    expected = 1e3 * actual["cycles"] / clock
    assert actual["milliseconds_without_network"] == pytest.approx(expected)
    peak = {"v3-8": 61.5e12, "v5e-16": 197e12}[name]
    mfu = actual["model_flops"] / (expected / 1e3) / peak
    assert 0 < actual["mfu_without_network"] == pytest.approx(mfu)
    # One exposed all-reduce along both axes of the torus.
    assert (
        row["route"]
        == {"v3-8": "x line of 2, y line of 2", "v5e-16": "x line of 4, y line of 4"}[name]
    )
    low, middle, high = actual["network_exposed_milliseconds"]
    assert 0 < low < middle < high and "published runs" in actual["calibrated_by"]
    assert [row["milliseconds"], row["exposed_milliseconds"]] == pytest.approx([middle] * 2)
    calibration = CALIBRATED.for_generation(name.partition("-")[0])
    factors = [each.compute_factor for each in calibration.each]
    assert actual["step_milliseconds"] == pytest.approx(
        [
            expected * factor + each
            for factor, each in zip(factors, (low, middle, high), strict=True)
        ]
    )
    # 30 epochs of 1,437 images, each followed by an evaluation of 360 images, padded to the devices.
    run = actual["run"]
    assert (run["updates"], run["evaluations"]) == (43, 30)
    assert run["compute_seconds"] == pytest.approx([43 * expected * each / 1e3 for each in factors])
    assert run["network_seconds"] == pytest.approx(
        [43 * each / 1e3 for each in (low, middle, high)]
    )
    expected *= factors[1]
    forward = 30 * -(-360 // num_devices) * num_devices * expected / 1e3 / 3 / 1024
    assert run["evaluation_seconds"] == pytest.approx(forward)
    hours = (43 * (expected + middle) / 1e3 + forward) / 3600
    assert run["chip_hours"] == pytest.approx(hours * actual["chips"])


@pytest.mark.long
@needs_compiler
def test_hosts_with_ethernet(tmp_path: pathlib.Path) -> None:
    """Plans one program twice: with the slice's network, and with links of 10 Gb/s between hosts."""
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
    # Each of four hosts sends 3/4 of the gradient twice, in four steps between hosts.
    assert slow["host_link_bytes"] == pytest.approx(1.5 * row["operand_bytes"])
    middle = CALIBRATED.for_generation("v3").each.middle
    between = 1.5 * row["operand_bytes"] / 1.25e9 / middle.datacenter_efficiency
    between += 4 * middle.datacenter_seconds
    assert between < slow["network_milliseconds"][1] / 1e3 < 1.2 * between
    assert slow["limited_by"] == "network between hosts"
    assert slow["compute_milliseconds"] == torus["compute_milliseconds"]
    # --network-gbps works with --topologies too.
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
    actual = planned(*arguments)
    assert not actual["fits"] and actual["memory_bytes"] is actual["cycles"] is None
    assert actual["needed_bytes"] > 3 * 4 * 65536**2 > actual["usable_bytes"]
    assert "RESOURCE_EXHAUSTED" in actual["message"]
    done = tiny.command("lamb_tpu.plan", *arguments, "--cache=none")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("DOES NOT FIT: the step needs ")
    assert line.endswith(" GiB, a device has 15.75 GiB")


@pytest.mark.long
@needs_compiler
def test_the_same_plan_again(tmp_path: pathlib.Path) -> None:
    """The second plan loads the cached program and has the same numbers."""
    arguments = (
        "lamb_tpu.plan",
        DIGITS,
        "--topology=v3-8",
        f"--cache={tmp_path / 'cache'}",
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
    # The plan of a smaller batch names the larger batch.
    smaller = tiny.command("lamb_tpu.plan", "--config=configs/digits.py:batch=512", *arguments[2:4])
    assert smaller.returncode == 0
    assert (
        tiny.unbroken(smaller.stdout).rstrip().endswith("; the next larger batch that fits: 1,024")
    )


@needs_compiler
@pytest.mark.long
def test_the_largest_batch(tmp_path: pathlib.Path) -> None:
    """The second search loads the cached programs of the first search and gives the same answer."""
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
    actual = json.loads(first.stdout)
    largest = actual["batch_size"]
    assert 262_144 <= largest < 524_288
    for trial in actual["trials"]:
        assert trial["fits"] == (trial["batch_size"] <= largest)
        assert trial["fits"] == (trial["share_of_memory"] < 1)


@pytest.mark.long
@needs_compiler
def test_flops_count_every_microbatch() -> None:
    arguments = (DIGITS, "--topology=v2-8", "--config.accumulation_steps=4")
    products = 3 * sum(WEIGHTS) - WEIGHTS[0]
    assert planned(*arguments)["flops"] == 2 * (1024 // 8) * products


@needs_compiler
def test_the_program_is_for_a_tpu() -> None:
    """Only the CPU form of LAMB's norms contains an absolute value; a plan must use the TPU form."""
    code = (
        "import runpy\n"
        "from lamb_tpu.run.build import prepare\n"
        "from lamb_tpu.cost.topology import devices, topology\n"
        "config = runpy.run_path('configs/digits.py')['get_config']('batch=1024')\n"
        "config.model.hidden_sizes = (4096,)\n"
        "for devices_or_none in (devices(topology('v3-8')), None):\n"
        "    run = prepare(config, None, devices_or_none)\n"
        "    step = run.make_train_step().lower(run.abstract_state, run.abstract_batch())\n"
        "    print(step.as_text().count('stablehlo.abs %arg'))\n"
    )
    done = tiny.python(code)
    assert done.returncode == 0, done.stderr
    tpu, cpu = map(int, done.stdout.split())
    assert tpu == 0 < cpu


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            (DIGITS, "--topology=v3-9"),
            "--topology='v3-9' has 9 cores, unlike any slice of v3; use v3-8 or v3-32",
        ),
        ((DIGITS,), "--topology is missing; see --help"),
        (("--topology=v3-8",), "--config is missing; see --help"),
        (("--config=configs/none.py", "--topology=v3-8"), "configs/none.py' does not exist"),
        ((DIGITS, "--topology=v3-8", "--workdir=x"), "workdir"),
        (
            (DIGITS, "--topology=v3-8", "--html=plan.txt"),
            "--html='plan.txt' is not a .html file in an existing folder",
        ),
        ((DIGITS, "--topology=v3-8", "--cache=gs://b/plans"), "--cache gs://b/plans is remote; gi"),
        ((DIGITS, "--topology=v3-8", "--html=gs://b/a.html"), "--html gs://b/a.html is remote; gi"),
    ],
)
def test_errors(arguments: tuple[str, ...], message: str) -> None:
    done = tiny.command("lamb_tpu.plan", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


@needs_compiler
def test_a_batch_that_does_not_divide() -> None:
    done = tiny.command("lamb_tpu.plan", "--config=configs/digits.py", "--topology=v3-2048")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: config.batch_size=32 is not divisible by the 2048 devices of "
        "config.mesh; use 2048\n"
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
        "error: the TPU compiler is not installed; on Linux with x86-64, install it with "
        ".venv/bin/pip install -e '.[tpu]'\n"
    )


# The command with a stub in place of the compiler; {} is the code that the stub runs.
STUBBED = """
import os, pathlib, runpy, shutil, sys, types
def make_plan(*_, **__):
    from tests.plan.test_report import plan
    print("compiling", file=sys.stderr)
    {}
    return plan()
sys.modules["lamb_tpu.plan.making"] = types.SimpleNamespace(
    loader=None, make_plan=make_plan, release=None)
sys.argv = ["plan", *sys.argv[1:]]
runpy.run_module("lamb_tpu.plan", run_name="__main__", alter_sys=True)
"""


def stubbed(*arguments: str, meanwhile: str = "pass") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STUBBED.format(meanwhile), DIGITS, "--topology=v3-8", *arguments],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_crash_of_the_compiler() -> None:
    done = stubbed("--cache=none", meanwhile="os.abort()")
    assert done.returncode == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: the TPU compiler crashed (SIGABRT); change the mesh, ")


def test_a_cache_that_cannot_be_written_loses_no_plan(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    done = stubbed(f"--cache={tmp_path}/file/below")
    assert done.returncode == 0 and done.stdout.startswith("v3-2048: ")
    warning, compiling = done.stderr.splitlines()
    assert compiling == "compiling"
    assert warning == (
        f"warning: --cache {tmp_path}/file/below cannot be written (Not a directory); give "
        "another path, or 'none'; the plan continues without storing programs"
    )


def test_a_page_that_cannot_be_written_at_the_end(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    done = stubbed(
        "--cache=none", f"--html={folder}/a.html", meanwhile=f"shutil.rmtree({str(folder)!r})"
    )
    assert done.returncode == 2 and done.stdout.startswith("v3-2048: ")
    assert done.stderr.splitlines()[-1] == (
        f"error: --html {folder}/a.html cannot be written (No such file or directory); give another path"
    )


def test_help() -> None:
    done = tiny.command("lamb_tpu.plan", "--help")
    assert done.returncode == 0
    for part in (
        "python -m lamb_tpu.plan --config=configs/",
        "experiments/plan/calibration.md",
        "--topology: The slice",
        "v5litepod",
        "v3-SIZE, in cores: 8, 32, 64, 128,",
        "v5e-SIZE, in chips: 1, 4,",
        "multiples of 128 up to 18432",
        "at most 511 slices and 65,536 chips",
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

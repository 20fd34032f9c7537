"""Simulated devices of a CPU, and runs on them."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from lamb_tpu.cluster import cpu_devices
from tests import tiny
from tests.raising import rejected


def test_two_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    with rejected("--cpu-devices", 2, "conflicts with XLA_FLAGS", "set only one of the two"):
        cpu_devices.make(2)


@pytest.mark.parametrize(
    "count, given, threads", [(1, None, None), (2, None, "32"), (16, None, "64"), (2, "5", "5")]
)
def test_threads_are_enough(
    count: int, given: str | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records the change of JAX's setting without making it: this process already has its devices."""
    made: dict[str, int] = {}
    monkeypatch.setattr(jax.config, "update", made.__setitem__)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("NPROC", given or "")
    if given is None:
        monkeypatch.delenv("NPROC")
    cpu_devices.make(count)
    assert made == {"jax_num_cpu_devices": count} and os.environ.get("NPROC") == threads


def test_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(cpu_devices, "make", made.append)
    cpu_devices.ensure(8)  # the number of devices that this process already has
    cpu_devices.ensure(4)
    assert made == [4]


def run(*arguments: str) -> subprocess.CompletedProcess:
    """Runs a command in an environment that does not set the number of devices."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS")
    }
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tiny.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.long
def test_a_run_goes_on_with_other_devices(tmp_path: pathlib.Path) -> None:
    train = (
        "lamb_tpu.train",
        "--config=configs/digits.py:smoke",
        f"--workdir={tmp_path}",
        "--config.duration=2 steps",
        "--config.log.tensorboard=false",
    )
    first = run(*train, "--cpu-devices=2")
    assert "mesh: data=2 over 2 cpu device(s)" in first.stdout, first.stderr
    again = run(*train)
    assert "mesh: data=1 over 1 cpu device(s)" in again.stdout, again.stderr
    assert "resumed from the checkpoint of update 2" in again.stdout
    evaluated = [
        run("lamb_tpu.evaluate", f"--workdir={tmp_path}", f"--cpu-devices={count}")
        for count in (1, 2)
    ]
    one, two = (json.loads(done.stdout) for done in evaluated)
    assert one == pytest.approx(two, rel=1e-5) and one["step"] == 2
    wrong = run(*train, "--cpu-devices=many")
    assert wrong.returncode == 2 and "--cpu-devices=many" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1

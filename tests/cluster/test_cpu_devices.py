"""Devices of a CPU: the flag's value, and what the environment says besides."""

import os

import jax
import pytest

from lamb_tpu.cluster import cpu_devices
from lamb_tpu.errors import UserError


@pytest.mark.parametrize("text, count", [("auto", None), ("1", 1), ("12", 12)])
def test_values(text: str, count: int | None) -> None:
    assert cpu_devices.parse(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "2.0", "two", ""])
def test_wrong_values(text: str) -> None:
    with pytest.raises(UserError, match=f"--cpu_devices is '{text}'; it must be 'auto' or a whole"):
        cpu_devices.parse(text)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not cpu_devices.is_set_elsewhere()
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert cpu_devices.is_set_elsewhere()
    with pytest.raises(UserError, match="--cpu_devices is 2, and XLA_FLAGS='--xla_force_host_"):
        cpu_devices.make(2)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    assert cpu_devices.is_set_elsewhere()


@pytest.mark.parametrize("count, given, threads", [(1, None, None), (2, None, "32"),
                                                   (16, None, "64"), (2, "5", "5")])
def test_threads_are_enough(
    count: int, given: str | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before JAX has made its devices, which in this process it has."""
    made: dict[str, int] = {}
    monkeypatch.setattr(jax.config, "update", made.__setitem__)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("NPROC", given or "")
    if given is None:
        monkeypatch.delenv("NPROC")
    cpu_devices.make(count)
    assert made == {"jax_num_cpu_devices": count} and os.environ.get("NPROC") == threads

"""Simulated devices on a CPU, to try out programs for many devices."""

import os

import jax
from absl import flags

from lamb_tpu.errors import UserError

# XLA's CPU runtime starts NPROC threads. If more programs than threads are in progress on all devices
# together, an all-reduce can deadlock.
_THREADS = 32
_FORCED = "xla_force_host_platform_device_count"


def make_from_flags() -> None:
    """Calls `make` with the value of --cpu-devices; without this flag, keeps JAX's number of devices."""
    if flags.FLAGS.cpu_devices is not None:
        make(flags.FLAGS.cpu_devices)


def ensure(count: int) -> None:
    """Simulates `count` devices, unless JAX is already set to this number; see `make`."""
    if count != jax.config.jax_num_cpu_devices:  # type: ignore[attr-defined]
        make(count)


def make(count: int) -> None:
    """Simulates `count` devices on the CPU; call before anything uses JAX's devices."""
    given = os.environ.get("XLA_FLAGS", "")
    if _FORCED in given:
        problem = f"conflicts with XLA_FLAGS={given!r}, which also sets the number of devices"
        raise UserError("--cpu-devices", count, problem, "set only one of the two")
    if count > 1:
        os.environ.setdefault("NPROC", str(max(_THREADS, 4 * count)))
    jax.config.update("jax_num_cpu_devices", count)

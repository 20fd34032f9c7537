"""Devices of a CPU: one a core, because XLA does much of a step with one thread a device."""

import os

import jax

from lamb_tpu.cluster.host import num_cores
from lamb_tpu.errors import UserError

AUTO = "auto"
# The runtime starts as many threads as NPROC says. With fewer threads than the programs that are
# under way on all devices, the all-reduce of a step can wait for ever.
_THREADS = 32
_FORCED = "xla_force_host_platform_device_count"


def is_set_elsewhere() -> bool:
    """Returns whether the environment says how many devices the CPU has."""
    return "JAX_NUM_CPU_DEVICES" in os.environ or _FORCED in os.environ.get("XLA_FLAGS", "")


def parse(text: str) -> int | None:
    """Returns the number that --cpu_devices gives; None for 'auto'.

    Raises:
      UserError: it is neither 'auto' nor a whole number of at least 1.
    """
    if text == AUTO:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"--cpu_devices is {text!r}; it must be 'auto' or a whole number of at least 1, such "
            f"as {num_cores()}, the number of cores"
        )
    return int(text)


def make(count: int) -> None:
    """Makes `count` devices of the CPU; call before anything asks JAX for a device.

    Raises:
      UserError: XLA_FLAGS has a number too.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FORCED in flags:
        raise UserError(
            f"--cpu_devices is {count}, and XLA_FLAGS={flags!r} has a number too; leave one out"
        )
    if count > 1:
        os.environ.setdefault("NPROC", str(max(_THREADS, 4 * count)))
    jax.config.update("jax_num_cpu_devices", count)

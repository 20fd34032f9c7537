"""Several devices of one CPU, to try out what a program does on many."""

import os

import jax
from absl import flags

from lamb_tpu.errors import UserError

# The runtime starts as many threads as NPROC says. With fewer threads than the programs that are
# under way on all devices, the all-reduce of a step can wait for ever.
_THREADS = 32
_FORCED = "xla_force_host_platform_device_count"


def make_from_flags() -> None:
    """Makes the devices that --cpu_devices asks for; call before anything asks JAX for a device.

    Without the flag the CPU is one device, or as many as JAX_NUM_CPU_DEVICES says.
    """
    if flags.FLAGS.cpu_devices is not None:
        make(flags.FLAGS.cpu_devices)


def ensure(count: int) -> None:
    """Makes `count` devices of the CPU, unless an earlier call has; see `make`."""
    if count != jax.config.jax_num_cpu_devices:  # type: ignore[attr-defined]
        make(count)


def make(count: int) -> None:
    """Makes `count` devices of the CPU; call before anything asks JAX for a device.

    Raises:
      UserError: XLA_FLAGS has a number too.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if _FORCED in given:
        raise UserError(
            f"--cpu_devices is {count}, and XLA_FLAGS={given!r} has a number too; leave one out"
        )
    if count > 1:
        os.environ.setdefault("NPROC", str(max(_THREADS, 4 * count)))
    jax.config.update("jax_num_cpu_devices", count)

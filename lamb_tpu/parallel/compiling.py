"""Options of the compiler for the programs of a run."""

import functools

import jax
from jax.sharding import Mesh, SingleDeviceSharding

# XLA's CPU compiler hands products, sums and convolutions to the library YNNPACK, which computes a
# convolution with one thread. Without it Eigen does, with every core. The option lists what stays.
_OPTIONS_OF_CPU = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Returns the argument `compiler_options` of `jax.jit` for programs over this mesh.

    It is None for devices other than CPUs, and where this version of XLA has no such option.
    """
    device = mesh.devices.flat[0]
    return dict(_OPTIONS_OF_CPU) if device.platform == "cpu" and _are_known(device) else None


@functools.cache
def _are_known(device: jax.Device) -> bool:
    trivial = jax.jit(
        lambda: 0, out_shardings=SingleDeviceSharding(device), compiler_options=_OPTIONS_OF_CPU
    )
    try:
        trivial.lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True

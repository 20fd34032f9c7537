"""Options of XLA's compiler for the programs of a run."""

import functools

import jax
from jax.sharding import Mesh, SingleDeviceSharding

# By default, XLA's CPU compiler hands products, sums and convolutions to the library YNNPACK, which
# computes a convolution with one thread; Eigen uses all CPU cores. The option lists the operations
# that YNNPACK may still compute: products and sums.
_OPTIONS_OF_CPU = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
}


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Returns the argument `compiler_options` of `jax.jit` for programs over a mesh.

    Returns None for devices other than CPUs, or if this version of XLA lacks the option.
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

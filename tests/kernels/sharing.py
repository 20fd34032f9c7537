"""A check of the gradient of a kernel that two devices share under shard_map."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def check_shared_kernel(
    slopes: Callable[[bool, Any, Any], Any], x: Any, kernel: Any, check_vma: bool, atol: float
) -> None:
    """Compares our gradients of the rows and the kernel with JAX's gradients, on two devices.

    The gradient of the kernel is summed over devices under check_vma; otherwise each device has a
    separate gradient. `slopes(ours, x, kernel)` returns the gradients of both arguments, by our
    function if `ours`, else by JAX's.
    """

    def run(ours: bool) -> Any:
        def part(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_x, of_kernel = slopes(ours, x, kernel)
            return of_x, of_kernel[None]

        mapped = jax.shard_map(
            part,
            mesh=Mesh(jax.devices()[:2], "data"),
            in_specs=(P("data"), P()),
            out_specs=(P("data"), P() if check_vma else P("data")),
            check_vma=check_vma,
        )
        return jax.jit(mapped)(x, kernel)

    actual, expected = run(True), run(False)
    assert actual[1].shape == (1 if check_vma else 2, *kernel.shape)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)

"""Tests that `of_rows` returns the mesh's Auto axes that split the rows of a batch."""

import jax
from jax.sharding import PartitionSpec as P

from lamb_tpu.kernels import axes


def test_of_rows() -> None:
    assert axes.of_rows() == ()
    types = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("slice", "data", "model"), axis_types=types)
    seen: list[tuple[str, ...]] = []

    def note(x: jax.Array) -> jax.Array:
        seen.append(axes.of_rows())
        return x

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        seen.append(axes.of_rows())
    jax.jit(
        jax.shard_map(
            note, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data", "model"}
        )
    )(jax.numpy.ones(4))
    assert seen == [("slice", "data"), ("slice",)]

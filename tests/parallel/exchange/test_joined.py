"""Joined vectors cut into pieces, and what that needs on a TPU."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.cost.topology import devices, topology
from lamb_tpu.parallel.exchange import joined


def test_examples() -> None:
    assert doctest.testmod(joined).attempted and not doctest.testmod(joined).failed


def test_pieces_of_rows_and_what_is_left_over() -> None:
    rows = jnp.arange(12).reshape(2, 6)
    first, second = joined.split(rows, [1, 3])
    np.testing.assert_array_equal(first, [[0], [6]])
    np.testing.assert_array_equal(second, [[1, 2, 3], [7, 8, 9]])
    assert joined.split(rows, []) == []


def test_a_narrow_piece_does_not_widen_the_whole_on_a_tpu() -> None:
    shapes = [(1024, 512), (512, 2)]
    sizes = [1024 * 512, 512 * 2]
    whole = NamedSharding(Mesh(np.array(devices(topology("v3-8"))[:1]), ("data",)), PartitionSpec())

    def cut(values: jax.Array) -> list[jax.Array]:
        pieces = joined.split(2 * values, sizes)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    given = jax.ShapeDtypeStruct((sum(sizes),), jnp.float32, sharding=whole)
    program = jax.jit(cut, out_shardings=whole).lower(given).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 3 * 4 * sum(sizes)

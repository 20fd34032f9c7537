"""Compares scatters and gathers in buckets with NumPy, and counts operations."""

import doctest
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lamb_tpu.cost.topology import devices, topology
from lamb_tpu.parallel import collectives

# Shapes, each with the axis that is cut into shards. Some arrays are small; of the large arrays, some
# fill tiles and some do not.
LEAVES = [((48, 5), 0), ((96, 7, 24), 2), ((24, 24 * 401), 1), ((48,), 0), ((3, 48 * 1024), 1)]


def over(num_devices: int, run: Any, *trees: Any, out: Any = PartitionSpec()) -> Any:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(
        lambda *trees: run(*jax.tree.map(lambda x: x[0], trees)),
        mesh=mesh,
        in_specs=(spec,) * len(trees),
        out_specs=out,
        check_vma=False,
    )
    return jax.jit(mapped), mapped


def values(num_devices: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-4, 5, (num_devices, *shape)), dtype) for shape, _ in LEAVES]


AXES = [axis for _, axis in LEAVES]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 8])
def test_scatter_is_each_devices_part_of_the_sum(num_devices: int) -> None:
    trees = values(num_devices)
    specs = [PartitionSpec(*[None] * axis, "data") for axis in AXES]
    run, _ = over(
        num_devices, lambda x: collectives.reduce_scatter(x, AXES, "data"), trees, out=specs
    )
    for actual, each in zip(run(trees), trees, strict=True):
        np.testing.assert_array_equal(actual, np.asarray(each).sum(0))


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_gather_undoes_cutting(num_devices: int) -> None:
    trees = [jnp.broadcast_to(leaf[:1], leaf.shape) for leaf in values(num_devices)]

    def there_and_back(leaves: list[jax.Array]) -> list[jax.Array]:
        parts = [
            collectives.local_part(leaf, axis, "data")
            for leaf, axis in zip(leaves, AXES, strict=True)
        ]
        for part, leaf in zip(parts, leaves, strict=True):
            assert part.size * num_devices == leaf.size
        return collectives.all_gather(parts, AXES, "data")

    run, _ = over(num_devices, there_and_back, trees)
    for actual, each in zip(run(trees), trees, strict=True):
        np.testing.assert_array_equal(actual, each[0])


@pytest.mark.parametrize(
    "shape, axes", [((8,), ("data",)), ((3,), ("data",)), ((2, 4), ("data", "fsdp"))]
)
@pytest.mark.parametrize("one_phase", [16, 1])
@pytest.mark.parametrize("length", [5, 256])
def test_rows_are_in_the_order_of_the_devices(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    one_phase: int,
    length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also tests the two-phase gather, which without the patch needs more devices than the test has."""
    monkeypatch.setattr(collectives, "_ONE_PHASE", one_phase)
    size = math.prod(shape)
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(shape), axes)
    rows = np.random.default_rng(0).integers(0, 2**32, (size, length), dtype=np.uint32)
    gathered = jax.jit(
        jax.shard_map(
            lambda row: collectives.gather_rows(row[0], axes),
            mesh=mesh,
            in_specs=PartitionSpec(axes),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    np.testing.assert_array_equal(gathered(rows), rows)
    phases = re.findall(r"= \S+ all-gather\(", gathered.lower(rows).compile().as_text())
    expected = {(8,): 2, (2, 4): 3, (3,): 1} if one_phase == 1 else {(8,): 1, (2, 4): 2, (3,): 1}
    assert len(phases) == expected[shape]


def test_sums_keep_dtypes_and_may_be_narrow() -> None:
    tree = {"a": values(8)[0], "n": jnp.arange(8, dtype=jnp.int32)}
    run, _ = over(8, lambda t: collectives.all_reduce(t, ["data"]), tree)
    np.testing.assert_array_equal(run(tree)["a"], np.asarray(tree["a"]).sum(0))
    assert run(tree)["n"] == 28 and run(tree)["n"].dtype == jnp.int32

    narrow = {"a": jnp.full((8, 3), 1 + 2**-7, jnp.bfloat16)}
    run, _ = over(8, lambda t: collectives.all_reduce(t, ["data"], jnp.float32), narrow)
    assert run(narrow)["a"].dtype == jnp.float32 and run(narrow)["a"][0] == 8 * (1 + 2**-7)

    third = {"a": jnp.full((8, 3), 1 / 3), "n": tree["n"]}
    run, _ = over(8, lambda t: collectives.all_reduce(t, ["data"], jnp.bfloat16), third)
    assert run(third)["a"].dtype == jnp.float32 and run(third)["n"] == 28
    assert run(third)["a"][0] == 8 * jnp.float32(jnp.bfloat16(1 / 3))
    scatter, _ = over(
        8,
        lambda t: collectives.reduce_scatter([t], [0], "data", jnp.bfloat16)[0],
        jnp.full((8, 16), 1 / 3),
        out=PartitionSpec("data"),
    )
    actual = scatter(jnp.full((8, 16), 1 / 3))
    assert actual.dtype == jnp.float32 and actual[0] == 8 * jnp.float32(jnp.bfloat16(1 / 3))


def test_known_weights_are_not_sent() -> None:
    def weights(x: jax.Array) -> dict[str, jax.Array]:
        return collectives.all_reduce({"rows": np.float32(3), "words": x[0]}, ["data"])

    run, _ = over(8, weights, jnp.arange(8.0)[:, None])
    assert run(jnp.arange(8.0)[:, None]) == {"rows": 24, "words": 28}
    assert operations(run.lower(jnp.arange(8.0)[:, None]).as_text()) == ["all_reduce"]


def operations(text: str) -> list[str]:
    return re.findall(r'stablehlo\.(all_reduce|reduce_scatter|all_gather)"', text)


def test_operations_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = values(8)
    specs = [PartitionSpec(*[None] * axis, "data") for axis in AXES]

    def scatter(leaves: list[jax.Array]) -> list[jax.Array]:
        return collectives.reduce_scatter(leaves, AXES, "data")

    run, _ = over(8, scatter, trees, out=specs)
    assert operations(run.lower(trees).as_text()) == ["reduce_scatter"] * 2
    # Leaves of two dtypes do not share a bucket, nor do leaves that together exceed its size.
    mixed = [leaf.astype(jnp.bfloat16) if i == 0 else leaf for i, leaf in enumerate(trees)]
    run, _ = over(8, scatter, mixed, out=specs)
    assert operations(run.lower(mixed).as_text()) == ["reduce_scatter"] * 3
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 4 * 24 * 24 * 401)
    run, _ = over(8, scatter, trees, out=specs)
    # Three buckets: two small leaves in one phase, a leaf as large as a bucket in two phases, and a
    # small and a large leaf in two phases.
    assert len(operations(run.lower(trees).as_text())) == 1 + 2 + 2
    for actual, each in zip(run(trees), trees, strict=True):
        np.testing.assert_array_equal(actual, np.asarray(each).sum(0))


def test_examples() -> None:
    assert doctest.testmod(collectives).attempted and not doctest.testmod(collectives).failed


def test_segments_of_rows_and_the_rest() -> None:
    rows = jnp.arange(12).reshape(2, 6)
    first, empty, second = collectives.split(rows, [1, 0, 3])
    np.testing.assert_array_equal(first, [[0], [6]])
    np.testing.assert_array_equal(second, [[1, 2, 3], [7, 8, 9]])
    assert empty.shape == (2, 0)
    assert collectives.split(rows, []) == []


def test_a_narrow_segment_needs_no_padding_on_a_tpu() -> None:
    shapes = [(1024, 512), (512, 2)]
    sizes = [1024 * 512, 512 * 2]
    whole = NamedSharding(Mesh(np.array(devices(topology("v3-8"))[:1]), ("data",)), PartitionSpec())

    def cut(values: jax.Array) -> list[jax.Array]:
        segments = collectives.split(2 * values, sizes)
        return [segment.reshape(shape) for segment, shape in zip(segments, shapes, strict=True)]

    given = jax.ShapeDtypeStruct((sum(sizes),), jnp.float32, sharding=whole)
    program = jax.jit(cut, out_shardings=whole).lower(given).compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 3 * 4 * sum(sizes)

"""Tests traffic of programs compiled for 8 simulated devices, and of TPU programs."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from lamb_tpu.cost import traffic
from lamb_tpu.cost.traffic import collectives, replica_groups, table

pytestmark = pytest.mark.optimized

# A program made of shortened parts of several training steps compiled for TPUs.
TPU = (pathlib.Path(__file__).parent / "hlo" / "collectives.hlo").read_text()
FOURS = tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))


def compiled(function: Callable[..., Any], *arrays: jax.ShapeDtypeStruct) -> str:
    """Compiles a function inside shard_map over a mesh of 4 x 2 devices."""
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    function = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(function).lower(*arrays).compile().as_text()


X = jax.ShapeDtypeStruct((8, 128), jnp.float32)  # 4 KiB
A = ((0, 2, 4, 6), (1, 3, 5, 7))
B = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    "function, kind, groups, operand, result, sent",
    [
        (lambda x: jax.lax.psum(x, "a"), "all-reduce", A, 4096, 4096, 6144),
        (lambda x: jax.lax.psum(x, "b"), "all-reduce", B, 4096, 4096, 4096),
        (lambda x: jax.lax.psum(x, ("a", "b")), "all-reduce", (tuple(range(8)),), 4096, 4096, 7168),
        (lambda x: jax.lax.psum_scatter(x, "a", tiled=True), "reduce-scatter", A, 4096, 1024, 3072),
        (lambda x: jax.lax.all_gather(x, "a", tiled=True), "all-gather", A, 4096, 16384, 12288),
        (lambda x: jax.lax.all_to_all(x, "a", 0, 1, tiled=True), "all-to-all", A, 4096, 4096, 3072),
        (lambda x: jax.lax.ppermute(x, "b", [(0, 1)]), "collective-permute", B, 4096, 4096, 4096),
    ],
)
def test_each_kind(
    function: Callable[..., Any],
    kind: str,
    groups: traffic.Groups,
    operand: int,
    result: int,
    sent: int,
) -> None:
    [actual] = collectives(compiled(function, X))
    assert (actual.kind, actual.dtype, actual.count) == (kind, "f32", 1)
    assert sorted(actual.groups) == sorted(groups)
    assert (actual.operand_bytes, actual.result_bytes, actual.sent_bytes) == (operand, result, sent)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    def function(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(x, "a")), None

        return jax.lax.psum(jax.lax.scan(turn, x, None, length=7)[0], "b")

    assert table(collectives(compiled(function, X))) == [
        ("all-reduce", 4, "f32", 7, 7 * 4096, 7 * 4096, 7 * 6144),
        ("all-reduce", 2, "f32", 1, 4096, 4096, 4096),
    ]


def test_several_arrays_in_one() -> None:
    y = jax.ShapeDtypeStruct((16,), jnp.float32)
    actual = collectives(compiled(lambda x, y: jax.lax.psum((x, y), "a"), X, y))
    assert sum(one.operand_bytes for one in actual) == 4096 + 64
    assert {one.dtype for one in actual} == {"f32"}


def test_a_program_that_sends_nothing() -> None:
    def turn(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 0, lambda x: x - 1, x)

    # The number of iterations of that loop is unknown, but not needed.
    assert collectives(compiled(turn, X)) == []


def test_tpu_compiler_output() -> None:
    gather, first, second, permutation, total = collectives(TPU)
    # The all-gather starts, continues in a matrix product and ends: it counts once.
    assert (gather.kind, gather.dtype, gather.groups) == ("all-gather", "bf16", FOURS)
    assert gather.result_bytes == 4 * gather.operand_bytes == 2 * 2048 * 2048
    # Each device retains a shard of two sums: the first is over two arrays, the second over a padded array.
    assert (first.kind, first.groups) == ("reduce-scatter", FOURS)
    assert first.operand_bytes == 4 * first.result_bytes == 4 * (64 * 2048 + 2048 * 10)
    assert (second.kind, second.groups) == ("reduce-scatter", FOURS)
    assert second.operand_bytes == 4 * second.result_bytes == 4 * 2112 * 2048
    # The permutation starts and ends: it counts once.
    assert permutation.kind == "collective-permute"
    assert permutation.groups[:4] == ((0, 1), (1, 2), (2, 3), (4, 5))
    assert permutation.operand_bytes == permutation.sent_bytes == 4 * 48 * 2048
    # The slice is in a later kernel, so this remains an all-reduce.
    assert (total.kind, total.dtype, total.group_size) == ("all-reduce", "bf16+f32", 16)
    assert total.operand_bytes == 6 * 512 * 2048 + 4
    assert total.sent_bytes == 2 * total.operand_bytes * 15 // 16


def test_rows_with_the_largest_traffic_first() -> None:
    rows = table(collectives(TPU) * 2)
    assert [(row.kind, row.count) for row in rows] == [
        ("reduce-scatter", 4),
        ("all-reduce", 2),
        ("all-gather", 2),
        ("collective-permute", 2),
    ]
    assert rows[0].operand_bytes == 2 * 4 * (64 * 2048 + 2048 * 10 + 2112 * 2048)


@pytest.mark.parametrize(
    "text, groups",
    [
        ("{{0,2},{1,3}}, x={{5}}", ((0, 2), (1, 3))),
        ("{}, channel_id=1", (tuple(range(24)),)),
        ("[1,4]<=[4], x", ((0, 1, 2, 3),)),
        ("[3,4]<=[4,3]T(1,0), x", ((0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11))),
        ("mesh['a'=2,'b'=3] {'a'}, x", ((0, 3), (1, 4), (2, 5))),
        ("mesh['a'=2,'b'=3] {'a','b'}", ((0, 1, 2, 3, 4, 5),)),
        ("mesh['a'=2,'b'=3] {'b','a'}", ((0, 3, 1, 4, 2, 5),)),
        # b is split as 2 x 2: groups along the second factor, then groups along the first.
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'b'}", ((3, 1), (0, 2))),
    ],
)
def test_replica_groups(text: str, groups: traffic.Groups) -> None:
    assert replica_groups(f"%x), replica_groups={text}", 24) == groups


def test_replica_groups_of_another_age() -> None:
    with pytest.raises(
        ValueError, match="'to_apply=%add' has no replica groups in a known notation"
    ):
        replica_groups("to_apply=%add", 8)


def test_bytes_by_dtype() -> None:
    groups = (tuple(range(4)),)
    mixed = traffic.Collective(
        "all-reduce", groups, (traffic.Array("f32", (8,)), traffic.Array("bf16", (8,))), 2
    )
    packed = traffic.Collective("all-gather", groups, (traffic.Array("u8", (100,)),), 1)
    assert traffic.sent_by_dtype([mixed, packed]) == {"u8": 300, "f32": 96, "bf16": 48}

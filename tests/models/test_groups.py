"""Groups of examples: valid sizes, and their description."""

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lamb_tpu.errors import ArgumentError
from lamb_tpu.models import groups as groups_lib
from lamb_tpu.models.groups import describe_groups
from lamb_tpu.models.norm import BatchNorm
from tests.raising import rejected

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "group_size, rows, axis_name, message",
    [
        (0, 32, None, ("group_size", 0, "is out of range")),
        (2.0, 32, None, ("group_size", 2.0, "is out of range")),
        ("8", 32, None, ("group_size", "8", "is out of range")),
        (True, 32, None, ("group_size", True, "is out of range")),
        (12, 32, None, ("group_size", 12, "does not fit the batch of 32 examples", "use 8 or 16")),
        (64, 32, None, ("group_size", 64, "does not fit the batch of 32 examples", "use 32")),
        (6, 32, "data", ("group_size", 6, "32 examples, 4 on each of 8 devices", "use 4 or 8")),
        (12, 32, "data", ("group_size", 12, "32 examples, 4 on each of 8 devices", "8 or 16")),
        # 16 divides the batch of 96, but its groups would end inside a device's 12 rows.
        (16, 96, "data", ("group_size", 16, "96 examples, 12 on each of 8 devices", "12 or 24")),
        (8, 32, "data", ("groups of 2 devices", ..., "are smaller than the mesh axes data")),
        (None, 32, "", ("axis_name", None, "over data", "set the axes that split the batch")),
    ],
)
def test_group_size_that_does_not_fit(
    group_size: Any, rows: int, axis_name: str | None, message: tuple[Any, ...]
) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    norm = BatchNorm(group_size, use_running_average=False, axis_name=axis_name or None)
    x = jnp.zeros((rows, 5))
    variables = norm.init(KEY, x)
    apply = functools.partial(norm.apply, variables, mutable="batch_stats")
    if axis_name is not None:
        apply = jax.shard_map(apply, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with rejected(*message, kind=ArgumentError):
        apply(x)


@pytest.mark.parametrize(
    "group_size, devices, count, where",
    [
        (1, 1, 48, "6 on each device"),
        (3, 1, 16, "2 on each device"),
        (6, 1, 8, "1 device(s) each"),
        (12, 2, 4, "2 device(s) each"),
        (None, 8, 1, "8 device(s) each"),
    ],
)
def test_description_of_groups(
    group_size: int | None, devices: int, count: int, where: str
) -> None:
    """Describes groups of 48 examples on 8 devices."""
    output = f"BatchNorm: groups of {group_size or 48} examples, {count} in a forward pass, {where}"
    assert describe_groups(group_size, 48, 8) == (devices, output)


def test_docstrings() -> None:
    result = doctest.testmod(groups_lib)
    assert result.failed == 0 and result.attempted == 2

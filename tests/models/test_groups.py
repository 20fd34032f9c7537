"""Groups of examples: which sizes fit, and what is told of them."""

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lamb_tpu.models import groups as groups_lib
from lamb_tpu.models.groups import describe_groups
from lamb_tpu.models.norm import BatchNorm

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    "group_size, rows, axis_name, message",
    [
        (0, 32, None, "group_size must be None or a whole number of at least 1, not 0"),
        (2.0, 32, None, "group_size must be None or a whole number of at least 1, not 2.0"),
        (True, 32, None, "group_size must be None or a whole number of at least 1, not True"),
        (
            12,
            32,
            None,
            "group_size is 12, which does not fit the batch of 32 examples; 8 or 16 would",
        ),
        (64, 32, None, "group_size is 64, which does not fit the batch of 32 examples; 32 would"),
        (6, 32, "data", "group_size is 6, .* 32 examples, 4 on each of 8 devices; 4 or 8 would"),
        (12, 32, "data", "group_size is 12, .* 32 examples, 4 on each of 8 devices; 8 or 16 would"),
        # 16 divides the batch of 96, but its groups would end within a device's 12.
        (
            16,
            96,
            "data",
            "group_size is 16, .* 96 examples, 12 on each of 8 devices; 12 or 24 would",
        ),
        (8, 32, "data", "groups of 2 devices are parts of the mesh axes data: give shard_map"),
        (None, 32, "", "set axis_name to the axes that split the batch, \\(\\) for none"),
    ],
)
def test_group_size_that_does_not_fit(
    group_size: Any, rows: int, axis_name: str | None, message: str
) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    norm = BatchNorm(group_size, use_running_average=False, axis_name=axis_name or None)
    x = jnp.zeros((rows, 5))
    variables = norm.init(KEY, x)
    apply = functools.partial(norm.apply, variables, mutable="batch_stats")
    if axis_name is not None:
        apply = jax.shard_map(apply, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=message):
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
def test_what_is_told(group_size: int | None, devices: int, count: int, where: str) -> None:
    """48 examples on 8 devices."""
    told = f"BatchNorm: groups of {group_size or 48} examples, {count} in a forward pass, {where}"
    assert describe_groups(group_size, 48, 8) == (devices, told)


@pytest.mark.parametrize(
    "group_size, message",
    [
        (4, "group_size is 4, .* 48 examples, 6 on each of 8 devices; 3 or 6 would"),
        (96, "group_size is 96, .* 48 examples, 6 on each of 8 devices; 48 would"),
        ("8", "group_size must be None or a whole number of at least 1, not '8'"),
    ],
)
def test_what_fits_no_devices_part(group_size: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_groups(group_size, 48, 8)


def test_docstrings() -> None:
    result = doctest.testmod(groups_lib)
    assert result.failed == 0 and result.attempted == 2

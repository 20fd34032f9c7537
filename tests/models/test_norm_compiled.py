"""Communication in a step with BatchNorm: sums over the groups of devices, and no gathers."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lamb_tpu.cost.traffic import collectives
from lamb_tpu.models.norm import BatchNorm

pytestmark = pytest.mark.optimized

BATCH = 32
KEY = jax.random.key(0)


def mesh_of(shape: Sequence[int]) -> Mesh:
    names = ("data",) if len(shape) == 1 else ("group", "inner")
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


class Network(nn.Module):
    """Two convolutions, each followed by BatchNorm."""

    group_size: int | None
    axis_name: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in (8, 16):
            x = nn.Conv(channels, (3, 3), use_bias=False, dtype=x.dtype)(x)
            x = nn.relu(BatchNorm(self.group_size, False, self.axis_name)(x))
        return nn.Dense(10, dtype=x.dtype)(x.mean((1, 2)))


def compiled_step(mesh: Mesh, group_size: int | None, dtype: Any, shard_map: bool) -> str:
    """Returns the compiled training step with 4 examples per device."""
    names = mesh.axis_names
    network = Network(group_size, names if shard_map else None)
    x = jnp.zeros((4 * mesh.size, 8, 8, 3), dtype)
    variables = jax.eval_shape(Network(None).init, KEY, x)

    def step(variables: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            out, state = network.apply({**variables, "params": params}, x, mutable="batch_stats")
            return jnp.sum(out.astype(jnp.float32) ** 2), state

        grads, state = jax.grad(loss, has_aux=True)(variables["params"])
        if shard_map:
            grads = jax.lax.psum(grads, names)
        return jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads), state

    specs = (P(), P(names))
    if shard_map:
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    full, split = (NamedSharding(mesh, spec) for spec in specs)
    step = jax.jit(step, in_shardings=(full, split), out_shardings=full)
    return step.lower(variables, x).compile().as_text()


@pytest.mark.parametrize("shape, shard_map", [((8,), False), ((4, 2), False), ((8,), True)])
@pytest.mark.parametrize(
    "group_size, dtype",
    [
        (8, jnp.float32),
        (None, jnp.float32),
        (2, jnp.bfloat16),
        pytest.param(4, jnp.float32, marks=pytest.mark.long),
        pytest.param(16, jnp.float32, marks=pytest.mark.long),
        pytest.param(8, jnp.bfloat16, marks=pytest.mark.long),
    ],
)
def test_compiled_step_reduces_over_the_groups_and_gathers_nothing(
    group_size: int | None, dtype: Any, shape: Sequence[int], shard_map: bool
) -> None:
    program = compiled_step(mesh_of(shape), group_size, dtype, shard_map)
    actual = [(one.kind, [list(group) for group in one.groups]) for one in collectives(program)]
    assert {kind for kind, _ in actual} == {"all-reduce"}
    replicas = (group_size or BATCH) // 4
    if replicas < 2:
        # The all-reduces sum gradients and running averages; running variances need the means first.
        assert all(groups == [[*range(8)]] for _, groups in actual)
        assert len(actual) <= 5
        return
    expected = [[*range(i, i + replicas)] for i in range(0, 8, replicas)]
    across = [[*range(i, 8, replicas)] for i in range(replicas)]
    assert all(groups in (expected, across, [[*range(8)]]) for _, groups in actual)
    # Each layer communicates once in the backward pass; in the forward pass once for bfloat16, and
    # twice for float32.
    rounds = 2 * (2 if dtype == jnp.bfloat16 else 3)
    count = sum(groups == expected for _, groups in actual)
    assert rounds <= count <= rounds + (0 if group_size else 2)

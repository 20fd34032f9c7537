"""Compares the LSTM recurrence and its derivatives with JAX's, including padded and sharded input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.kernels import recurrence
from lamb_tpu.kernels.recurrence import Carry, Kernels

STEPS, BATCH, INPUTS, FEATURES = 5, 4, 6, 3


def arguments() -> tuple[jax.Array, Kernels, Carry, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 6)
    inputs = jax.random.normal(keys[0], (STEPS, BATCH, INPUTS))
    kernels = Kernels(
        0.5 * jax.random.normal(keys[1], (INPUTS, 4 * FEATURES)),
        0.5 * jax.random.normal(keys[2], (FEATURES, 4 * FEATURES)),
        jax.random.normal(keys[3], (4 * FEATURES,)),
    )
    carry = Carry(*(jax.random.normal(key, (BATCH, FEATURES)) for key in keys[4:]))
    valid = jnp.arange(STEPS)[:, None] < jnp.array([5, 3, 1, 0])
    return inputs, kernels, carry, valid


def in_bfloat16(kernels: Kernels) -> Kernels:
    low = jnp.bfloat16
    return Kernels(kernels.input.astype(low), kernels.hidden.astype(low), kernels.bias)


def loss(outputs: jax.Array, last: Carry) -> jax.Array:
    return jnp.sum(jnp.sin(outputs)) + jnp.sum(last.cell**2) + 0.3 * jnp.sum(last.hidden)


def ours(inputs: jax.Array, kernels: Kernels, carry: Carry, valid: jax.Array) -> jax.Array:
    return loss(*recurrence.run(inputs, kernels, carry, valid))


def plain(inputs: jax.Array, kernels: Kernels, carry: Carry, valid: jax.Array) -> jax.Array:
    """Computes the loss of `ours` step by step, without scan and without a custom derivative."""
    outputs = []
    for step in range(STEPS):
        gates = inputs[step] @ kernels.input + kernels.bias + carry.hidden @ kernels.hidden
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * carry.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        new = Carry(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)
        keep = valid[step][:, None]
        carry = jax.tree.map(lambda a, b, keep=keep: jnp.where(keep, a, b), new, carry)
        outputs.append(carry.hidden)
    return loss(jnp.stack(outputs), carry)


@pytest.mark.long
def test_values_and_gradients() -> None:
    expected = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*arguments())
    actual = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(*arguments())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), actual, expected
    )


@pytest.mark.long
def test_a_product_of_the_hessian() -> None:
    inputs, kernels, carry, valid = arguments()
    vector = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), kernels)

    def product(function: object) -> jax.Array:
        slope = jax.grad(function, 1)

        def along(kernels: Kernels) -> jax.Array:
            actual = slope(inputs, kernels, carry, valid)
            return sum(map(jnp.vdot, actual, vector))

        return jax.jit(jax.grad(along))(kernels)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        product(ours),
        product(plain),
    )


def test_padding_leaves_the_carry() -> None:
    inputs, kernels, carry, valid = arguments()
    outputs, last = recurrence.run(inputs, kernels, carry, valid)
    np.testing.assert_array_equal(last.cell[3], carry.cell[3])
    np.testing.assert_array_equal(outputs[1:, 2], np.broadcast_to(outputs[0, 2], (4, FEATURES)))
    # Padded values have no effect.
    other = jnp.where(valid[:, :, None], inputs, 7.0)
    again, _ = recurrence.run(other, kernels, carry, valid)
    np.testing.assert_array_equal(again, outputs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_split_over_devices(check_vma: bool) -> None:
    inputs, kernels, carry, valid = arguments()
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, specs = PartitionSpec(None, "data"), PartitionSpec()

    def step(inputs: jax.Array, kernels: Kernels, valid: jax.Array) -> Kernels:
        def mine(kernels: Kernels) -> jax.Array:
            first = recurrence.zero_carry(inputs, FEATURES, inputs.dtype)
            return loss(*recurrence.run(inputs, kernels, first, valid))

        slope = jax.grad(mine)(kernels)
        return slope if check_vma else jax.lax.psum(slope, "data")

    split = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(rows, specs, rows), out_specs=specs, check_vma=check_vma
        )
    )
    zero = Carry(*map(jnp.zeros_like, carry))
    expected = jax.grad(plain, 1)(inputs, kernels, zero, valid)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        split(inputs, kernels, valid),
        expected,
    )


def test_low_precision_products() -> None:
    inputs, kernels, carry, valid = arguments()
    exact, _ = recurrence.run(inputs, kernels, carry, valid)
    rounded, last = recurrence.run(inputs, in_bfloat16(kernels), carry, valid)
    assert rounded.dtype == last.cell.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.06)
    slope = jax.grad(ours, 1)(inputs, in_bfloat16(kernels), carry, valid)
    assert slope.input.dtype == slope.hidden.dtype == jnp.bfloat16


def test_factor_of_the_hidden_state() -> None:
    """A factor that is the same for all examples equals a multiplication of the kernel's rows."""
    inputs, kernels, carry, valid = arguments()
    factor = jnp.array([0.0, 2.0, 1.5])

    def scaled(inputs: jax.Array, kernels: Kernels, carry: Carry) -> jax.Array:
        kernels = kernels._replace(hidden=factor[:, None] * kernels.hidden)
        return plain(inputs, kernels, carry, valid)

    rows = jnp.broadcast_to(factor, (BATCH, FEATURES))

    def actual(inputs: jax.Array, kernels: Kernels, carry: Carry) -> jax.Array:
        return loss(*recurrence.run(inputs, kernels, carry, valid, rows))

    both = [
        jax.jit(jax.value_and_grad(each, (0, 1, 2)))(inputs, kernels, carry)
        for each in (actual, scaled)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), *both)

"""The LSTM's recurrence: its gradients beside JAX' own, of any order, padded or not, sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lamb_tpu.models import recurrence
from lamb_tpu.models.recurrence import Carry

STEPS, BATCH, FEATURES = 5, 4, 3


def arguments() -> tuple[jax.Array, jax.Array, Carry, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    gates = jax.random.normal(keys[0], (STEPS, BATCH, 4 * FEATURES))
    kernel = 0.5 * jax.random.normal(keys[1], (FEATURES, 4 * FEATURES))
    carry = Carry(*(jax.random.normal(key, (BATCH, FEATURES)) for key in keys[2:]))
    valid = jnp.arange(STEPS)[:, None] < jnp.array([5, 3, 1, 0])
    return gates, kernel, carry, valid


def loss(outputs: jax.Array, last: Carry) -> jax.Array:
    return jnp.sum(jnp.sin(outputs)) + jnp.sum(last.cell**2) + 0.3 * jnp.sum(last.hidden)


def ours(gates: jax.Array, kernel: jax.Array, carry: Carry, valid: jax.Array) -> jax.Array:
    return loss(*recurrence.run(gates, kernel, carry, valid))


def plain(gates: jax.Array, kernel: jax.Array, carry: Carry, valid: jax.Array) -> jax.Array:
    """The same, step by step, without scan and without a rule of its own."""
    outputs = []
    for step in range(STEPS):
        i, f, g, o = jnp.split(gates[step] + carry.hidden @ kernel, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * carry.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        new = Carry(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)
        keep = valid[step][:, None]
        carry = jax.tree.map(lambda a, b, keep=keep: jnp.where(keep, a, b), new, carry)
        outputs.append(carry.hidden)
    return loss(jnp.stack(outputs), carry)


def test_values_and_gradients() -> None:
    expected = jax.jit(jax.value_and_grad(plain, (0, 1, 2)))(*arguments())
    found = jax.jit(jax.value_and_grad(ours, (0, 1, 2)))(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
                 found, expected)


def test_a_product_of_the_hessian() -> None:
    gates, kernel, carry, valid = arguments()
    vector = jax.random.normal(jax.random.key(1), kernel.shape)

    def product(function: object) -> jax.Array:
        slope = jax.grad(function, 1)
        along = jax.grad(lambda w: jnp.vdot(slope(gates, w, carry, valid), vector))
        return jax.jit(along)(kernel)

    np.testing.assert_allclose(product(ours), product(plain), rtol=1e-4, atol=1e-5)


def test_padding_leaves_the_carry() -> None:
    gates, kernel, carry, valid = arguments()
    outputs, last = recurrence.run(gates, kernel, carry, valid)
    np.testing.assert_array_equal(last.cell[3], carry.cell[3])
    np.testing.assert_array_equal(outputs[1:, 2], np.broadcast_to(outputs[0, 2], (4, FEATURES)))
    # What is padded changes nothing.
    other = jnp.where(valid[:, :, None], gates, 7.0)
    again, _ = recurrence.run(other, kernel, carry, valid)
    np.testing.assert_array_equal(again, outputs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_split_over_devices(check_vma: bool) -> None:
    gates, kernel, carry, valid = arguments()
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, specs = PartitionSpec(None, "data"), PartitionSpec()

    def step(gates: jax.Array, kernel: jax.Array, valid: jax.Array) -> jax.Array:
        def mine(kernel: jax.Array) -> jax.Array:
            return loss(*recurrence.run(gates, kernel, recurrence.zero_carry(gates), valid))

        slope = jax.grad(mine)(kernel)
        return slope if check_vma else jax.lax.psum(slope, "data")

    split = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(rows, specs, rows), out_specs=specs, check_vma=check_vma
    ))
    zero = Carry(*map(jnp.zeros_like, carry))
    expected = jax.grad(plain, 1)(gates, kernel, zero, valid)
    np.testing.assert_allclose(split(gates, kernel, valid), expected, rtol=2e-5, atol=2e-6)


def test_low_precision_products() -> None:
    gates, kernel, carry, valid = arguments()
    exact, _ = recurrence.run(gates, kernel, carry, valid)
    rounded, last = recurrence.run(gates, kernel.astype(jnp.bfloat16), carry, valid)
    assert rounded.dtype == last.cell.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.03)
    slope = jax.grad(ours, 1)(gates, kernel.astype(jnp.bfloat16), carry, valid)
    assert slope.dtype == jnp.bfloat16


def test_factor_of_the_hidden_state() -> None:
    """As if each row of the kernel were multiplied, where all examples have one factor."""
    gates, kernel, carry, valid = arguments()
    factor = jnp.array([0.0, 2.0, 1.5])
    scaled = jax.value_and_grad(
        lambda g, w, c: plain(g, factor[:, None] * w, c, valid), (0, 1, 2)
    )
    rows = jnp.broadcast_to(factor, (BATCH, FEATURES))
    found = jax.value_and_grad(
        lambda g, w, c: loss(*recurrence.run(g, w, c, valid, rows)), (0, 1, 2)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        jax.jit(found)(gates, kernel, carry), jax.jit(scaled)(gates, kernel, carry),
    )

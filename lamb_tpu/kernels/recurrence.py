"""The recurrence of an LSTM over all steps, with gradients in few matrix products.

The contribution of the inputs to the gates is computed for all steps before the recurrence, and the
gradients of the kernels for all steps after it. A step then has one matrix product forward and one
backward. JAX's derivative of a scan accumulates the kernel's gradient in every step, which for
small batches reads and writes the full kernel each time.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Gates in the order of the last axis, as in PyTorch's nn.LSTM: input, forget, cell, output.
GATES = 4

_Active = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # i, f, g, o


class Carry(NamedTuple):
    """The state that an LSTM layer passes from step to step, (batch, features)."""

    hidden: jax.Array  # outputs of the last step
    cell: jax.Array  # state of the cells


def zero_carry(inputs: jax.Array, features: int, dtype: jnp.dtype) -> Carry:
    """Returns the carry of `features` cells before the first step of `inputs`, see `run`."""
    # Inside shard_map the carry must vary over the same mesh axes as the inputs, so derive it from
    # them. Without stop_gradient, zeros would be added to the gradient of all inputs.
    like = lax.stop_gradient(inputs[0, :, :1].astype(dtype))
    zero = jnp.where(jnp.zeros((len(like), features), bool), like, 0)
    return Carry(zero, zero)


class Kernels(NamedTuple):
    """The parameters of an LSTM layer, with the gates i, f, g, o side by side."""

    input: jax.Array  # kernel of the inputs, (inputs, 4 features)
    hidden: jax.Array  # kernel of the hidden state, (features, 4 features)
    bias: jax.Array  # (4 features)


@jax.custom_vjp
def run(
    inputs: jax.Array,
    kernels: Kernels,
    carry: Carry,
    valid: jax.Array,
    factor: jax.Array | None = None,
) -> tuple[jax.Array, Carry]:
    """Runs an LSTM layer: c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    Args:
      inputs: (steps, batch, inputs).
      kernels: the parameters. The operands of matrix products have the dtype of the kernels, and
        everything else has the dtype of the bias.
      carry: the carry before the first step.
      valid: bool (steps, batch). Where False, the carry does not change, and the output is
        the carried hidden state.
      factor: (batch, features), multiplied with the hidden state before each step's matrix product,
        such as a dropout mask; None for 1. It gets no gradient.

    Returns:
      Outputs (steps, batch, features), and the carry after the last step. Differentiable in reverse
      mode, any number of times.
    """
    return _forward(inputs, kernels, carry, valid, factor)[0]


def _forward(
    inputs: jax.Array,
    kernels: Kernels,
    carry: Carry,
    valid: jax.Array,
    factor: jax.Array | None = None,
) -> tuple[tuple[jax.Array, Carry], tuple[Any, ...]]:
    # The gates after their nonlinearities are separate arrays, because XLA's CPU compiler computes
    # their concatenation one number at a time.
    product = functools.partial(_product, dtype=kernels.bias.dtype)

    def step(
        carry: Carry, now: tuple[jax.Array, jax.Array]
    ) -> tuple[Carry, tuple[jax.Array, _Active, jax.Array]]:
        from_inputs, mask = now
        # Adding the bias here saves a pass over the gates of all steps.
        raw = from_inputs + kernels.bias + product(_times(carry.hidden, factor), kernels.hidden)
        i, f, g, o = jnp.split(raw, GATES, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * carry.cell + i * g
        hidden = o * jnp.tanh(cell)
        keep = mask[:, None]
        new = Carry(jnp.where(keep, hidden, carry.hidden), jnp.where(keep, cell, carry.cell))
        return new, (new.hidden, (i, f, g, o), carry.cell)

    last, (outputs, active, before) = lax.scan(step, carry, (product(inputs, kernels.input), valid))
    return (outputs, last), (inputs, kernels, carry, valid, factor, outputs, active, before)


def _backward(
    residuals: tuple[Any, ...], gradients: tuple[jax.Array, Carry]
) -> tuple[jax.Array, Kernels, Carry, None, None]:
    inputs, kernels, first, valid, factor, outputs, active, before = residuals
    of_outputs, of_last = gradients
    product = functools.partial(_product, dtype=kernels.bias.dtype)

    def step(
        carry: Carry, now: tuple[jax.Array, jax.Array, _Active, jax.Array]
    ) -> tuple[Carry, jax.Array]:
        of_output, mask, (i, f, g, o), cell_before = now
        keep = mask[:, None]
        of_hidden = carry.hidden + of_output
        squashed = jnp.tanh(f * cell_before + i * g)
        of_cell = carry.cell + of_hidden * o * (1 - squashed * squashed)
        raw = jnp.concatenate(
            [
                of_cell * g * i * (1 - i),
                of_cell * cell_before * f * (1 - f),
                of_cell * i * (1 - g * g),
                of_hidden * squashed * o * (1 - o),
            ],
            -1,
        )
        raw = jnp.where(keep, raw, 0)
        before = Carry(
            jnp.where(keep, _times(product(raw, kernels.hidden.T), factor), of_hidden),
            jnp.where(keep, of_cell * f, carry.cell),
        )
        return before, raw

    of_carry, of_gates = lax.scan(step, of_last, (of_outputs, valid, active, before), reverse=True)
    hidden_before = _times(jnp.concatenate([first.hidden[None], outputs[:-1]]), factor)

    def summed(factor: jax.Array, kernel: jax.Array) -> jax.Array:
        # Contract steps and batch in this order: jnp.einsum's order would transpose both factors.
        return lax.dot_general(
            factor.astype(kernel.dtype),
            of_gates.astype(kernel.dtype),
            (((0, 1), (0, 1)), ((), ())),
            preferred_element_type=kernels.bias.dtype,
        ).astype(kernel.dtype)

    of_inputs = product(of_gates, kernels.input.T).astype(inputs.dtype)
    of_kernels = Kernels(
        summed(inputs, kernels.input), summed(hidden_before, kernels.hidden), of_gates.sum((0, 1))
    )
    of_all = _as_gradients((inputs, kernels, first), (of_inputs, of_kernels, of_carry))
    return *of_all, None, None


def _as_gradients(given: Any, slopes: Any) -> Any:
    """Returns the slopes in the dtypes of `given`, as JAX gradients of a linear function.

    Under shard_map's check_vma JAX then sums the gradient of a replicated kernel over devices, as
    usual.
    """
    leaves = jax.tree.leaves(
        jax.tree.map(lambda leaf, slope: slope.astype(leaf.dtype), given, slopes)
    )

    def pairing(each: Any) -> jax.Array:
        terms = map(jnp.vdot, jax.tree.leaves(each), leaves)
        return sum((term.astype(jnp.float32) for term in terms), jnp.float32(0))

    return jax.grad(pairing)(given)


run.defvjp(_forward, _backward)


def _times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def _product(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a matrix product with factors in the kernel's dtype, summed in `dtype`."""
    return jnp.dot(x.astype(kernel.dtype), kernel, preferred_element_type=dtype)

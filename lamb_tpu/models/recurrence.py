"""The recurrence of an LSTM over all steps, with gradients in few matrix products.

The inputs' part of the gates is computed for all steps at once before the recurrence, and the
gradients of the kernels for all steps at once after it: a step has one matrix product forward and
one backward. JAX' own derivative of a scan adds up the kernel's gradient step by step, which for
small batches reads and writes the whole kernel in every step.
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
    """State that an LSTM layer hands from step to step.

    Attributes:
      hidden: outputs of the last step, (batch, features).
      cell: state of the cells, (batch, features).
    """

    hidden: jax.Array
    cell: jax.Array


def zero_carry(inputs: jax.Array, features: int, dtype: jnp.dtype) -> Carry:
    """Returns the carry before the first step.

    Args:
      inputs: (steps, batch, inputs), as `run` takes them.
      features: number of cells.
      dtype: of the carry.
    """
    # A choice and not zeros: inside shard_map it varies over the same mesh axes as the inputs.
    # Without stop_gradient, zeros would be added to the gradient of all inputs.
    like = lax.stop_gradient(inputs[0, :, :1].astype(dtype))
    zero = jnp.where(jnp.zeros((len(like), features), bool), like, 0)
    return Carry(zero, zero)


class Kernels(NamedTuple):
    """Parameters of an LSTM layer, with the gates i, f, g, o side by side.

    Attributes:
      input: kernel of the inputs, (inputs, 4 features).
      hidden: kernel of the hidden state, (features, 4 features).
      bias: (4 features).
    """

    input: jax.Array
    hidden: jax.Array
    bias: jax.Array


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
      kernels: the parameters. The products' factors are in the dtype of the kernels, and all else
        is in that of the bias.
      carry: before the first step.
      valid: (steps, batch), of bool. Where it is False, the carry stays as it is, and the output is
        the carried one.
      factor: of the hidden state in each step's matrix product, (batch, features), such as a mask
        of dropout; None for 1. It gets no gradient.

    Returns:
      Outputs (steps, batch, features), and the carry after the last step. Differentiable in reverse
      mode, any number of times.
    """
    outputs, last, _ = _forward_scan(inputs, kernels, carry, valid, factor)
    return outputs, last


def _forward_scan(
    inputs: jax.Array, kernels: Kernels, carry: Carry, valid: jax.Array, factor: jax.Array | None
) -> tuple[jax.Array, Carry, tuple[_Active, jax.Array]]:
    """Returns also the gates after their nonlinearities, and the cells before each step.

    The gates are apart, as XLA's CPU compiler would compute them one number at a time if it had to
    put them side by side.
    """

    product = functools.partial(_product, dtype=kernels.bias.dtype)

    def step(
        carry: Carry, now: tuple[jax.Array, jax.Array]
    ) -> tuple[Carry, tuple[jax.Array, _Active, jax.Array]]:
        part, mask = now
        # The bias is added here as this saves a pass over the gates of all steps.
        raw = part + kernels.bias + product(_times(carry.hidden, factor), kernels.hidden)
        i, f, g, o = jnp.split(raw, GATES, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * carry.cell + i * g
        hidden = o * jnp.tanh(cell)
        keep = mask[:, None]
        new = Carry(jnp.where(keep, hidden, carry.hidden), jnp.where(keep, cell, carry.cell))
        return new, (new.hidden, (i, f, g, o), carry.cell)

    last, (outputs, active, before) = lax.scan(step, carry, (product(inputs, kernels.input), valid))
    return outputs, last, (active, before)


def _forward(
    inputs: jax.Array,
    kernels: Kernels,
    carry: Carry,
    valid: jax.Array,
    factor: jax.Array | None = None,
) -> tuple[tuple[jax.Array, Carry], tuple[Any, ...]]:
    outputs, last, (active, before) = _forward_scan(inputs, kernels, carry, valid, factor)
    kept = inputs, kernels, carry, valid, factor, outputs, active, before
    return (outputs, last), kept


def _backward(
    kept: tuple[Any, ...], gradients: tuple[jax.Array, Carry]
) -> tuple[jax.Array, Kernels, Carry, None, None]:
    inputs, kernels, first, valid, factor, outputs, active, before = kept
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
        # Over steps and batch in this order: in jnp.einsum's, both are transposed before.
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
    # Written as gradients of a factor, so that under shard_map's check_vma JAX sums those of a
    # replicated kernel, as in its own derivatives.
    given = inputs, kernels, first
    found = jax.tree.leaves(
        jax.tree.map(
            lambda leaf, slope: slope.astype(leaf.dtype), given, (of_inputs, of_kernels, of_carry)
        )
    )

    def pairing(each: Any) -> jax.Array:
        terms = map(jnp.vdot, jax.tree.leaves(each), found)
        return sum((term.astype(jnp.float32) for term in terms), jnp.float32(0))

    of_all = jax.grad(pairing)(given)
    return *of_all, None, None


run.defvjp(_forward, _backward)


def _times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def _product(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a matrix product in the kernel's dtype, summed in `dtype`."""
    return jnp.dot(x.astype(kernel.dtype), kernel, preferred_element_type=dtype)

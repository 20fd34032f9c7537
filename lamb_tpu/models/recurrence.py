"""The recurrence of an LSTM over all steps, with gradients in few matrix products.

The inputs' part of the gates is computed for all steps at once before the recurrence, and the
gradient of the hidden kernel for all steps at once after it: a step has one matrix product forward
and one backward. JAX' own derivative of a scan adds up the kernel's gradient step by step, which
for small batches reads and writes the whole kernel in every step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Gates in the order of the last axis, as in PyTorch's nn.LSTM: input, forget, cell, output.
GATES = 4


class Carry(NamedTuple):
    """State that an LSTM layer hands from step to step.

    Attributes:
      hidden: outputs of the last step, (batch, features).
      cell: state of the cells, (batch, features).
    """

    hidden: jax.Array
    cell: jax.Array


def zero_carry(gates: jax.Array) -> Carry:
    """Returns the carry before the first step.

    Args:
      gates: (steps, batch, 4 features), as `run` takes them.
    """
    like = gates[0, :, : gates.shape[-1] // GATES]
    # A choice and not zeros: inside shard_map it varies over the same mesh axes as the gates.
    zero = jnp.where(jnp.zeros(like.shape, bool), like, 0)
    return Carry(zero, zero)


@jax.custom_vjp
def run(
    gates: jax.Array,
    kernel: jax.Array,
    carry: Carry,
    valid: jax.Array,
    factor: jax.Array | None = None,
) -> tuple[jax.Array, Carry]:
    """Runs an LSTM layer: c = sigmoid(f) c + sigmoid(i) tanh(g), h = sigmoid(o) tanh(c).

    Args:
      gates: the inputs' part of the gates i, f, g, o with the bias, (steps, batch, 4 features).
      kernel: the hidden part's kernel, (features, 4 features).
      carry: before the first step.
      valid: (steps, batch), of bool. Where it is False, the carry stays as it is, and the output is
        the carried one.
      factor: of the hidden state in each step's matrix product, (batch, features), such as a mask
        of dropout; None for 1. It gets no gradient.

    Returns:
      Outputs (steps, batch, features), and the carry after the last step. Differentiable in reverse
      mode, any number of times.
    """
    outputs, last, _ = _forward_scan(gates, kernel, carry, valid, factor)
    return outputs, last


def _forward_scan(
    gates: jax.Array,
    kernel: jax.Array,
    carry: Carry,
    valid: jax.Array,
    factor: jax.Array | None,
) -> tuple[jax.Array, Carry, tuple[jax.Array, jax.Array]]:
    """Returns also the gates after their nonlinearities, and the cells before each step."""

    def step(
        carry: Carry, now: tuple[jax.Array, jax.Array]
    ) -> tuple[Carry, tuple[jax.Array, jax.Array, jax.Array]]:
        part, mask = now
        raw = part + _product(_times(carry.hidden, factor), kernel)
        i, f, g, o = jnp.split(raw, GATES, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * carry.cell + i * g
        hidden = o * jnp.tanh(cell)
        keep = mask[:, None]
        new = Carry(jnp.where(keep, hidden, carry.hidden), jnp.where(keep, cell, carry.cell))
        return new, (new.hidden, jnp.concatenate([i, f, g, o], -1), carry.cell)

    last, (outputs, active, before) = lax.scan(step, carry, (gates, valid))
    return outputs, last, (active, before)


def _forward(
    gates: jax.Array,
    kernel: jax.Array,
    carry: Carry,
    valid: jax.Array,
    factor: jax.Array | None = None,
) -> tuple[tuple[jax.Array, Carry], tuple[Any, ...]]:
    outputs, last, (active, before) = _forward_scan(gates, kernel, carry, valid, factor)
    kept = gates, kernel, carry.hidden, carry.cell, valid, factor, outputs, active, before
    return (outputs, last), kept


def _backward(
    kept: tuple[Any, ...], gradients: tuple[jax.Array, Carry]
) -> tuple[jax.Array, jax.Array, Carry, None, None]:
    gates, kernel, first_hidden, first_cell, valid, factor, outputs, active, before = kept
    of_outputs, of_last = gradients

    def step(
        carry: Carry, now: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    ) -> tuple[Carry, jax.Array]:
        of_output, mask, gate, cell_before = now
        i, f, g, o = jnp.split(gate, GATES, axis=-1)
        keep = mask[:, None]
        of_hidden = carry.hidden + of_output
        squashed = jnp.tanh(f * cell_before + i * g)
        of_cell = carry.cell + of_hidden * o * (1 - squashed * squashed)
        raw = jnp.concatenate([
            of_cell * g * i * (1 - i),
            of_cell * cell_before * f * (1 - f),
            of_cell * i * (1 - g * g),
            of_hidden * squashed * o * (1 - o),
        ], -1)
        raw = jnp.where(keep, raw, 0)
        before = Carry(
            jnp.where(keep, _times(_product(raw, kernel.T), factor), of_hidden),
            jnp.where(keep, of_cell * f, carry.cell),
        )
        return before, raw

    of_carry, of_gates = lax.scan(
        step, of_last, (of_outputs, valid, active, before), reverse=True
    )
    hidden_before = _times(jnp.concatenate([first_hidden[None], outputs[:-1]]), factor)
    of_kernel = jnp.einsum(
        "tbh,tbg->hg", hidden_before.astype(kernel.dtype), of_gates.astype(kernel.dtype),
        preferred_element_type=gates.dtype,
    )
    # Written as gradients of a factor, so that under shard_map's check_vma JAX sums those of a
    # replicated kernel, as in its own derivatives.
    inputs = gates, kernel, Carry(first_hidden, first_cell)
    found = of_gates, of_kernel.astype(kernel.dtype), of_carry
    of_gates, of_kernel, of_carry = jax.grad(
        lambda *each: sum(map(jnp.vdot, jax.tree.leaves(each), jax.tree.leaves(found))), (0, 1, 2)
    )(*inputs)
    return of_gates, of_kernel, of_carry, None, None


run.defvjp(_forward, _backward)


def _times(x: jax.Array, factor: jax.Array | None) -> jax.Array:
    return x if factor is None else x * factor


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns a matrix product in the kernel's dtype, summed in that of `x`."""
    return jnp.dot(x.astype(kernel.dtype), kernel, preferred_element_type=x.dtype)

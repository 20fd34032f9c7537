"""Tests optimizers that send a message in place of the gradient, and the stages of their updates."""

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import reducing


def test_stages_and_nothing_else_differ_from_optax() -> None:
    plain = optax.sgd(0.5)

    def message(grads, state, params, *, stage, num_devices):
        return grads, lambda sums: plain.update(sums, state, params)

    tx = reducing.Reducing(
        plain.init, plain.update, message, lambda update: "sent" if update > 2 else None
    )
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert [reducing.stage_of(tx, update) for update in (0, 2, 3)] == [None, None, "sent"]
    params = {"a": jnp.ones(3)}
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["a"].tolist() == [-0.5] * 3
    sent, apply = tx.message(params, tx.init(params), params, stage="sent", num_devices=2)
    updates, _ = apply(jax.tree.map(lambda leaf: 2 * leaf, sent))
    assert updates["a"].tolist() == [-1.0] * 3


def test_others_have_no_stage() -> None:
    assert reducing.stage_of(optax.sgd(0.5), 7) is None

"""Optimizers that sum over devices: how they are told, and their stages."""

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.optim import reducing


def test_stages_and_nothing_else_differ_from_optax() -> None:
    plain = optax.sgd(0.5)
    tx = reducing.Reducing(plain.init, plain.update, lambda update: "sent" if update > 2 else None)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert [reducing.stage_of(tx, update) for update in (0, 2, 3)] == [None, None, "sent"]
    params = {"a": jnp.ones(3)}
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["a"].tolist() == [-0.5] * 3


def test_others_have_no_stage() -> None:
    assert reducing.stage_of(optax.sgd(0.5), 7) is None

"""Tests 0/1 Adam: compares the stage of each update with counters like DeepSpeed's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim.staged import Stage

LOCAL = Stage("local step", local=True)


def by_counters(updates, freeze, var_scaler, local_scaler, clipper, discard_first):
    """Returns the name of each update's stage, from counters that advance update by update."""
    names, interval, counter, between, steps = [], 1, 0, 1, 0
    for number in range(1, updates + 1):
        if discard_first and number == 1:
            names.append("first")
            continue
        if number <= freeze:
            changes = number % interval == 0
            names.append("variance" if changes else "gradient")
            counter += changes
            if counter == var_scaler:
                counter, interval = 0, 2 * interval
            continue
        sync = "synchronisation" if steps else "first synchronisation"
        names.append(sync if number % between == 0 else "local step")
        steps += 1
        if steps % local_scaler == 0:
            between = min(clipper, 2 * between)
    return names


@pytest.mark.parametrize(
    "arguments", [*itertools.product((1, 7, 40), (1, 3), (1, 4), (1, 6, 16), (False, True))]
)
def test_stages_are_those_of_counters(arguments):
    if arguments[-1] and arguments[0] == 1:
        return  # no update remains before second moments are frozen
    freeze, var_scaler, local_scaler, clipper, discard_first = arguments
    tx = optim.zero_one_adam(
        0.1, freeze, var_scaler, local_scaler, clipper, discard_first=discard_first
    )
    assert [tx.stage(n).name for n in range(100)] == by_counters(100, *arguments)


def test_stages_are_the_same_in_a_program():
    arguments = (6, 2, 2, 4)
    tx, params = optim.zero_one_adam(0.1, *arguments), {"w": jnp.ones(3)}
    update, state = jax.jit(tx.update), tx.init(params)
    for number in range(14):
        grads = {"w": jnp.full(3, number + 1.0)}
        expected = tx.update(grads, state, params, stage=tx.stage(number))
        updates, state = update(grads, state, params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
            (updates, state),
            expected,
        )
    assert update._cache_size() == 1


def test_late_updates_have_stages():
    tx = optim.zero_one_adam(0.1, 2**31 - 1)
    assert tx.stage(2**31 - 3).name in ("variance", "gradient")
    assert optim.zero_one_adam(0.1, 10, local_step_scaler=2**30).stage(2**31 - 3).name == (
        "synchronisation"
    )


def test_local_steps_and_their_mean():
    """Two devices take four local steps, and then move by the mean of their displacements."""
    tx = optim.zero_one_adam(
        0.1, var_freeze_step=1, local_step_scaler=1, local_step_clipper=4, eps=0.1, b2=0.5
    )
    start = {"w": jnp.array([1.0, -1.0])}
    first = {"w": jnp.array([2.0, 1.0])}
    updates, state = tx.update(first, tx.init(start), start)
    start = optax.apply_updates(start, updates)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), (start, state))

    def step(stage, grads, params, state):
        if stage.reduces:
            message, apply = tx.message(grads, state, params, stage=stage, num_devices=2)
            updates, state = apply(jax.lax.psum(message, "d"))
        else:
            updates, state = tx.update(grads, state, params, stage=stage, num_devices=2)
        return optax.apply_updates(params, updates), state

    names = []
    for number in range(1, 12):
        stage = tx.stage(number)
        names.append(stage.name)
        grads = {"w": jnp.array([[1.0, 0.5], [-0.2, 1.0]]) * number / 2}
        before = pair
        pair = jax.vmap(lambda g, p, s, stage=stage: step(stage, g, p, s), axis_name="d")(
            grads, *pair
        )
        params, state = pair
        distance = float(jnp.abs(params["w"][0] - params["w"][1]).max())
        if stage.reduces:
            assert distance < 1e-6
            np.testing.assert_array_equal(state.mu["w"][0], state.mu["w"][1])
            # The new parameters are the mean over devices of the parameters after one more local step.
            own, _ = jax.vmap(lambda g, p, s: step(LOCAL, g, p, s), axis_name="d")(grads, *before)
            np.testing.assert_allclose(params["w"][0], own["w"].mean(0), rtol=1e-5)
            assert not state.moved["w"].any() and not state.rates["w"].any()
        else:
            assert distance > 1e-3
    assert names.count("local step") >= 5 and names[-1] == "synchronisation"

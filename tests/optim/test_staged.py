"""Tests stages from the count or an argument, sums over devices, masks, and invalid arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from lamb_tpu.optim import reducing, staged
from tests.optim.catalogue import REDUCING

PARAMS = {"kernel": jnp.arange(12.0).reshape(4, 3) - 5.0, "bias": jnp.ones(3)}
FREEZES = {
    "onebit_adam": {"freeze_step": 2},
    "onebit_lamb": {"freeze_step": 2},
    "zero_one_adam": {"var_freeze_step": 4, "var_update_scaler": 1},
}


def gradients(number):
    rng = np.random.default_rng(number)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), PARAMS)


def trained(tx, updates=7, given=None, step=None):
    """Returns parameters and state; `given` maps the number of an update to its extra arguments."""
    params, state = PARAMS, tx.init(PARAMS)
    step = step or tx.update
    for number in range(updates):
        steps, state = step(gradients(number), state, params, **(given(number) if given else {}))
        params = optax.apply_updates(params, steps)
    return params, state


def assert_close(actual, expected, rtol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), actual, expected
    )


@pytest.mark.parametrize("discard_first", [False, True])
@pytest.mark.parametrize("name", REDUCING)
def test_the_stage_by_the_count_is_the_one_that_is_given(name, discard_first):
    config = {"name": name, "weight_decay": 0.1, "discard_first": discard_first}
    tx = optim.make_optimizer(config | FREEZES[name], 0.01)
    expected = trained(tx)
    assert_close(trained(tx, step=jax.jit(tx.update)), expected)
    assert_close(trained(tx, given=lambda number: {"stage": tx.stage(number)}), expected)
    assert_close(trained(tx, given=lambda number: {"stage": tx.at(number)}), expected)
    assert len({tx.stage(number) for number in range(7)}) > 1 + discard_first
    assert [tx.at(n) for n in range(7)] == [
        tx.stage(n) if tx.stage(n).local else None for n in range(7)
    ]
    first, _ = trained(tx, 1)
    assert all((first[key] == PARAMS[key]).all() == discard_first for key in PARAMS)


@pytest.mark.long
@pytest.mark.parametrize("name", REDUCING)
def test_exact_sums_over_devices_are_one_device(name):
    """Four devices with shares of the gradient equal one device if messages are summed exactly."""
    tx = optim.make_optimizer({"name": name, "weight_decay": 0.1} | FREEZES[name], 0.01)
    shares = jnp.asarray([0.1, 0.2, 0.3, 0.4])

    def step(grads, state, params, stage):
        def device(share):
            local = jax.tree.map(lambda g: share * g, grads)
            if not stage.local:
                return tx.update(jax.lax.psum(local, "d"), state, params, stage=stage)
            message, apply = tx.message(local, state, params, stage=stage, num_devices=4)
            return apply(jax.lax.psum(message, "d"))

        actual = jax.vmap(device, axis_name="d")(shares)
        for leaf in jax.tree.leaves(actual):  # equal on each device
            np.testing.assert_array_equal(leaf[0], leaf[3])
        return jax.tree.map(lambda leaf: leaf[0], actual)

    actual = trained(tx, given=lambda number: {"stage": tx.stage(number)}, step=step)
    assert_close(actual, trained(tx), 1e-5)


def test_the_local_gradient_is_clipped():
    tx = optim.onebit_adam(0.1, freeze_step=1, clip_global_norm=1.0)
    grads = jax.tree.map(lambda p: 0.0 * p + 3.0, PARAMS)  # this device's share of two
    message, apply = tx.message(
        grads, tx.init(PARAMS), PARAMS, stage=staged.COMPRESSED, num_devices=2
    )
    _, state = apply(jax.tree.map(lambda leaf: 2 * leaf, message))
    assert float(state.mu["bias"][0]) == 0.0  # masked: no gradient in the warm-up
    tx = optim.onebit_adam(0.1, freeze_step=1, clip_global_norm=1.0, mask_unseen=False)
    message, apply = tx.message(
        grads, tx.init(PARAMS), PARAMS, stage=staged.COMPRESSED, num_devices=2
    )
    _, state = apply(jax.tree.map(lambda leaf: 2 * leaf, message))
    np.testing.assert_allclose(optax.tree.norm(state.mu), 0.1, rtol=1e-5)


@pytest.mark.parametrize("metadata, unmasked", [({}, [0, 3]), ({"layer_axes": (0,)}, None)])
def test_masked_rows(metadata, unmasked):
    tx = optim.onebit_adam(
        0.1,
        freeze_step=1,
        masked_rows=[("kernel", (1, 3))],
        rules=[("", metadata)] if not metadata else [("kernel", metadata), ("", {})],
    )
    _, state = trained(tx, 3)
    actual = np.asarray(state.mu["kernel"])
    if unmasked is None:  # rows are counted per layer
        assert (actual[:, 1:3] == 0).all() and (actual[:, 0] != 0).all()
    else:
        assert (actual[1:3] == 0).all() and (actual[unmasked] != 0).all()
    assert (state.mu["bias"] != 0).all()


def test_masked_rows_find_nnx_paths():
    params = {name: {"value": leaf} for name, leaf in PARAMS.items()}
    tx = optim.onebit_adam(0.1, freeze_step=1, masked_rows=[("^kernel$", (1, 3))])
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert (state.mu["kernel"]["value"][1:3] == 0).all()
    assert (state.mu["kernel"]["value"][0] != 0).all()


def test_rows_that_are_not_there():
    tx = optim.onebit_adam(0.1, freeze_step=1, masked_rows=[("bias", (1, 9))])
    with pytest.raises(
        ValueError, match=r"masked_rows=\(1, 9\) must be a range of rows of the parameter 'bias'"
    ):
        trained(tx, 2)


@pytest.mark.parametrize("stage", [None, staged.WARM_UP, staged.BY_COUNT])
def test_stages_that_send_no_message(stage):
    tx = optim.onebit_lamb(0.1)
    with pytest.raises(ValueError, match="^stage=.* must be a stage that sends a message"):
        tx.message(PARAMS, tx.init(PARAMS), PARAMS, stage=stage)


def test_optimizers_whose_devices_diverge():
    assert staged.leaves_devices_apart(optim.zero_one_adam(0.1, local_step_clipper=2))
    for tx in (optim.zero_one_adam(0.1), optim.onebit_lamb(0.1), optim.lamb(0.1)):
        assert not staged.leaves_devices_apart(tx)
    assert isinstance(optim.onebit_adam(0.1), reducing.Reducing)


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("field", [{"l2": 0.1}, {"stochastic_rounding": True}])
def test_nothing_stands_around_them(name, field):
    with pytest.raises(ValueError, match="sums over devices itself"):
        optim.make_optimizer({"name": name, **field}, 0.1)


FROZEN = {
    "onebit_adam": {"freeze_step": 1},
    "onebit_lamb": {"freeze_step": 1},
    "zero_one_adam": {"var_freeze_step": 1},
}


@pytest.mark.parametrize("name", REDUCING)
def test_one_bit_does_not_move_elements_of_tiny_second_moments_far(name):
    """One element has a gradient of 1e-6 and the others of 1, like pixels at the edge of an image."""
    params = {"w": jnp.ones(4)}
    first = {"w": jnp.array([1.0, -1.0, 1.0, 1e-6])}

    def moved(**arguments):
        tx = optim.make_optimizer(
            {"name": name, "rules": "all", "weight_decay": 0.0, **FROZEN[name], **arguments}, 0.01
        )
        _, state = tx.update(first, tx.init(params), params)

        def in_one_bit(tree):
            return jax.tree.map(
                lambda x: jnp.sqrt(jnp.mean(x * x)) * jnp.where(x >= 0, 1.0, -1.0), tree
            )

        message, apply = tx.message(first, state, params, stage=tx.stage(1))
        updates, _ = apply(in_one_bit(message))
        return np.abs(np.asarray(updates["w"]))

    *usual, tiny = moved()
    assert max(usual) > 1e-3 and tiny < 12 * max(usual)
    *usual, tiny = moved(relative_floor=0.0)
    assert tiny > 1e3 * max(usual)
    *usual, tiny = moved(relative_floor=0.5)
    assert tiny < 2.4 * max(usual)


@pytest.mark.parametrize("name", REDUCING)
def test_the_preset_is_the_formula_of_deepspeed(name):
    given = {"relative_floor": 0.0, "mask_unseen": False, "discard_first": True}
    expected = trained(optim.make_optimizer({"name": name, **FREEZES[name], **given}, 0.01), 5)
    preset = {"name": name, "preset": "deepspeed", **FREEZES[name]}
    assert_close(trained(optim.make_optimizer(preset, 0.01), 5), expected)


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize("floor", [-0.1, 1.0, float("nan"), None])
def test_floors_out_of_range(name, floor):
    with pytest.raises(ValueError, match="^relative_floor=.* must be at least 0 and below 1"):
        optim.make_optimizer({"name": name, "relative_floor": floor}, 0.01)


def test_the_floor_is_of_each_layer_of_a_stack():
    nu = jnp.array([[4.0, 0.0], [400.0, 0.0]])
    actual = staged.denominator(nu, optim.ParameterMetadata(layer_axes=(0,)), 0.0, 0.5)
    np.testing.assert_allclose(actual, [[2.0, 0.5 * 2**0.5], [20.0, 0.5 * 200**0.5]], rtol=1e-6)
    assert (staged.denominator(nu, optim.ParameterMetadata(), 1.0, 0.0) == jnp.sqrt(nu) + 1).all()

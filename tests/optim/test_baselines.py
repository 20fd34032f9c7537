"""Tests that Lion, Adafactor, Muon and schedule-free AdamW equal Optax's and reject unsupported input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lamb_tpu import optim
from lamb_tpu.optim import schedule_free
from lamb_tpu.optim.factory import make_optimizer
from tests.optim import runs

PARAMS, GRADS = runs.case(steps=4)
PARAMS["wide"] = np.random.default_rng(2).standard_normal((130, 140))
for grad in GRADS:
    grad["wide"] = np.random.default_rng(3).standard_normal((130, 140))
FLOAT32 = jax.tree.map(np.float32, PARAMS)
MASK = {name: name not in ("bias", "scale") for name in PARAMS}
RULES = [("^(bias|scale)$", {"decay": False}), ("", {})]
RATE = optim.warmup(0.1, 10, 2)


def trained(tx, params=FLOAT32):
    return runs.after(tx, params, jax.tree.map(np.float32, GRADS))


@pytest.mark.long
@pytest.mark.parametrize(
    "config, reference",
    [
        (
            {"name": "lion", "b2": 0.98, "weight_decay": 0.3},
            optax.lion(RATE, b2=0.98, weight_decay=0.3, mask=MASK),
        ),
        (
            {"name": "adafactor", "weight_decay": 0.01, "momentum": 0.9},
            optax.adafactor(RATE, weight_decay_rate=0.01, weight_decay_mask=MASK, momentum=0.9),
        ),
        (
            {"name": "adafactor", "multiply_by_parameter_scale": False, "clipping_threshold": None},
            optax.adafactor(RATE, multiply_by_parameter_scale=False, clipping_threshold=None),
        ),
        ({"name": "muon", "weight_decay": 0.1}, optax.contrib.muon(RATE, weight_decay=0.1)),
        (
            {"name": "muon", "ns_steps": 3, "consistent_rms": 0.2, "nesterov": False},
            optax.contrib.muon(RATE, ns_steps=3, consistent_rms=0.2, nesterov=False),
        ),
        (
            {"name": "schedule_free_adamw", "b1": 0.95},
            optax.contrib.schedule_free_adamw(0.1, b1=0.95),
        ),
    ],
)
def test_they_are_those_of_optax(config, reference):
    rules = RULES
    if config["name"] == "muon":  # Optax's muon decays only matrices
        rules = [
            (f"^({'|'.join(n for n in PARAMS if PARAMS[n].ndim < 2)})$", {"decay": False}),
            ("", {}),
        ]
    rate = 0.1 if config["name"] == "schedule_free_adamw" else RATE
    actual, _ = trained(make_optimizer({**config, "rules": rules}, rate))
    expected, _ = trained(reference)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), actual, expected
    )


@pytest.mark.parametrize("name", ["lion", "adafactor", "muon", "schedule_free_adamw"])
def test_moments_of_bfloat16_weights_are_float32(name):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), FLOAT32)
    tx = make_optimizer({"name": name}, 0.01)
    actual, state = trained(tx, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.bfloat16.dtype}
    types = {leaf.dtype for leaf in jax.tree.leaves(state)}
    assert types <= {jnp.dtype("float32"), jnp.dtype("int32")}


def test_muon_orthogonalises_each_matrix_of_a_stack():
    stack, *grads = (np.random.default_rng(seed).standard_normal((3, 6, 4)) for seed in range(3))
    rules = [("", {"layer_axes": (0,)})]
    with jax.enable_x64(True):
        together, _ = runs.after(
            make_optimizer({"name": "muon", "rules": rules}, 0.1), stack, grads
        )
        separate, _ = runs.after(
            make_optimizer({"name": "muon"}, 0.1), list(stack), [list(grad) for grad in grads]
        )
        np.testing.assert_allclose(together, np.stack(separate), atol=1e-11)


def test_leaves_that_do_not_adapt_take_adam():
    rules = [("^wide$", {"adapt": False}), ("", {})]
    actual, _ = trained(make_optimizer({"name": "muon", "rules": rules}, RATE))
    expected, _ = trained(optax.nadam(RATE))
    np.testing.assert_allclose(actual["wide"], expected["wide"], rtol=2e-6, atol=2e-6)
    assert not np.allclose(actual["kernel"], expected["kernel"], atol=1e-2)


@pytest.mark.parametrize(
    "config, call, message",
    [
        (
            {"name": "adafactor", "rules": [("", {"layer_axes": (0,)})]},
            "init",
            "adafactor cannot treat the layers of a stack separately; leave out the layer_axes of "
            "the parameter 'w'",
        ),
        (
            {"name": "adafactor", "axis_name": "data"},
            "update",
            "adafactor needs full tensors, so axis_name must be None for the parameter 'w'",
        ),
        (
            {"name": "muon", "axis_name": "data"},
            "update",
            "muon needs full matrices; axis_name must be None for 'w'",
        ),
    ],
)
def test_unsupported_input_is_rejected(config, call, message):
    params = {"w": jnp.ones((4, 4))}
    tx = make_optimizer(config, 0.1)
    with pytest.raises(ValueError, match=message):
        state = tx.init(params)
        assert call == "update"
        tx.update(params, state, params)


def test_muon_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        tx = make_optimizer({"name": "muon"}, 0.1)
        params = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("data")))}
        with pytest.raises(ValueError, match="full matrices on an Explicit mesh; replicate 'w'"):
            tx.update(params, tx.init(params), params)
        full = {"w": jnp.ones((8, 8))}
        tx.update(full, tx.init(full), full)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"name": "adafactor", "clipping_threshold": 0.0}, "clipping_threshold=0 must be above 0"),
        ({"name": "adafactor", "momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"name": "muon", "ns_steps": 0}, "ns_steps=0 must be a whole number of at least 1"),
        ({"name": "muon", "beta": 1.0}, "beta=1.0 must be at least 0 and below 1"),
        ({"name": "muon", "consistent_rms": -1.0}, "consistent_rms=-1.0 must be at least 0"),
        (
            {"name": "schedule_free_adamw", "b1": 0.0},
            "b1=0 must be above 0, or the average would be lost",
        ),
    ],
)
def test_bad_arguments(config, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(config, 0.1)


# With the powers r = 0 and p = 2 this is Optax's average, but Optax uses the next update's rate.
@pytest.mark.parametrize("powers", [(0.0, 2.0), (1.0, 2.0), (2.0, 0.0), (0.5, 1.0)])
def test_the_average_weights_each_update_by_a_power_of_its_number(powers):
    step_power, rate_power = powers
    rates = [0.1, 0.5, 0.3]  # the largest rate so far counts
    params = {"w": jnp.zeros(1)}
    tx = make_optimizer(
        {
            "name": "schedule_free_adamw",
            "weight_step_power": step_power,
            "weight_lr_power": rate_power,
        },
        lambda t: jnp.array(rates)[t],
    )
    state, points = tx.init(params), []
    for _ in range(3):
        updates, state = jax.jit(tx.update)({"w": jnp.ones(1)}, state, params)
        params = optax.apply_updates(params, updates)
        points.append(float(state.z["w"][0]))
    weights = np.arange(1, 4) ** step_power * np.maximum.accumulate(rates) ** rate_power
    np.testing.assert_allclose(
        optim.evaluation_params(state, params)["w"][0],
        np.average(points, weights=weights),
        rtol=1e-5,
    )
    np.testing.assert_allclose(state.max_lr, 0.5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optim.clip_global_norm(1e6), tx),
        lambda tx: optax.partition(
            {"a": tx, "b": optax.sgd(0.1)},
            {name: "b" if name == "bias" else "a" for name in PARAMS},
        ),
        lambda tx: optim.stochastic_rounding(tx),
    ],
)
def test_evaluation_params_wherever_the_state_lies(wrap):
    tx = make_optimizer({"name": "schedule_free_adamw"}, 0.1)
    params, state = trained(wrap(tx))
    plain, alone = trained(tx)
    actual = optim.evaluation_params(state, params)
    expected = optax.contrib.schedule_free_eval_params(alone, plain)
    for name in PARAMS:
        if "b" in getattr(state, "inner_states", ()) and name == "bias":
            np.testing.assert_array_equal(actual[name], params[name])
        else:
            np.testing.assert_allclose(actual[name], expected[name], rtol=2e-6, atol=2e-6)


def test_evaluation_params_of_a_restored_checkpoint():
    tx = make_optimizer({"name": "schedule_free_adamw", "clip_global_norm": 1.0}, 0.1)
    params, state = trained(tx)
    restored = [{}, state[1]._asdict()]
    some = {"kernel": params["kernel"]}
    assert schedule_free.keeps_evaluation_params(restored)
    np.testing.assert_array_equal(
        optim.evaluation_params(restored, some)["kernel"],
        optim.evaluation_params(state, params)["kernel"],
    )
    adam = optax.adam(0.1).init(params)
    assert not schedule_free.keeps_evaluation_params(adam)
    assert optim.evaluation_params(adam, params) == params


def test_muon_flattens_a_kernel_to_rows_and_columns():
    rng = np.random.default_rng(5)
    table = jnp.float32(rng.standard_normal((6, 5)))
    kernel, *grads = (jnp.float32(rng.standard_normal((3, 2, 4, 7))) for _ in range(3))
    rules = [("kernel", {"matrix_axes": ((0, 1, 2), (3,))}), ("", {"matrix_axes": ()})]
    actual, _ = runs.after(
        make_optimizer({"name": "muon", "rules": rules}, 0.1),
        {"kernel": kernel, "table": table},
        [{"kernel": grad, "table": table} for grad in grads],
    )
    expected, _ = runs.after(
        make_optimizer({"name": "muon"}, 0.1),
        kernel.reshape(24, 7),
        [grad.reshape(24, 7) for grad in grads],
    )
    np.testing.assert_allclose(actual["kernel"].reshape(24, 7), expected, rtol=1e-5, atol=1e-5)
    adam, _ = runs.after(optax.nadam(0.1), table, [table] * 2)
    np.testing.assert_allclose(actual["table"], adam, rtol=1e-5, atol=1e-6)

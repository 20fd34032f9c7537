"""Tests 1-bit LAMB: the warm-up, equal RMS of all momenta, layers of a stack, and bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu import optim
from tests.optim.runs import after

RULES = [("stack", {"layer_axes": (0,)}), ("bias", {"adapt": False, "decay": False}), ("", {})]


def case(seed, layers=3):
    rng = np.random.default_rng(seed)
    scale = np.array([0.01, 1.0, 30.0])[:, None, None]
    return {
        "stack": jnp.asarray(scale * rng.standard_normal((layers, 4, 5)), jnp.float32),
        "bias": jnp.asarray(rng.standard_normal(5), jnp.float32),
    }


def test_the_warm_up_is_lamb():
    arguments = {"weight_decay": 0.1, "rules": RULES, "ratio_bounds": (0.1, 2.0), "eps": 1e-8}
    lamb = optim.lamb(0.01, bias_correction="none", **arguments)
    grads = [case(seed) for seed in range(1, 5)]
    actual, _ = after(optim.onebit_lamb(0.01, **arguments), case(0), grads)
    expected, _ = after(lamb, case(0), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), actual, expected)


def test_a_stack_is_its_layers():
    """A stack has one coefficient, factor and scaling per layer, as if layers were leaves."""

    def unstacked(tree):
        return {"bias": tree["bias"], **{f"stack{i}": leaf for i, leaf in enumerate(tree["stack"])}}

    grads = [case(seed) for seed in range(1, 7)]
    arguments = {"freeze_step": 3, "weight_decay": 0.1, "rules": RULES, "collect": True}
    actual, state = after(optim.onebit_lamb(0.01, **arguments), case(0), grads)
    rules = [("bias", {"adapt": False, "decay": False}), ("", {})]
    expected, other = after(
        optim.onebit_lamb(0.01, **arguments | {"rules": rules}),
        unstacked(case(0)),
        [unstacked(grad) for grad in grads],
    )
    for key, leaf in unstacked(actual).items():
        np.testing.assert_allclose(leaf, expected[key], rtol=1e-5, atol=1e-6)
    for field in ("coefficient", "factor", "scaling"):
        stack = getattr(state, field)["stack"]
        assert stack.shape == (3, 1, 1) and len(np.unique(stack)) == 3
        for i in range(3):
            np.testing.assert_allclose(
                stack[i].ravel(), getattr(other, field)[f"stack{i}"].ravel(), rtol=1e-5
            )
    assert state.diagnostics.ratios["bias"] == 1.0


@pytest.mark.long
def test_momentum_is_sent_in_one_size():
    tx, params = optim.onebit_lamb(0.01, freeze_step=2, rules=RULES), case(0)
    _, state = after(tx, params, [case(1), case(1)])
    sent, apply = tx.message(case(1), state, params, stage=tx.stage(2))
    _, sent_state = apply(sent)
    layers = [*sent["stack"], sent["bias"]]
    sizes = [float(jnp.sqrt(jnp.mean(layer**2))) for layer in layers]
    np.testing.assert_allclose(sizes, np.mean(sizes), rtol=1e-4)
    for key, leaf in sent_state.mu.items():
        np.testing.assert_allclose(leaf, 0.9 * state.mu[key] + 0.1 * case(1)[key], rtol=1e-5)


def test_momentum_of_zeros_has_no_size():
    tx, params = optim.onebit_lamb(0.01, freeze_step=1, rules=RULES), case(0)
    still = case(1) | {"bias": jnp.zeros(5)}
    actual, state = after(tx, params, [still, still])
    assert state.scaling["bias"] == 1.0
    np.testing.assert_array_equal(actual["bias"], params["bias"])


@pytest.mark.parametrize("scale, expected", [(100.0, 0.9), (0.0, 1.1)])
def test_the_factor_moves_by_the_threshold(scale, expected):
    """If gradients are larger than in the warm-up, steps become shorter, and vice versa."""
    tx, params = optim.onebit_lamb(0.01, freeze_step=5, b2=0.5), {"w": jnp.array([3.0, 4.0])}
    grads = [{"w": jnp.array([1.0, 2.0])}] * 5
    state = after(tx, params, grads)[1]
    # The momentum after a gradient that is `scale` times as large as in the warm-up.
    _, state = tx.update({"w": scale * grads[0]["w"]}, state, params)
    np.testing.assert_allclose(state.factor["w"], expected, rtol=1e-5)

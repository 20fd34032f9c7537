"""LAMB against other implementations, and the ways in which LAMB is known to go wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lamb_tpu import optim
from tests.optim import goldens

NO_CORRECTION = {"bias_correction": False}
NORM_AT_MOST_10 = {"bias_correction": False, "phi_bounds": (0.0, 10.0)}
TXL = {**NORM_AT_MOST_10, "ratio_eps": 1e-6}
BOTH, DECAY = "no decay, no ratio", "no decay"


@pytest.mark.parametrize("implementation, setting, rules, options", [
    ("timm_lamb", "bigeps", "all", {}),
    ("timm_lamb", "clip1", "all", {"clip": 1.0}),
    ("timm_lamb", "excl", BOTH, {}),
    ("timm_lamb", "exclwd", DECAY, {}),
    ("timm_lamb", "nowd", "all", {}),
    ("timm_lamb", "warm", BOTH, {}),
    ("timm_lamb", "nobc", "all", NO_CORRECTION),
    ("apex_fusedlamb", "b2_098", "all", {}),
    ("apex_fusedlamb", "exclwd_nvlamb", DECAY, {}),
    ("apex_fusedlamb", "nowd_nvlamb", "all", {}),
    ("apex_fusedlamb", "nobc", "all", NO_CORRECTION),
    ("algoperf_torch_lamb", "eps1e8", "all", {}),
    ("algoperf_torch_lamb", "nowd", "all", {}),
    ("algoperf_torch_lamb", "warm", "all", {}),
    ("optax_lamb", "bigeps", "all", {}),
    ("optax_lamb", "exclwd", DECAY, {}),
    ("optax_lamb", "warm", DECAY, {}),
    ("tfa_lamb", "wd", "all", {}),
    ("tfa_lamb", "b2_098", "all", {}),
    ("tfa_lamb", "bigeps", "all", {}),
    ("tfa_lamb", "clip1", "all", {"clip": 1.0}),
    ("tfa_lamb", "excl", BOTH, {}),
    ("tfa_lamb", "exclwd", DECAY, {}),
    ("tfa_lamb", "nowd", "all", {}),
    ("tfa_lamb", "warm", BOTH, {}),
    ("mlperf_bert_tf_lamb", "wd", "all", {}),
    ("mlperf_bert_tf_lamb", "clip1", "all", {"clip": 1.0}),
    ("mlperf_bert_tf_lamb", "excl", BOTH, {}),
    ("mlperf_bert_tf_lamb", "warm_clip", BOTH, {"clip": 1.0}),
    ("mlperf_bert_jax_lamb", "wd_layers24", "all", {}),
    ("nvidia_dle_tf_bert_lamb", "exclwd", DECAY, {}),
    ("nvidia_dle_tf_bert_lamb", "clip1_warm", DECAY, {"clip": 1.0}),
    ("google_albert_lamb", "wd", "all", NO_CORRECTION),
    ("google_albert_lamb", "bigeps", "all", NO_CORRECTION),
    ("google_albert_lamb", "exclwd", DECAY, NO_CORRECTION),
    ("nvidia_dle_tf_txl_lamb", "wd", "all", NORM_AT_MOST_10),
    ("nvidia_dle_tf_txl_lamb", "nowd", "all", NORM_AT_MOST_10),
    ("cybertronai_lamb", "warm", DECAY, NORM_AT_MOST_10),
    ("cybertronai_lamb", "adam", "no ratio anywhere", NO_CORRECTION),
    ("torch_optimizer_lamb", "wd", "all", NORM_AT_MOST_10),
    ("nvidia_dle_txl_lamb", "wd", "all", TXL),
    ("nvidia_dle_txl_lamb", "exclwd", DECAY, TXL),
    ("nvidia_dle_txl_lamb", "nowd", "all", TXL),
    ("nvidia_dle_txl_jitlamb", "bigeps", "all", {**TXL, "ratio_eps": 1e-3}),
    ("nvidia_dle_bart_lamb", "wd", "all", TXL),
    ("flax_optim_lamb", "warm", "all", {"zero_ratio": 0.0}),
])
def test_golden(implementation, setting, rules, options):
    hyper, record, inputs = goldens.load("lamb", implementation, setting)
    tx = _from_hyper(hyper, record, goldens.RULES[rules], options)
    # In a float64 run Addons' hyper-parameters and JITLamb's ratio are still float32.
    float64 = hyper["float64"] and implementation not in ("tfa_lamb", "nvidia_dle_txl_jitlamb")
    goldens.check(tx, record, inputs, float64)


def test_golden_of_stacked_layers():
    hyper, record, inputs = goldens.load("lamb", "mlperf_bert_jax_lamb", "wd_layers8")
    # That code takes any matrix whose first axis is num_layers (8 here) for a stack.
    rules = [("^(dense|zero_init)/kernel", {"layer_axes": (0,)}), ("", {})]
    goldens.check(_from_hyper(hyper, record, rules, {}), record, inputs, hyper["float64"])


def test_golden_ratios_are_read_from_the_state():
    hyper, record, inputs = goldens.load("lamb", "timm_lamb", "excl")
    tx = _from_hyper(hyper, record, goldens.RULES[BOTH], {"collect": True})
    names = [name[6:] for name in record if name.startswith("trust/")]
    params = {name: jnp.asarray(inputs["param/" + name]) for name in names}
    state = tx.init(params)
    for step in range(3):
        grads = {name: jnp.asarray(inputs["wgrad/" + name][0, step]) for name in names}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for name in names:
            assert state.ratios[name].dtype == jnp.float32
            np.testing.assert_allclose(
                state.ratios[name], record["trust/" + name][step], rtol=2e-6, err_msg=name
            )


def _from_hyper(hyper, record, rules, options):
    options = dict(options)
    clip = options.pop("clip", None)
    tx = optim.lamb(
        goldens.rate(record),
        b1=hyper["beta1"],
        b2=hyper.get("beta_2", hyper["beta2"]),
        eps=hyper.get("epsilon", hyper["eps"]),
        weight_decay=hyper.get("wd", hyper["weight_decay"]),
        rules=rules,
        **options,
    )
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx


def test_no_weight_decay_still_adapts():
    params = {"kernel": jnp.array([30.0, 40.0])}
    tx = optim.lamb(0.1, weight_decay=0.0)
    updates, _ = tx.update({"kernel": jnp.ones(2)}, tx.init(params), params)
    np.testing.assert_allclose(jnp.linalg.norm(updates["kernel"]), 0.1 * 50.0, rtol=1e-6)


def test_bfloat16_parameters_keep_float32_moments():
    grads = np.random.default_rng(0).standard_normal((50, 4, 4)).astype(np.float32)
    grads = np.asarray(jnp.asarray(grads, jnp.bfloat16), np.float32)
    tx = optim.lamb(0.0, b2=0.999)
    nus = []
    for dtype in (jnp.bfloat16, jnp.float32):
        params = {"kernel": jnp.ones((4, 4), dtype)}
        state = tx.init(params)
        for grad in grads:
            _, state = tx.update({"kernel": jnp.asarray(grad, dtype)}, state, params)
        assert state.nu["kernel"].dtype == jnp.float32
        nus.append(state.nu["kernel"])
    # In bfloat16 1 - b2 is 0 and b2 is 1: the second moments would stay where they are.
    np.testing.assert_allclose(nus[0], nus[1], rtol=1e-6)
    expected = sum(0.001 * 0.999 ** (49 - t) * grads[t].astype(np.float64) ** 2 for t in range(50))
    np.testing.assert_allclose(nus[0], expected, rtol=1e-5)


def test_moments_in_the_dtype_asked_for():
    params = {"kernel": jnp.ones((2, 2))}
    tx = optim.lamb(0.1, mu_dtype=jnp.bfloat16, nu_dtype=jnp.float16)
    _, state = tx.update(params, tx.init(params), params)
    assert state.mu["kernel"].dtype == jnp.bfloat16
    assert state.nu["kernel"].dtype == jnp.float16


@pytest.mark.parametrize("base", [0.0, 0.9, 0.999, 0.999999])
def test_bias_correction_does_not_cancel(base):
    from lamb_tpu.optim.lamb import one_minus_power

    for count in (1, 2, 1000, 10**7):
        value = one_minus_power(base, jnp.int32(count), jnp.float32)
        assert abs(float(value) - -np.expm1(count * np.log(base or 1e-300))) <= 3e-7 * float(value)


@pytest.mark.parametrize("compute", ["eager", "jit"])
def test_large_tensors_take_the_same_norms(compute):
    # From 4,096 values on, sums are taken in windows on the CPU.
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.standard_normal((3, 48, 64)), jnp.float32)}
    grads = {"kernel": jnp.asarray(rng.standard_normal((3, 48, 64)), jnp.float32)}
    tx = optim.lamb(0.1, rules=[("", {"layer_axes": (0,)})], collect=True)
    update = jax.jit(tx.update) if compute == "jit" else tx.update
    _, state = update(grads, tx.init(params), params)
    weights, grad = (np.asarray(tree["kernel"], np.float64) for tree in (params, grads))
    direction = grad / (np.abs(grad) + 1e-6) + 0.01 * weights
    expected = [np.linalg.norm(weights[i]) / np.linalg.norm(direction[i]) for i in range(3)]
    np.testing.assert_allclose(state.ratios["kernel"], expected, rtol=2e-6)


@pytest.mark.parametrize("arguments, message", [
    ({"b1": 1.0}, "b1 must be at least 0 and below 1, not 1.0"),
    ({"b2": -0.1}, "b2 .* not -0.1"),
    ({"eps": -1e-6}, "eps .* not -1e-06"),
    ({"weight_decay": -1}, "weight_decay .* not -1"),
    ({"learning_rate": -1.0}, "learning_rate .* not -1.0"),
    ({"learning_rate": float("nan")}, "learning_rate .* not nan"),
    ({"norm": "l3"}, "norm must be one of l2, l1, linf, not 'l3'"),
    ({"phi_bounds": (2.0, 1.0)}, r"phi_bounds .* \(2.0, 1.0\)"),
    ({"ratio_eps": -1.0}, "ratio_eps .* not -1.0"),
    ({"zero_ratio": -1.0}, "zero_ratio .* not -1.0"),
    ({"rules": "none"}, "'none' is no preset; the presets are all, no_bias_no_norm"),
])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.lamb(**{"learning_rate": 0.1, **arguments})


def test_params_are_required():
    tx = optim.lamb(0.1)
    with pytest.raises(ValueError, match="params is None"):
        tx.update({}, tx.init({}))


def test_hyperparameters_injected_in_bfloat16_are_refused():
    params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    tx = optax.inject_hyperparams(optim.lamb)(learning_rate=0.1)
    with pytest.raises(ValueError, match="bfloat16 array and has lost digits"):
        tx.init(params)
    tx = optax.inject_hyperparams(optim.lamb, hyperparam_dtype=jnp.float32)(learning_rate=0.1)
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates["kernel"].dtype == jnp.bfloat16

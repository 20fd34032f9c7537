"""The recipes for BERT against the settings of their sources, beside the rates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import config as config_lib
from lamb_tpu.errors import UserError
from lamb_tpu.optim import parameters
from lamb_tpu.run.recipe import resolve, resolve_optimizer
from tests import tiny


def _config(argument: str) -> ConfigDict:
    config = tiny.recipe_file(tiny.ROOT / "configs" / "bert_pretrain.py").get_config(argument)
    config_lib.check_keys(config)
    config_lib.check_values(config)
    return config


def _lamb_of_deepspeed(
    weights: np.ndarray, gradients: np.ndarray, rates: np.ndarray, decay: float
) -> np.ndarray:
    """csrc/lamb/fused_lamb_cuda_kernel.cu without bias correction, in float64.

    The settings are those of deepspeed_bsz64k_lamb_config_seq128.json and, where it is silent, of
    deepspeed/ops/lamb/fused_lamb.py. Gradients have a norm below 1, so nothing is clipped.
    """
    m = v = np.zeros_like(weights)
    for gradient, rate in zip(gradients, rates):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        update = m / (np.sqrt(v) + 1e-8) + decay * weights
        weight_norm, update_norm = np.linalg.norm(weights), np.linalg.norm(update)
        coefficient = 1.0
        if weight_norm != 0 and update_norm != 0:
            coefficient = min(max(weight_norm / update_norm, 0.01), 0.3)
        weights = weights - rate * coefficient * update
    return weights


def test_updates_of_deepspeed() -> None:
    config = _config("recipe=deepspeed,phase=1")
    rng = np.random.default_rng(0)
    shapes = {  # a kernel within the bounds, one above, one below; a new bias; LayerNorm's scale
        "kernel": 0.1 * rng.standard_normal((4, 3)),
        "large/kernel": 9 * np.ones((4, 3)),
        "small/kernel": np.full((4, 3), 1e-5),
        "bias": np.zeros(3),
        "scale": np.ones(3),
    }
    gradients = {k: 0.01 * rng.standard_normal((5, *v.shape)) for k, v in shapes.items()}
    recipe = resolve(config, 10**6)
    tx, _ = resolve_optimizer(config, recipe)
    params = jax.tree.map(jnp.asarray, shapes)
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(5):
        grads = {k: jnp.asarray(v[step], jnp.float32) for k, v in gradients.items()}
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    for key, first in shapes.items():
        decay = 0.01 if key.endswith("kernel") else 0.0
        expected = _lamb_of_deepspeed(first, gradients[key], recipe.learning_rates[:5], decay)
        np.testing.assert_allclose(
            params[key],
            expected,
            rtol=2e-6,
            atol=2e-6 * np.abs(expected - first).max(),
            err_msg=key,
        )
        assert np.abs(expected - first).max() > 0


def test_onebit_lamb_has_its_exchange() -> None:
    config = _config("optimizer=onebit_lamb,phase=1")
    assert config.parallel.exchange.name == "onebit" and config.parallel.backend == "shard_map"
    assert config.schedule == _config("phase=1").schedule
    with pytest.raises(UserError, match="recipe=nvidia has settings of LAMB alone"):
        _config("optimizer=onebit_lamb,recipe=nvidia")


def test_who_adapts() -> None:
    """In DeepSpeed's LAMB all tensors, in the authors' and apex's those that decay."""
    shapes = {
        "encoder/layers/output/bias": (2, 4),
        "encoder/layers/output/kernel": (2, 4, 4),
        "embeddings/norm/scale": (4,),
        "embeddings/word": (9, 4),
    }
    tree = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}

    def facts(argument: str) -> dict[str, parameters.ParameterFacts]:
        return parameters.resolve(tree, _config(argument).optimizer.rules)

    for argument in ("", "recipe=nvidia", "recipe=mixed", "recipe=deepspeed,optimizer=adamw"):
        for key, found in facts(argument).items():
            assert found.decay == found.adapt == (not key.endswith(("bias", "scale")))
    for scan in ("", ",scan"):
        for key, found in facts(f"recipe=deepspeed{scan}").items():
            assert found.adapt and found.decay == (not key.endswith(("bias", "scale")))
            stacked = bool(scan) and key.startswith("encoder")
            assert found.layer_axes == ((0,) if stacked else ())

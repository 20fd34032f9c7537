"""Tests the settings of the BERT recipes, except rates, against the sources of the recipes."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from lamb_tpu.optim import parameters
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import resolve
from lamb_tpu.spec import parse
from tests import tiny
from tests.raising import rejected


def _config(argument: str) -> ConfigDict:
    config = tiny.recipe_file(tiny.ROOT / "configs" / "bert_pretrain.py").get_config(argument)
    parse(config)
    return config


def _lamb_of_deepspeed(
    weights: np.ndarray, gradients: np.ndarray, rates: np.ndarray, decay: float
) -> np.ndarray:
    """Returns the weights after updates as in DeepSpeed's fused_lamb_cuda_kernel.cu, in float64.

    The kernel is in csrc/lamb, and is used without bias correction. The settings are those of
    deepspeed_bsz64k_lamb_config_seq128.json, or else the defaults of
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
    shapes = {  # kernels with a ratio within, above and below the bounds; a zero bias; a LayerNorm scale
        "kernel": 0.1 * rng.standard_normal((4, 3)),
        "large/kernel": 9 * np.ones((4, 3)),
        "small/kernel": np.full((4, 3), 1e-5),
        "bias": np.zeros(3),
        "scale": np.ones(3),
    }
    gradients = {k: 0.01 * rng.standard_normal((5, *v.shape)) for k, v in shapes.items()}
    recipe = resolve(config, 10**6)
    tx = resolve_optimizer(parse(config).optimizer).make(recipe)
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
    problem, remedy = "has settings for LAMB only", "use recipe=paper with optimizer=onebit_lamb"
    with rejected("the config's argument recipe", "nvidia", problem, remedy):
        _config("optimizer=onebit_lamb,recipe=nvidia")


def test_who_adapts() -> None:
    """In DeepSpeed's LAMB all tensors adapt; in the authors' and apex's LAMB, only tensors that decay."""
    shapes = {
        "encoder/layers/output/bias": (2, 4),
        "encoder/layers/output/kernel": (2, 4, 4),
        "embeddings/norm/scale": (4,),
        "embeddings/word": (9, 4),
    }
    tree = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}

    def metadata(argument: str) -> dict[str, parameters.ParameterMetadata]:
        return parameters.resolve(tree, _config(argument).optimizer.rules)

    for argument in ("", "recipe=nvidia", "recipe=mixed", "recipe=deepspeed,optimizer=adamw"):
        for key, actual in metadata(argument).items():
            assert actual.decay == actual.adapt == (not key.endswith(("bias", "scale")))
    for scan in ("", ",scan"):
        for key, actual in metadata(f"recipe=deepspeed{scan}").items():
            assert actual.adapt and actual.decay == (not key.endswith(("bias", "scale")))
            stacked = bool(scan) and key.startswith("encoder")
            assert actual.layer_axes == ((0,) if stacked else ())

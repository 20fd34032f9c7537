"""Layerwise-adaptive optimizers and large-batch schedules as Optax gradient transformations.

>>> import jax.numpy as jnp, optax
>>> from lamb_tpu import optim
>>> params = {'dense': {'kernel': jnp.ones((2, 2)), 'bias': jnp.zeros(2)}}
>>> grads = {'dense': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}}
>>> rate = optim.warmup(0.01, total_steps=100, warmup_steps=5)
>>> tx = optim.lamb(rate, weight_decay=0.01, rules='no_bias_no_norm')
>>> state = tx.init(params)
>>> for _ in range(3):
...     updates, state = tx.update(grads, state, params)
...     params = optax.apply_updates(params, updates)
>>> print(params['dense']['kernel'][0])
[0.994008 0.994008]

These arguments mean the same in every optimizer that has them:

- `learning_rate`: a number, or a schedule, a function of the number of completed updates.
- `weight_decay`: also a number or a schedule; applies only to leaves that decay by the rules.
- `rules`: which leaves decay, which adapt and which axes stack layers, see `parameters.resolve`. By
  default every leaf decays and adapts.
- `clip_global_norm`: the largest global l2 norm of all gradients. If their norm is larger, all
  gradients are scaled down to this norm before the update. None for no clipping.
- `axis_name`: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
  `trust_ratio.scale_by_trust_ratio`; None under `jit`.
- `mu_dtype`, `nu_dtype`, `momentum_dtype`: the dtypes of first moments, second moments and momentum
  in the state, by default the dtype of the arithmetic. bfloat16 is too narrow for second moments at
  b2 = 0.999.
- `collect`: whether to store each layer's trust ratio and norms in the state, see
  `diagnostics.read`.

Arithmetic is in float32 (float64 for float64 leaves) whatever the dtypes of parameters and
gradients. `update` needs `params`, and updates have the parameters' dtypes. If an argument is out
of range or not one of the valid choices, a ValueError names the argument.
"""

from lamb_tpu.optim import (
    chains,
    clipping,
    diagnostics,
    directions,
    durations,
    factory,
    leafwise,
    leaves,
    matrices,
    modules,
    parameters,
    presets,
    scaling,
    schedules,
    sharding,
    splits,
    staged,
    trust_ratio,
)
from lamb_tpu.optim.adagrad_norm import AdagradNormState, adagrad_norm
from lamb_tpu.optim.agvm import AgvmState, agvm
from lamb_tpu.optim.apollo import ApolloState, apollo
from lamb_tpu.optim.baselines import adafactor, adagrad, adam, adamw, lion, momentum, nesterov, sgd
from lamb_tpu.optim.chains import add_decayed_weights, in_float32, scale_by_rate_factors
from lamb_tpu.optim.clipping import clip_global_norm
from lamb_tpu.optim.diffgrad import DiffgradState, diffgrad
from lamb_tpu.optim.directions import (
    ScaleByLambState,
    ScaleByLarsState,
    scale_by_lamb,
    scale_by_lars,
)
from lamb_tpu.optim.durations import Duration
from lamb_tpu.optim.factory import make_optimizer
from lamb_tpu.optim.l2 import add_l2
from lamb_tpu.optim.lamb import LambState, lamb
from lamb_tpu.optim.lars import LarsState, lars
from lamb_tpu.optim.muon import muon
from lamb_tpu.optim.novograd import NovogradState, novograd
from lamb_tpu.optim.onebit_adam import OnebitAdamState, onebit_adam
from lamb_tpu.optim.onebit_lamb import OnebitLambState, onebit_lamb
from lamb_tpu.optim.parameters import ParameterMetadata
from lamb_tpu.optim.presets import preset
from lamb_tpu.optim.quiet import hush_libtpu
from lamb_tpu.optim.refinement import refined_schedule
from lamb_tpu.optim.rmsprop_tf import RmspropTfState, rmsprop_tf
from lamb_tpu.optim.rounding import StochasticRoundingState, stochastic_rounding
from lamb_tpu.optim.scaling import legw, scale_learning_rate
from lamb_tpu.optim.schedule_free import evaluation_params, schedule_free_adamw
from lamb_tpu.optim.schedules import by_examples, exponential_decay, phases, step_decay, warmup
from lamb_tpu.optim.sharding import state_sharding
from lamb_tpu.optim.trust_ratio import TrustRatioState, scale_by_trust_ratio
from lamb_tpu.optim.zero_one_adam import ZeroOneAdamState, zero_one_adam

# Call this before JAX is used, so that libtpu prints nothing on a machine without a TPU.
hush_libtpu()

__all__ = [
    "AdagradNormState",
    "AgvmState",
    "ApolloState",
    "DiffgradState",
    "Duration",
    "LambState",
    "LarsState",
    "NovogradState",
    "OnebitAdamState",
    "OnebitLambState",
    "ParameterMetadata",
    "RmspropTfState",
    "ScaleByLambState",
    "ScaleByLarsState",
    "StochasticRoundingState",
    "TrustRatioState",
    "ZeroOneAdamState",
    "adafactor",
    "adagrad",
    "adagrad_norm",
    "adam",
    "adamw",
    "add_decayed_weights",
    "add_l2",
    "agvm",
    "apollo",
    "by_examples",
    "chains",
    "clip_global_norm",
    "clipping",
    "diagnostics",
    "diffgrad",
    "directions",
    "durations",
    "evaluation_params",
    "exponential_decay",
    "factory",
    "in_float32",
    "lamb",
    "lars",
    "leafwise",
    "leaves",
    "legw",
    "lion",
    "make_optimizer",
    "matrices",
    "modules",
    "momentum",
    "muon",
    "nesterov",
    "novograd",
    "onebit_adam",
    "onebit_lamb",
    "parameters",
    "phases",
    "preset",
    "presets",
    "refined_schedule",
    "rmsprop_tf",
    "scale_by_lamb",
    "scale_by_lars",
    "scale_by_rate_factors",
    "scale_by_trust_ratio",
    "scale_learning_rate",
    "scaling",
    "schedule_free_adamw",
    "schedules",
    "sgd",
    "sharding",
    "splits",
    "staged",
    "state_sharding",
    "step_decay",
    "stochastic_rounding",
    "trust_ratio",
    "warmup",
    "zero_one_adam",
]

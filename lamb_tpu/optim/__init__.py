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
"""

from lamb_tpu.optim import durations, factory, parameters, schedules, trust_ratio
from lamb_tpu.optim.durations import Duration
from lamb_tpu.optim.factory import make_optimizer
from lamb_tpu.optim.lamb import LambState, lamb
from lamb_tpu.optim.lars import LarsState, lars, lars_lamb_paper
from lamb_tpu.optim.parameters import ParameterFacts
from lamb_tpu.optim.schedules import legw, scale_learning_rate, warmup
from lamb_tpu.optim.trust_ratio import TrustRatioState, scale_by_trust_ratio

__all__ = [
    "Duration", "LambState", "LarsState", "ParameterFacts", "TrustRatioState", "durations",
    "factory", "lamb", "lars", "lars_lamb_paper", "legw", "make_optimizer", "parameters",
    "scale_by_trust_ratio", "scale_learning_rate", "schedules", "trust_ratio", "warmup",
]

"""Optax's own optimizers as `make_optimizer` has them, for the recorded runs that they repeat."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from tests.optim.golden_common import Settings, leaf_rules, rate

# (implementation, setting) -> why no arguments here repeat it; 'setting' None for every run of it
OTHERS: dict[tuple[str, str | None], str] = {
    ("author_muon", None): "it iterates in bfloat16",
    ("author_muon_f32", None): "it does not correct the momentum, and its matrices are transposed",
    ("author_adamw_schedulefree_reference", "r1_power0"): "updates count by their number too",
    ("author_sgd_schedulefree", None): "schedule-free SGD is not among the baselines",
    ("author_sgd_schedulefree_reference", None): "schedule-free SGD is not among the baselines",
    ("optax_sgd", None): "schedule-free SGD is not among the baselines",
}


def transform(entry: dict[str, Any], params: Any) -> optax.GradientTransformation | None:
    """The baseline that repeats an entry's run on `params`; None for one of `OTHERS`.

    Raises:
      ValueError: a hyper-parameter without a meaning here.
    """
    implementation, setting = entry["implementation"], entry["setting"]
    if (implementation, None) in OTHERS or (implementation, setting) in OTHERS:
        return None
    settings = Settings(entry["hyper"])
    tx = FAMILIES[entry["family"]](settings, params)
    settings.check_empty(implementation)
    return tx


def why_not(entry: Mapping[str, Any]) -> str:
    """The reason why an entry is one of `OTHERS`."""
    whole = OTHERS.get((entry["implementation"], None))
    return whole or OTHERS[entry["implementation"], entry["setting"]]


def _lion(settings: Settings, params: Any) -> optax.GradientTransformation:
    peak, schedule = settings["lr"], rate(settings)
    b1, b2 = settings.take("betas")
    strength = settings.take("weight_decay")
    if settings.take("decoupled_weight_decay", False):
        strength /= peak  # the author's class does this to its argument
    config = {"name": "lion", "b1": b1, "b2": b2, "weight_decay": strength}
    return optim.make_optimizer(config, schedule)


def _muon(settings: Settings, params: Any) -> optax.GradientTransformation:
    assert not settings.take("adaptive")
    # Adam's decay is an argument of its own in Optax, 0 where it is not given.
    matrices = {name for name, leaf in params.items() if leaf.ndim == 2}
    return optim.make_optimizer({
        "name": "muon", "beta": settings.take("beta"), "nesterov": settings.take("nesterov"),
        "consistent_rms": settings.take("consistent_rms"),
        "weight_decay": settings.take("weight_decay"),
        # Optax takes every leaf with two axes for a matrix, tables too.
        "rules": leaf_rules(
            params, decay=matrices.__contains__,
            matrix_axes=lambda name: ((0,), (1,)) if name in matrices else (),
        ),
    }, rate(settings))


def _schedule_free(settings: Settings, params: Any) -> optax.GradientTransformation:
    # Every 20 rates in float64, as in `golden_common.rate`.
    share = np.minimum((np.arange(20) + 1) / settings.take("warmup_steps"), 1.0)
    table = settings.take("lr") * share
    b1, b2 = settings.take("betas")
    return optim.make_optimizer(
        {"name": "schedule_free_adamw", "b1": b1, "b2": b2,
         "weight_decay": settings.take("weight_decay")},
        lambda count: jnp.asarray(table)[count],
    )


FAMILIES: dict[str, Callable[[Settings, Any], optax.GradientTransformation]] = {
    "lion": _lion,
    "muon": _muon,
    "schedule_free": _schedule_free,
}

"""Maps recorded runs to Optax's optimizers, which `make_optimizer` builds."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu import optim
from tests.optim.golden_common import Settings, leaf_rules, rate

# (implementation, setting) -> why our arguments cannot reproduce the run; None means all settings
OTHERS: dict[tuple[str, str | None], str] = {
    ("author_muon", None): "it iterates in bfloat16",
    ("author_muon_f32", None): "it does not correct the momentum, and its matrices are transposed",
    ("author_sgd_schedulefree", None): "schedule-free SGD is not among the baselines",
    ("author_sgd_schedulefree_reference", None): "schedule-free SGD is not among the baselines",
    ("optax_sgd", None): "schedule-free SGD is not among the baselines",
}


def transform(entry: dict[str, Any], params: Any) -> optax.GradientTransformation | None:
    """Returns the baseline that reproduces the run of an entry; None if the entry is in `OTHERS`.

    Raises:
      ValueError: a hyper-parameter has no counterpart here.
    """
    implementation, setting = entry["implementation"], entry["setting"]
    if (implementation, None) in OTHERS or (implementation, setting) in OTHERS:
        return None
    settings = Settings(entry["hyper"])
    tx = FAMILIES[entry["family"]](settings, params)
    settings.check_empty(implementation)
    return tx


def why_not(entry: Mapping[str, Any]) -> str:
    """Returns the reason why an entry is in `OTHERS`."""
    full = OTHERS.get((entry["implementation"], None))
    return full or OTHERS[entry["implementation"], entry["setting"]]


def _lion(settings: Settings, params: Any) -> optax.GradientTransformation:
    peak, schedule = settings["lr"], rate(settings)
    b1, b2 = settings.take("betas", (0.9, 0.99))
    strength = settings.take("weight_decay", 0.0)
    settings.same_numbers("use_triton")
    if settings.take("cautious_factor", 1.0) != 1.0:
        raise NotImplementedError(
            "cautious_factor must be 1.0: it is not an option of optax.scale_by_lion"
        )
    if settings.take("decoupled_weight_decay", False):
        strength /= peak  # the author's class divides its argument too
    config = {"name": "lion", "b1": b1, "b2": b2, "weight_decay": strength}
    return optim.make_optimizer(config, schedule)


def _muon(settings: Settings, params: Any) -> optax.GradientTransformation:
    if settings.take("adaptive", False):
        raise NotImplementedError("adaptive must be False: it is not an option of our muon")
    # Optax has a separate argument for Adam's decay, by default 0.
    matrices = {name for name, leaf in params.items() if leaf.ndim == 2}
    return optim.make_optimizer(
        {
            "name": "muon",
            "beta": settings.take("beta", 0.95),
            "nesterov": settings.take("nesterov", True),
            "ns_steps": settings.take("ns_steps", 5),
            "eps": settings.take("eps", 1e-8),
            "consistent_rms": settings.take("consistent_rms"),
            "weight_decay": settings.take("weight_decay", 0.0),
            # Optax treats every leaf with two axes as a matrix, including embedding tables.
            "rules": leaf_rules(
                params,
                decay=matrices.__contains__,
                matrix_axes=lambda name: ((0,), (1,)) if name in matrices else (),
            ),
        },
        rate(settings),
    )


def _schedule_free(settings: Settings, params: Any) -> optax.GradientTransformation:
    # Compute all 20 rates in float64, as in `golden_common.rate`.
    warmup_steps = max(settings.take("warmup_steps", 0), 1)
    table = settings.take("lr") * np.minimum((np.arange(20) + 1) / warmup_steps, 1.0)
    b1, b2 = settings.take("betas", (0.9, 0.999))
    settings.same_numbers("foreach")
    return optim.make_optimizer(
        {
            "name": "schedule_free_adamw",
            "b1": b1,
            "b2": b2,
            "eps": settings.take("eps", 1e-8),
            "weight_decay": settings.take("weight_decay", 0.0),
            "weight_step_power": settings.take("r", 0.0),
            "weight_lr_power": settings.take("weight_lr_power", 2.0),
        },
        lambda count: jnp.asarray(table)[count],
    )


FAMILIES: dict[str, Callable[[Settings, Any], optax.GradientTransformation]] = {
    "lion": _lion,
    "muon": _muon,
    "schedule_free": _schedule_free,
}

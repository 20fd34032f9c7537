"""Recorded implementations of diffGrad as arguments of `optim.diffgrad`."""

from typing import Any

import optax

from lamb_tpu import optim
from tests.optim.golden_common import Settings, group_without_decay, rate


def transform(implementation: str, settings: Settings, params: Any) -> optax.GradientTransformation:
    """The optimizer of an entry of the family 'diffgrad': all three have the same arguments.

    The authors' first version too, as long as each gradient is a new tensor: it keeps the tensor,
    not a copy. Where a framework overwrites it, the gradient is compared with itself.
    """
    if implementation not in (
        "author_diffgrad_v1",
        "author_diffgrad_v2",
        "torch_optimizer_diffgrad",
    ):
        raise ValueError(f"{implementation!r} is unknown")
    del params
    b1, b2, eps, weight_decay = (
        settings.take(name, default)
        for name, default in (
            ("beta1", 0.9),
            ("beta2", 0.999),
            ("eps", 1e-8),
            ("weight_decay", 0.0),
        )
    )
    rules = group_without_decay(settings)
    return optim.diffgrad(rate(settings), b1, b2, eps, weight_decay, rules)

"""Maps recorded implementations of diffGrad to arguments of `optim.diffgrad`."""

from typing import Any

import optax

from lamb_tpu import optim
from tests.optim.golden_common import Settings, group_without_decay, rate

NAMES = {name: (theirs,) for name, theirs in (("b1", "beta1"), ("b2", "beta2"))}
NAMES |= {name: (name,) for name in ("eps", "weight_decay")}


def transform(implementation: str, settings: Settings, params: Any) -> optax.GradientTransformation:
    """Returns the optimizer of an entry of the family 'diffgrad'.

    The three implementations have the same arguments. The authors' first version stores the gradient's
    tensor instead of a copy, so it only equals the others if each gradient is a new tensor. If a
    framework overwrites the tensor, the gradient is compared with itself.
    """
    if implementation not in (
        "author_diffgrad_v1",
        "author_diffgrad_v2",
        "torch_optimizer_diffgrad",
    ):
        raise ValueError(f"implementation={implementation!r} of diffgrad is unknown")
    del params
    arguments = settings.renamed(NAMES)
    return optim.diffgrad(rate(settings), rules=group_without_decay(settings), **arguments)

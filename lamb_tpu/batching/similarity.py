"""The cosine of two half gradients: of the whole network, and of each of its modules.

SimiGrad takes one half of a batch from the devices of even number and the other from those of odd
number; on one device the even and the odd microbatches serve. Both halves are mean gradients, of
as many examples each.

References:
  Qin et al., SimiGrad: Fine-Grained Adaptive Batching for Large Scale Training using Gradient
  Similarity Measurement, NeurIPS 2021; the abstract and the authors' code, HeyangQin/SimiGrad, were
  read.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lamb_tpu.optim import modules as groups
from lamb_tpu.optim.trust_ratio import AxisName

SIMILARITY = "similarity"


def similarity(
    even: Any, odd: Any, modules: Mapping[str, str] | None = None, axis_name: AxisName = None
) -> dict[str, jax.Array]:
    """Returns the cosine of two half gradients, and that of each module.

    >>> even = {'body': jnp.array([1., 0.]), 'head': jnp.array([3., 0.])}
    >>> odd = {'body': jnp.array([0., 1.]), 'head': jnp.array([3., 0.])}
    >>> found = similarity(even, odd, {'body': '^body', 'rest': ''})
    >>> {name: round(float(value), 4) for name, value in found.items()}
    {'similarity': 0.9, 'similarity/body': 0.0, 'similarity/rest': 1.0}

    Args:
      even: the mean gradient of one half of the batch.
      odd: that of the other half.
      modules: a regular expression over '/'-joined paths for each name; the first that matches a
        leaf decides, and every leaf needs one. None for the whole network only.
      axis_name: the mesh axes over which leaves are split inside `shard_map` or `pmap`, see
        `trust_ratio.scale_by_trust_ratio`; None under `jit`.

    Returns:
      Scalars in [-1, 1], float32: `similarity`, and `similarity/<name>` for each module. 0 where a
      half is all 0.

    Raises:
      ValueError: halves of two structures; modules that do not fit.
    """
    patterns = groups.ONE if modules is None else tuple(modules.values())
    sums = groups.products(even, odd, patterns, axis_name)
    whole = groups.cosine(jax.tree.map(jnp.sum, sums))
    parts = groups.cosine(sums)
    names = () if modules is None else tuple(modules)
    return {SIMILARITY: whole} | {
        f"{SIMILARITY}/{name}": parts[index] for index, name in enumerate(names)
    }

"""The cosine of the gradients of two halves of a batch, for the network and for each module.

As in SimiGrad, under `shard_map` one half is the rows of the devices with even index, and the other
half is the rows of the devices with odd index. Under `jit`, and on one device, the halves are the even
and the odd microbatches. Both gradients are means over the same number of examples.

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
    """Returns the cosine of the gradients of two halves, for the network and for each module.

    >>> even = {'body': jnp.array([1., 0.]), 'head': jnp.array([3., 0.])}
    >>> odd = {'body': jnp.array([0., 1.]), 'head': jnp.array([3., 0.])}
    >>> found = similarity(even, odd, {'body': '^body', 'rest': ''})
    >>> {name: round(float(value), 4) for name, value in found.items()}
    {'similarity': 0.9, 'similarity/body': 0.0, 'similarity/rest': 1.0}

    Args:
      even: the mean gradient of one half of the batch.
      odd: the mean gradient of the other half.
      modules: {name: regular expression over '/'-joined paths}. A leaf belongs to the first module
        that matches its path, and every leaf must match a module. None for the network only.
      axis_name: see `lamb_tpu.optim`.

    Returns:
      float32 scalars in [-1, 1]: `similarity`, and `similarity/<name>` for each module. If a
      gradient is all 0, the cosine is 0.

    Raises:
      ValueError: the gradients differ in structure, or a module is invalid.
    """
    patterns = groups.ONE if modules is None else tuple(modules.values())
    sums = groups.products(even, odd, patterns, axis_name)
    total = groups.cosine(jax.tree.map(jnp.sum, sums))
    by_module = groups.cosine(sums)
    names = [f"{SIMILARITY}/{name}" for name in modules or ()]
    return {SIMILARITY: total} | {name: by_module[index] for index, name in enumerate(names)}

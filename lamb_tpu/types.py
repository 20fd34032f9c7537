"""Types in the signatures of several packages.

`Params`, `OptState` and `Batch` say what a tree or mapping holds; `PyTree` is any other tree of arrays,
shapes or shardings.
"""

from collections.abc import Mapping
from typing import Any

import jax
import optax

PyTree = Any
Params = optax.Params  # the trainable arrays of a network
OptState = optax.OptState
Batch = Mapping[str, jax.Array]  # fields of examples; the first axis of each counts the examples

"""Types in the signatures of several packages.

`Params`, `OptState` and `Batch` say what a tree or mapping holds; `PyTree` is any other tree of arrays,
shapes or shardings. They are aliases of `Any`, because importing Optax's would delay `--help`.
"""

from collections.abc import Mapping
from typing import Any

import jax

PyTree = Any
Params = PyTree  # the trainable arrays of a network
OptState = PyTree  # the state of an optimizer
Batch = Mapping[str, jax.Array]  # fields of examples; the first axis of each counts the examples

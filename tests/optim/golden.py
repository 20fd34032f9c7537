"""Maps entries of the golden index to arguments of this library's optimizers."""

from collections.abc import Callable
from typing import Any

import optax

from tests.optim import (
    golden_diffgrad,
    golden_lamb,
    golden_lars,
    golden_novograd,
    golden_rmsprop_tf,
)
from tests.optim.golden_common import Settings

# family -> (implementation, settings, params) -> the optimizer, or None for a bug that is not reproduced
FAMILIES: dict[str, Callable[..., optax.GradientTransformation | None]] = {
    "lamb": golden_lamb.transform,
    "lars": golden_lars.transform,
    "novograd": golden_novograd.transform,
    "diffgrad": golden_diffgrad.transform,
    "rmsprop_tf": golden_rmsprop_tf.transform,
}

# implementation -> a bug, because of which we do not reproduce some settings
BUGS: dict[str, str] = {
    "deepspeed_fusedlamb": "a gradient norm that is one number for the group ends the loop over "
    "the parameters after the first: the others are never updated",
    "nvidia_dle_tf_bert_lamb": "a global step that starts at 0 makes the bias correction 0 / 0: "
    "every parameter is NaN after one update",
    "flax_optim_lamb": "without weight decay a tensor that has no gradient becomes NaN: its "
    "direction of 0 is multiplied by a ratio of infinity",
    "author_diffgrad_v1": "it stores the last gradient by reference: if the new gradient is written "
    "to this memory, it is compared with itself, and the coefficient is 0.5 from the second update on",
}
# implementation -> a substring of the names of the buggy runs, if no setting identifies them
BUGGY = {"author_diffgrad_v1": "reusedgrad"}


def transform_for(entry: dict[str, Any], params: Any) -> optax.GradientTransformation | None:
    """Returns the optimizer that reproduces the run of an entry; None for a bug that is not reproduced.

    Args:
      entry: an element of `files` in golden/index.json.
      params: the parameters of the run, {'dense/kernel': ..., ...}.

    Raises:
      ValueError: a hyper-parameter has no counterpart here.
    """
    if entry["family"] not in FAMILIES:
        raise ValueError(f"family={entry['family']!r} is unknown; use one of {', '.join(FAMILIES)}")
    buggy = BUGGY.get(entry["implementation"])
    if buggy and buggy in entry.get("setting", ""):
        return None
    settings = Settings(entry["hyper"])
    tx = FAMILIES[entry["family"]](entry["implementation"], settings, params)
    if tx is not None:
        settings.check_empty(entry["implementation"])
    return tx

"""From an entry of the golden index to our arguments: how to write each implementation here."""

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

# family -> (implementation, settings, params) -> the optimizer, or None for a plain bug
FAMILIES: dict[str, Callable[..., optax.GradientTransformation | None]] = {
    "lamb": golden_lamb.transform,
    "lars": golden_lars.transform,
    "novograd": golden_novograd.transform,
    "diffgrad": golden_diffgrad.transform,
    "rmsprop_tf": golden_rmsprop_tf.transform,
}

# implementation -> the bug in it for the sake of which some setting of it is not repeated here
BUGS: dict[str, str] = {
    "deepspeed_fusedlamb": "a gradient norm that is one number for the group ends the loop over "
    "the parameters after the first: the others are never updated",
    "nvidia_dle_tf_bert_lamb": "a global step that starts at 0 makes the bias correction 0 / 0: "
    "every parameter is NaN after one update",
    "flax_optim_lamb": "without weight decay a tensor that has no gradient becomes NaN: its "
    "direction of 0 is multiplied by a ratio of infinity",
    "author_diffgrad_v1": "it keeps the last gradient by reference: where that memory holds the "
    "new gradient, this is compared with itself: the coefficient is 0.5 from the second update on",
}
# implementation -> what is in the names of its runs with the bug, where nothing else shows it
BUGGY = {"author_diffgrad_v1": "reusedgrad"}


def transform_for(entry: dict[str, Any], params: Any) -> optax.GradientTransformation | None:
    """The optimizer that repeats an entry's run on `params`; None if its code is a plain bug.

    Args:
      entry: an element of `files` in golden/index.json.
      params: the tree of the run, {'dense/kernel': ..., ...}.

    Raises:
      ValueError: a hyper-parameter without a meaning here, rather than ignoring it.
    """
    if entry["family"] not in FAMILIES:
        raise ValueError(f"the family {entry['family']!r} is unknown; known: {', '.join(FAMILIES)}")
    buggy = BUGGY.get(entry["implementation"])
    if buggy and buggy in entry.get("setting", ""):
        return None
    settings = Settings(entry["hyper"])
    tx = FAMILIES[entry["family"]](entry["implementation"], settings, params)
    if tx is not None:
        settings.check_empty(entry["implementation"])
    return tx

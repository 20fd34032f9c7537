"""timm's Lamb, for comparison in the benchmarks; works with old and new versions of timm."""

import inspect
from typing import Any


def lamb(timm: Any, params: Any, foreach: bool, **settings: Any) -> Any:
    """Returns timm's Lamb. Versions before 1.0.31 lack `foreach`, and update one tensor at a time.

    Args:
      timm: the package timm.optim.
      params: the parameters.
      foreach: whether to update all leaves together, if this version can.
      settings: further arguments of the optimizer.
    """
    if has_foreach(timm):
        settings["foreach"] = foreach
    return timm.Lamb(params, **settings)


def has_foreach(timm: Any) -> bool:
    """Returns whether timm's Lamb can update all leaves together."""
    return "foreach" in inspect.signature(timm.Lamb).parameters

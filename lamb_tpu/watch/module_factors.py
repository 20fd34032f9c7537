"""Factors of the modules' learning rates under `config.optimizer.agvm`, in the records."""

import jax
import numpy as np
from ml_collections import ConfigDict

from lamb_tpu.optim import AgvmState
from lamb_tpu.watch.observer import Observer, Record


class ModuleFactors(Observer):
    """Adds `agvm/<module>` to every record: the factor of that module's updates, 1 at first.

    Args:
      config: of the run; without config.optimizer.agvm nothing is added.
    """

    def __init__(self, config: ConfigDict) -> None:
        fields = config.optimizer.get("agvm")
        self._names = [] if fields is None else [name for name, _ in fields["modules"]]

    def recorded(self, record: Record) -> None:
        """Adds the factors behind the newest update."""
        if not self._names:
            return
        (state,) = (
            part
            for part in jax.tree.leaves(record.state.opt_state, is_leaf=_is_agvm)
            if _is_agvm(part)
        )
        for name, factor in zip(self._names, np.asarray(state.factors), strict=True):
            record.values[f"agvm/{name}"] = float(factor)


def _is_agvm(part: object) -> bool:
    return isinstance(part, AgvmState)

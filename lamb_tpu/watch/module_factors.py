"""Records the learning-rate factors of modules under `config.optimizer.agvm`."""

import jax
import numpy as np

from lamb_tpu.optim import AgvmState
from lamb_tpu.spec_keys import Component
from lamb_tpu.watch.observer import Observer, Record


class ModuleFactors(Observer):
    """Adds `agvm/<module>` to every record: the module's learning-rate factor in the newest update."""

    def __init__(self, optimizer: Component) -> None:
        fields = optimizer.fields.get("agvm")
        self._names = [] if fields is None else [name for name, _ in fields["modules"]]

    def recorded(self, record: Record) -> None:
        if not self._names:
            return
        leaves = jax.tree.leaves(record.state.opt_state, is_leaf=_is_agvm)
        (state,) = filter(_is_agvm, leaves)
        for name, factor in zip(self._names, np.asarray(state.factors), strict=True):
            record.values[f"agvm/{name}"] = float(factor)


def _is_agvm(node: object) -> bool:
    return isinstance(node, AgvmState)

"""Records the trust ratios of the layers, if the optimizer collects them."""

from lamb_tpu.optim import diagnostics
from lamb_tpu.run.build import Run
from lamb_tpu.watch.observer import Observer, Record, Start


class Ratios(Observer):
    """Adds the smallest, median and largest ratio to a record, and writes every layer's ratio."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def started(self, start: Start) -> None:
        self._records = start.records

    def recorded(self, record: Record) -> None:
        opt_state = record.state.opt_state
        record.values |= diagnostics.summary(opt_state, self._run.metadata)
        layers = diagnostics.scalars(opt_state)
        if layers:
            # The state is sorted alphabetically, with layer_10 before layer_2.
            ordered = diagnostics.in_order(layers, self._run.parameter_order)
            self._records.write(record.step, "layers", ordered)

"""Trust ratios of the layers, if the optimizer collects them."""

from lamb_tpu.optim import readings
from lamb_tpu.run.build import Run
from lamb_tpu.watch.observer import Observer, Record, Start


class Ratios(Observer):
    """Adds the smallest, median and largest ratio to a record, and writes every layer's ratio.

    Args:
      run: the run; nothing is written unless its optimizer's argument `collect` is True.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def started(self, start: Start) -> None:
        self._records = start.records

    def recorded(self, record: Record) -> None:
        opt_state = record.state.opt_state
        record.values |= readings.summary(opt_state, self._run.facts)
        layers = readings.scalars(opt_state)
        if layers:
            # The state's own order is alphabetical, with layer_10 before layer_2.
            ordered = readings.in_order(layers, self._run.parameter_order)
            self._records.write(record.step, "layers", ordered)

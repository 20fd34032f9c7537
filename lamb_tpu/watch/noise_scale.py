"""The gradient noise scale in the records: the ratio of two averages over updates."""

from collections.abc import Iterable, Mapping

from lamb_tpu.batching import noise_scale
from lamb_tpu.batching.noise_scale import Estimate, NoiseScaleState
from lamb_tpu.parallel.gradient_statistics import GRAD_SQ, PRECONDITIONED, TRACE
from lamb_tpu.watch.observer import Observer, Record, Sums

# Name in a record -> metrics of an update.
_PAIRS = {"noise_scale": (GRAD_SQ, TRACE), "noise_scale_preconditioned": PRECONDITIONED}


class NoiseScale(Observer):
    """Adds `noise_scale` and `noise_scale_preconditioned`, in examples, to every record.

    Each is the ratio of exponential averages over the updates that measured it, see
    `batching.noise_scale`: infinite where noise hides the gradient.

    Args:
      decay: of the averages, in [0, 1).
    """

    name = "noise_scale"

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._states: dict[str, NoiseScaleState] = {}

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Adds the pairs of some updates, in order; one of weight 0 was not measured."""
        for _, sums in updates:
            for name, pair in _PAIRS.items():
                (grad_sq, weight), (trace, _) = (sums.get(key, (0.0, 0.0)) for key in pair)
                if weight:
                    new = Estimate(float(grad_sq), float(trace))
                    state = self._states.get(name, noise_scale.init())
                    found = noise_scale.update(state, new, self._decay)
                    # Plain numbers, which a checkpoint holds as JSON.
                    self._states[name] = NoiseScaleState(*map(float, found))

    def recorded(self, record: Record) -> None:
        """Adds the ratios; none before the first measurement."""
        for name, state in self._states.items():
            record.values[name] = float(noise_scale.noise_scale(state))

    def state(self) -> dict[str, list[float]]:
        """Returns the averages."""
        return {name: list(state) for name, state in self._states.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Continues from a `state`."""
        self._states = {name: NoiseScaleState(*values) for name, values in state.items()}

"""Records the gradient noise scale, the ratio of two averages over updates."""

from collections.abc import Iterable, Mapping

from lamb_tpu.batching import noise_scale
from lamb_tpu.batching.noise_scale import Estimate, NoiseScaleState
from lamb_tpu.parallel.gradient_statistics import PRECONDITIONED
from lamb_tpu.watch.observer import Observer, Record, Sums

# Name in a record -> names of the two metrics of an update.
_PAIRS = {"noise_scale": noise_scale.PAIR, "noise_scale_preconditioned": PRECONDITIONED}


class NoiseScale(Observer):
    """Adds `noise_scale` and `noise_scale_preconditioned`, in examples, to every record.

    Each is the ratio of two exponential moving averages over the updates in which it was measured,
    see `batching.noise_scale`. It is infinite if noise hides the gradient.
    """

    name = "noise_scale"

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._states: dict[str, NoiseScaleState] = {}

    def fetched(self, updates: Iterable[tuple[int, Sums]]) -> None:
        """Adds the measurements of updates, in order; a weight of 0 means that nothing was measured."""
        for _, sums in updates:
            for name, pair in _PAIRS.items():
                (grad_sq, weight), (trace, _) = (sums.get(key, (0.0, 0.0)) for key in pair)
                if weight:
                    new = Estimate(float(grad_sq), float(trace))
                    state = self._states.get(name, noise_scale.init())
                    state = noise_scale.update(state, new, self._decay)
                    # Python floats, because a checkpoint stores them as JSON.
                    self._states[name] = NoiseScaleState(*map(float, state))

    def recorded(self, record: Record) -> None:
        """Adds the ratios, once there is a measurement."""
        for name, state in self._states.items():
            record.values[name] = float(noise_scale.noise_scale(state))

    def state(self) -> dict[str, list[float]]:
        return {name: list(state) for name, state in self._states.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        self._states = {name: NoiseScaleState(*values) for name, values in state.items()}

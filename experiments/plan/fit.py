"""Constants of the network and of each source, fitted to published runs; errors of runs left out.

A run takes

    factor * (updates * (compute + links / efficiency + hops * hop + collectives * start)
              + evaluated / batch * compute / 3)

where `factor` is one number for each source: how much slower than the compiler's estimate that
team's program ran, whatever the slice. `efficiency`, `hop` and `start` are one number each for all.
The fit takes the least squares of the logarithms of predicted by measured time.

Two errors are told. A run left out has its source's factor from the source's other runs: this is
how well the model scales. A source left out has the median of the other sources' factors: this is
what a program that nobody has run meets.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from lamb_tpu.cost.network import Calibration, Constants

# Bounds of 1 / efficiency, and of the microseconds of a hop and of a collective. An efficiency
# above 1 would say that published bandwidths are too small.
_LOW, _HIGH = (1.0, 0.0, 0.0), (5.0, 10.0, 200.0)
_START = (1.2, 1.0, 5.0)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A run in numbers.

    Attributes:
      source: name of the source.
      compute: seconds of all computation, with evaluation at a third of an update's.
      basis: seconds for the network by each of `rows.BASIS`, (3,).
      measured: seconds that the run took.
    """

    source: str
    compute: float
    basis: tuple[float, float, float]
    measured: float

    def seconds(self, network: Sequence[float]) -> float:
        """Returns the time by the model, with a factor of 1."""
        return self.compute + float(np.dot(self.basis, network))


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
      network: 1 / efficiency, microseconds of a hop, microseconds of a collective.
      factors: measured by predicted time of each source.
    """

    network: tuple[float, ...]
    factors: Mapping[str, float]

    def seconds(self, sample: Sample) -> float:
        """Returns the predicted time; of an unknown source with the median factor."""
        factor = self.factors.get(sample.source) or statistics.median(self.factors.values())
        return factor * sample.seconds(self.network)


def fit(samples: Sequence[Sample]) -> Fit:
    """Fits the constants; the factors follow from the network's."""

    def logarithms(network: np.ndarray) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for sample in samples:
            ratio = sample.measured / sample.seconds(network)
            found.setdefault(sample.source, []).append(float(np.log(ratio)))
        return found

    def residuals(network: np.ndarray) -> np.ndarray:
        # A source's best factor is the mean of its logarithms.
        return np.concatenate([np.subtract(each, np.mean(each))
                               for each in logarithms(network).values()])

    best = optimize.least_squares(residuals, _START, bounds=(_LOW, _HIGH), x_scale=_START)
    factors = {source: float(np.exp(np.mean(each))) for source, each in logarithms(best.x).items()}
    return Fit(tuple(map(float, best.x)), factors)


def leave_out_runs(samples: Sequence[Sample]) -> list[float | None]:
    """Returns predicted by measured time of each run, fitted to the others.

    None for the only run of a source, whose factor no other run gives.
    """
    found: list[float | None] = []
    for place, sample in enumerate(samples):
        others = [*samples[:place], *samples[place + 1:]]
        is_alone = sample.source not in {other.source for other in others}
        found.append(None if is_alone else fit(others).seconds(sample) / sample.measured)
    return found


def leave_out_sources(samples: Sequence[Sample]) -> list[float]:
    """Returns predicted by measured time of each run, fitted to the other sources."""
    fits = {
        source: fit([other for other in samples if other.source != source])
        for source in {sample.source for sample in samples}
    }
    return [fits[sample.source].seconds(sample) / sample.measured for sample in samples]


def calibration(found: Fit, ratios: Sequence[float], fitted_to: str) -> Calibration:
    """Returns the constants that a plan takes.

    Args:
      found: the fit to all.
      ratios: predicted by measured time of the runs, each with its source left out. The interval
        is the smallest that would have held nine in ten of them.
      fitted_to: what the runs are.
    """
    inverse, hop, start = found.network
    factor = statistics.median(found.factors.values())
    low, high = np.quantile(1 / np.asarray(ratios), (0.05, 0.95))

    def scaled(by: float) -> Constants:
        # Networks between slices are in no run; their guesses stay, as UNCALIBRATED has them.
        return Constants(
            1 / (inverse * by), hop * 1e-6 * by, start * 1e-6 * by, 0.7 / by, 50e-6 * by, by,
        )

    return Calibration(scaled(factor * low), scaled(factor), scaled(factor * high), fitted_to)

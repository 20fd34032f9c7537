"""Constants of the network, of each generation and of each source, fitted to published runs.

A run takes

    factor * (generation * compute + links / efficiency + hops * hop + collectives * start)

where `compute` is the compiler's estimate for all updates, and for evaluation at a third of an
update's for an example. `factor` is one number for each source: how much slower that team's program
ran than ours is estimated, whatever the slice. `generation` is 1 for TPU v3 and one number for each
other generation: how much faster its cores are than the compiler says. `efficiency`, `hop` and
`start` are one number each for all. The fit takes the least squares of the logarithms of predicted
by measured time.

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
BASE = "v3"  # the generation whose factor is 1


@dataclasses.dataclass(frozen=True)
class Sample:
    """A run in numbers.

    Attributes:
      source: name of the source.
      generation: version of the TPU.
      compute: seconds of all computation, with evaluation at a third of an update's.
      basis: seconds for the network by each of `rows.BASIS`, (3,).
      measured: seconds that the run took.
    """

    source: str
    generation: str
    compute: float
    basis: tuple[float, float, float]
    measured: float

    def seconds(self, network: Sequence[float], generation: float) -> float:
        """Returns the time by the model, with a source's factor of 1."""
        return generation * self.compute + float(np.dot(self.basis, network))


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
      network: 1 / efficiency, microseconds of a hop, microseconds of a collective.
      generations: time of a generation's computation by the compiler's estimate, where `BASE`'s is
        the same.
      factors: measured by predicted time of each source.
    """

    network: tuple[float, ...]
    generations: Mapping[str, float]
    factors: Mapping[str, float]

    def seconds(self, sample: Sample) -> float:
        """Returns the predicted time; of an unknown source with the median factor."""
        factor = self.factors.get(sample.source) or statistics.median(self.factors.values())
        return factor * self.without_factor(sample)

    def without_factor(self, sample: Sample) -> float:
        """Returns the predicted time of a source whose factor is 1."""
        return sample.seconds(self.network, self.generations.get(sample.generation, 1.0))


def fit(samples: Sequence[Sample]) -> Fit:
    """Fits the constants; the factors of sources follow from the others."""
    others = sorted({sample.generation for sample in samples} - {BASE})

    def fitted(values: np.ndarray) -> Fit:
        generations = dict(zip(others, map(float, values[len(_START):]), strict=True))
        return Fit(tuple(map(float, values[:len(_START)])), {BASE: 1.0} | generations, {})

    def logarithms(values: np.ndarray) -> dict[str, list[float]]:
        known, found = fitted(values), dict[str, list[float]]()
        for sample in samples:
            ratio = sample.measured / known.without_factor(sample)
            found.setdefault(sample.source, []).append(float(np.log(ratio)))
        return found

    def residuals(values: np.ndarray) -> np.ndarray:
        # A source's best factor is the mean of its logarithms.
        return np.concatenate([np.subtract(each, np.mean(each))
                               for each in logarithms(values).values()])

    start = np.array([*_START, *[1.0] * len(others)])
    bounds = [*_LOW, *[0.2] * len(others)], [*_HIGH, *[5.0] * len(others)]
    best = optimize.least_squares(residuals, start, bounds=bounds, x_scale=start).x
    return dataclasses.replace(fitted(best), factors={
        source: float(np.exp(np.mean(each))) for source, each in logarithms(best).items()
    })


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

    return Calibration(
        scaled(factor * low), scaled(factor), scaled(factor * high), fitted_to, found.generations
    )

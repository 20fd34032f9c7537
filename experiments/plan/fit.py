"""Constants of the network, of each generation and of each source, fitted to published runs.

A run takes

    factor * generation * compute + links / efficiency + hops * hop + collectives * start

where `compute` is the compiler's estimate for all updates, and for evaluation at a third of an
update's for an example. `factor` is one number for each source: how much slower that team's
program computed than ours is estimated, whatever the slice. `generation` is 1 for TPU v3 and one
number for each other generation: how much faster its cores are than the compiler says.
`efficiency`, `hop` and `start` are one number each for all. The fit takes the least squares of the
logarithms of predicted by measured time, with a weak pull of these three to what a profile on TPU
v5e says.

Two errors are told. A run left out has its source's factor from the source's other runs: this is
how well the model scales. A source left out has the median of the other sources' factors: this is
what a program that nobody has run meets.
"""

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from lamb_tpu.cost.network import PROFILE, Calibration, Constants

# Of 1 / efficiency, and of the microseconds of a hop and of a collective: those of the profile. A
# factor of e away from one counts as a run that is off by 1 %, so that a constant that no run tells
# stays there. Of 8, 4, 2 and 1 % the last was best for the runs left out.
_PRIOR = np.log([
    1 / PROFILE.efficiency, PROFILE.hop_seconds * 1e6, PROFILE.collective_seconds * 1e6,
])
_PULL = 0.01
_WIDEST = 100.0  # bound of each constant's distance from its start, as a factor
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


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
      network: 1 / efficiency, microseconds of a hop, microseconds of a collective.
      generations: time of a generation's computation by the compiler's estimate, where `BASE`'s is
        the same.
      factors: time of a source's computation by the compiler's estimate, besides that.
    """

    network: tuple[float, ...]
    generations: Mapping[str, float]
    factors: Mapping[str, float]

    @property
    def factor(self) -> float:
        """The factor of a program that nobody has run: the median of the sources'."""
        return statistics.median(self.factors.values())

    def network_seconds(self, sample: Sample) -> float:
        """Returns the time for which a run waits for the network."""
        return float(np.dot(sample.basis, self.network))

    def seconds(self, sample: Sample) -> float:
        """Returns the predicted time."""
        factor = self.factors.get(sample.source, self.factor)
        computation = factor * self.generations.get(sample.generation, 1.0) * sample.compute
        return computation + self.network_seconds(sample)


def fit(samples: Sequence[Sample]) -> Fit:
    """Fits the constants."""
    generations = sorted({sample.generation for sample in samples} - {BASE})
    sources = sorted({sample.source for sample in samples})

    def fitted(values: np.ndarray) -> Fit:
        each = iter(map(float, np.exp(values)))
        network = tuple(itertools.islice(each, len(_PRIOR)))
        of_generations = {name: next(each) for name in generations}
        return Fit(network, {BASE: 1.0} | of_generations, {name: next(each) for name in sources})

    def residuals(values: np.ndarray) -> np.ndarray:
        known = fitted(values)
        ratios = [known.seconds(sample) / sample.measured for sample in samples]
        return np.concatenate([np.log(ratios), _PULL * (values[:len(_PRIOR)] - _PRIOR)])

    start = np.concatenate([_PRIOR, np.zeros(len(generations) + len(sources))])
    widest = np.log(_WIDEST)
    low, high = start - widest, start + widest
    low[0] = 0.0  # an efficiency above 1 would say that the published bandwidths are too small
    return fitted(optimize.least_squares(residuals, start, bounds=(low, high)).x)


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
        is the smallest that would have held nine in ten of them; at its upper end the network is
        at most as fast as in the profile.
      fitted_to: what the runs are.
    """
    inverse, hop, start = found.network
    fitted = Constants(
        1 / inverse, hop * 1e-6, start * 1e-6, PROFILE.datacenter_efficiency,
        PROFILE.datacenter_seconds, found.factor,
    )
    # The profile is slower than these runs say.
    slow = dataclasses.replace(
        fitted, efficiency=min(fitted.efficiency, PROFILE.efficiency),
        hop_seconds=max(fitted.hop_seconds, PROFILE.hop_seconds),
        collective_seconds=max(fitted.collective_seconds, PROFILE.collective_seconds),
    )
    low, high = map(float, np.quantile(1 / np.asarray(ratios), (0.05, 0.95)))
    return Calibration(
        scaled(fitted, low), fitted, scaled(slow, high), fitted_to, found.generations
    )


def scaled(constants: Constants, by: float) -> Constants:
    """Returns constants with which every time is longer by a factor, with no efficiency above 1."""
    return Constants(
        min(1.0, constants.efficiency / by), constants.hop_seconds * by,
        constants.collective_seconds * by, min(1.0, constants.datacenter_efficiency / by),
        constants.datacenter_seconds * by, constants.compute_factor * by,
    )

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

There are two errors. A run left out has its source's factor from the source's other runs: this
error says how well the model scales. A source left out has the median of the other sources'
factors: this error is that of a program that nobody has run. interval.py makes an interval of what
remains.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from lamb_tpu.cost.network import PROFILE

# Of 1 / efficiency, and of the microseconds of a hop and of a collective: those of the profile. A
# factor of e away from one counts as a run that is off by 1 %, so that a constant that no run tells
# stays there. Of 8, 4, 2 and 1 % the last was best for the runs left out.
_PRIOR = np.log(
    [1 / PROFILE.efficiency, PROFILE.hop_seconds * 1e6, PROFILE.collective_seconds * 1e6]
)
_PULL = 0.01
_WIDEST = 100.0  # bound of each constant's distance from its start, as a factor
BASE = "v3"  # the generation whose factor is 1; without runs on it, the first by name


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
    def generation(self) -> float:
        """The factor of a generation without runs: the geometric mean of the others'."""
        return statistics.geometric_mean(self.generations.values())

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
        generation = self.generations.get(sample.generation, self.generation)
        computation = factor * generation * sample.compute
        return computation + self.network_seconds(sample)


def fit(samples: Sequence[Sample]) -> Fit:
    """Fits the constants; the same runs are fitted once."""
    return _fit(tuple(samples))


@functools.cache
def _fit(samples: tuple[Sample, ...]) -> Fit:
    versions = sorted({sample.generation for sample in samples})
    base = BASE if BASE in versions else versions[0]
    generations = [version for version in versions if version != base]
    sources = sorted({sample.source for sample in samples})

    def fitted(values: np.ndarray) -> Fit:
        each = iter(map(float, np.exp(values)))
        network = tuple(itertools.islice(each, len(_PRIOR)))
        of_generations = {name: next(each) for name in generations}
        return Fit(network, {base: 1.0} | of_generations, {name: next(each) for name in sources})

    def residuals(values: np.ndarray) -> np.ndarray:
        known = fitted(values)
        ratios = [known.seconds(sample) / sample.measured for sample in samples]
        return np.concatenate([np.log(ratios), _PULL * (values[: len(_PRIOR)] - _PRIOR)])

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
        others = [*samples[:place], *samples[place + 1 :]]
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

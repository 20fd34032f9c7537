"""Constants of the network, of each TPU generation and of each source, fitted to measured runs.

A run takes

    factor * generation * compute + links / efficiency + hops * hop + collectives * start

where `compute` is the compiler's estimate for all updates and evaluations; an evaluated example
costs a third of a trained one. `links` is the network time at full bandwidth; `hops` and `collectives`
are the numbers of hops and collectives for which the run waits. `factor` is one number for each
source: how much slower that team's program ran, on any slice, than the compiler estimates for our
program. `generation` is the computation time divided by the compiler's estimate, relative to the same
ratio on TPU v3. `efficiency`, `hop` and `start` are shared by all runs. The fit minimises the squared
logarithms of predicted over measured time. A weak prior pulls the shared constants toward those of a
profile on TPU v5e.

Two errors are reported. If a run is left out, its source's factor comes from the source's other
runs; this error shows how well the model scales. If a source is left out, its factor is the median
factor of the other sources; this is the error for a new program. interval.py derives an interval from
the residuals of the fit.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize

from lamb_tpu.cost.network import PROFILE

# Prior of 1 / efficiency, and of the microseconds of a hop and of a collective, from the profile. A
# constant that is off by a factor of e costs as much as a run that is off by 1 %, so a constant that
# no run determines stays at its prior. Among 8, 4, 2 and 1 %, 1 % gave the smallest leave-one-out error.
_PRIOR = np.log(
    [1 / PROFILE.efficiency, PROFILE.hop_seconds * 1e6, PROFILE.collective_seconds * 1e6]
)
_PULL = 0.01
_WIDEST = 100.0  # each fitted constant is within this factor of its start value
BASE = "v3"  # the generation with factor 1; if it has no runs, the first generation by name


@dataclasses.dataclass(frozen=True)
class Sample:
    """The numbers of a run that the fit uses.

    Attributes:
      source: name of the source.
      generation: version of the TPU.
      compute: estimated seconds of computation; an evaluated example costs a third of a trained one.
      basis: seconds that the run would wait for the network with each of `rows.BASIS`, (3,).
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
      generations: `generation` in the module's formula, by version; 1 for `BASE`.
      factors: `factor` in the module's formula, by source: the computation time relative to the compiler's
        estimate.
    """

    network: tuple[float, ...]
    generations: Mapping[str, float]
    factors: Mapping[str, float]

    @property
    def generation(self) -> float:
        """The factor of a generation without runs: the geometric mean over the generations with runs."""
        return statistics.geometric_mean(self.generations.values())

    @property
    def factor(self) -> float:
        """The factor of a program without runs: the median over the sources."""
        return statistics.median(self.factors.values())

    def network_seconds(self, sample: Sample) -> float:
        """Returns the time that a run waits for the network."""
        return float(np.dot(sample.basis, self.network))

    def seconds(self, sample: Sample) -> float:
        """Returns the predicted time of a run."""
        factor = self.factors.get(sample.source, self.factor)
        generation = self.generations.get(sample.generation, self.generation)
        computation = factor * generation * sample.compute
        return computation + self.network_seconds(sample)


def fit(samples: Sequence[Sample]) -> Fit:
    """Fits the constants; results are cached."""
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
    low[0] = 0.0  # an efficiency above 1 would mean that the published bandwidths are too small
    return fitted(optimize.least_squares(residuals, start, bounds=(low, high)).x)


def leave_out_runs(samples: Sequence[Sample]) -> list[float | None]:
    """Returns predicted over measured time of each run, with the run left out of the fit.

    The ratio is None for the only run of a source, because no other run determines the source's factor.
    """
    ratios: list[float | None] = []
    for index, sample in enumerate(samples):
        others = [*samples[:index], *samples[index + 1 :]]
        is_alone = sample.source not in {other.source for other in others}
        ratios.append(None if is_alone else fit(others).seconds(sample) / sample.measured)
    return ratios


def leave_out_sources(samples: Sequence[Sample]) -> list[float]:
    """Returns predicted over measured time of each run, with the run's source left out of the fit."""
    fits = {
        source: fit([other for other in samples if other.source != source])
        for source in {sample.source for sample in samples}
    }
    return [fits[sample.source].seconds(sample) / sample.measured for sample in samples]

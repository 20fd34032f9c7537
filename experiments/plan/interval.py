"""Intervals of planned times, and the share of left-out runs that they cover.

The fit gives one factor for each program (a source), one factor for each generation of TPU, and a
residual for each run. For a new program, the logarithm of the planned time is off by

    a new program's effect + a new generation's effect + a residual

where the second term is 0 for a generation with runs. Each effect is modelled as a draw from a normal
distribution around the mean of the n measured effects, with the variance

    (log(assumed)^2 + sum of squared deviations from the mean) / n

so an assumed spread counts as one measured deviation. This assumption matters if there are few
effects; for example, there are only two generations. The ends of the interval are quantiles of
Student's t distribution with the sum of the three variances. The degrees of freedom are those of the
variance of the programs' effects, which is the largest of the three.

The validation is nested: each program, and each generation, is left out in turn, and the constants
and variances come from the other runs alone.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.plan import fit as fit_lib
from experiments.plan.fit import Fit, Sample
from lamb_tpu.cost.network import PROFILE, Bounds, Calibrations, Constants, Validation

LEVEL = 0.9
# Assumed spreads, as factors of one standard deviation. The spread of programs is the smallest round
# number that covers nine in ten runs whose program is left out. The spread of generations is slightly
# above 1.23, that of v3 and v4; two generations cannot test this choice.
PROGRAMS, GENERATIONS = 2.0, 1.25


def variance(effects: Sequence[float], assumed: float | None) -> tuple[float, int]:
    """Returns the variance of the logarithms of factors, and its degrees of freedom.

    Args:
      effects: the factors.
      assumed: factor that counts as one measured deviation; None uses only `effects`.

    >>> round(variance([1.0], 2.0)[0] ** 0.5, 3), round(variance([1.0, 4.0], None)[0] ** 0.5, 3)
    (0.693, 0.98)
    """
    logs = np.log(np.asarray(effects))
    squares, freedom = float(np.sum((logs - logs.mean()) ** 2)), len(logs) - 1
    if assumed is not None:
        squares, freedom = squares + math.log(assumed) ** 2, freedom + 1
    return squares / freedom, freedom


def width(
    model: Fit, samples: Sequence[Sample], is_seen: bool, programs: float | None = PROGRAMS
) -> float:
    """Returns the factor from the expected time to each end of the interval.

    Args:
      model: the fit.
      samples: the runs of the fit.
      is_seen: whether the plan's generation has runs.
      programs: the assumed spread of programs; None uses only the measured factors.
    """
    spread, freedom = variance(list(model.factors.values()), programs)
    # The means over measured programs and generations are uncertain too.
    total = spread * (1 + 1 / len(model.factors))
    errors = np.log([model.seconds(sample) / sample.measured for sample in samples])
    fitted = len(model.factors) + len(model.generations) - 1
    total += float(errors @ errors) / max(1, len(samples) - fitted)
    if not is_seen:
        spread, _ = variance(list(model.generations.values()), GENERATIONS)
        total += spread * (1 + 1 / len(model.generations))
    return math.exp(stats.t.ppf((1 + LEVEL) / 2, freedom) * math.sqrt(total))


def bounds(
    model: Fit, samples: Sequence[Sample], version: str, programs: float | None = PROGRAMS
) -> Bounds:
    """Returns the constants that plan the shortest, expected and longest time of a new program.

    For the longest time, the network is at most as fast as in the profile. See `width` for `model`,
    `samples` and `programs`.
    """
    inverse, hop, start = model.network
    fitted = Constants(
        1 / inverse,
        hop * 1e-6,
        start * 1e-6,
        PROFILE.datacenter_efficiency,
        PROFILE.datacenter_seconds,
        model.factor * model.generations.get(version, model.generation),
    )
    # The network of the profile is slower than the network that these runs imply.
    slow = dataclasses.replace(
        fitted,
        efficiency=min(fitted.efficiency, PROFILE.efficiency),
        hop_seconds=max(fitted.hop_seconds, PROFILE.hop_seconds),
        collective_seconds=max(fitted.collective_seconds, PROFILE.collective_seconds),
    )
    by = width(model, samples, version in model.generations, programs)
    return Bounds(scaled(fitted, 1 / by), fitted, scaled(slow, by))


def scaled(constants: Constants, by: float) -> Constants:
    """Scales constants so that every time grows by a factor, with efficiencies of at most 1."""
    return Constants(
        min(1.0, constants.efficiency / by),
        constants.hop_seconds * by,
        constants.collective_seconds * by,
        min(1.0, constants.datacenter_efficiency / by),
        constants.datacenter_seconds * by,
        constants.compute_factor * by,
    )


def seconds(constants: Constants, sample: Sample) -> float:
    """Returns the time that these constants predict for a run."""
    links, hop, start = sample.basis
    network = links / constants.efficiency
    network += 1e6 * (hop * constants.hop_seconds + start * constants.collective_seconds)
    return constants.compute_factor * sample.compute + network


def covers(each: Bounds, sample: Sample) -> bool:
    """Returns whether a run's measured time is inside the interval."""
    return bool(seconds(each.low, sample) <= sample.measured <= seconds(each.high, sample))


def without_programs(samples: Sequence[Sample], programs: float | None = PROGRAMS) -> list[Bounds]:
    """Returns constants for each run, fitted without the run's program."""
    return _without(samples, [sample.source for sample in samples], programs)


def without_generations(samples: Sequence[Sample]) -> list[Bounds]:
    """Returns constants for each run, fitted without the run's generation."""
    return _without(samples, [sample.generation for sample in samples], PROGRAMS)


def _without(
    samples: Sequence[Sample], groups: Sequence[str], programs: float | None
) -> list[Bounds]:
    pairs, fits = list(zip(samples, groups, strict=True)), dict[str, tuple[Fit, list[Sample]]]()
    for group in dict.fromkeys(groups):
        others = [sample for sample, its in pairs if its != group]
        fits[group] = fit_lib.fit(others), others
    return [bounds(*fits[group], sample.generation, programs) for sample, group in pairs]


def covered(each: Sequence[Bounds], samples: Sequence[Sample]) -> int:
    """Returns the number of runs that are inside their intervals."""
    return sum(map(covers, each, samples))


def validate(samples: Sequence[Sample]) -> Validation:
    """Returns how accurately left-out runs are predicted."""
    generations = dict[str, tuple[int, int]]()
    if len({sample.generation for sample in samples}) > 1:
        pairs = list(zip(without_generations(samples), samples, strict=True))
        for version in sorted({sample.generation for sample in samples}):
            hits = [covers(*pair) for pair in pairs if pair[1].generation == version]
            generations[version] = sum(hits), len(hits)
    known = [ratio for ratio in fit_lib.leave_out_runs(samples) if ratio is not None]
    return Validation(
        (covered(without_programs(samples), samples), len(samples)),
        generations,
        errors(fit_lib.leave_out_sources(samples)),
        errors(known),
    )


def errors(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the largest relative error.

    >>> errors([1.1, 0.8, 1.0])
    (0.1, 0.2)
    """
    errors = [round(abs(ratio - 1), 6) for ratio in ratios]
    return statistics.median(errors), max(errors)


def calibrations(
    model: Fit, samples: Sequence[Sample], fitted_to: str, validation: Validation
) -> Calibrations:
    """Returns constants for plans: one set for each generation with runs, and one for all others."""
    known = {version: bounds(model, samples, version) for version in model.generations}
    return Calibrations(known, bounds(model, samples, ""), fitted_to, validation)

"""Totals of a run: updates, evaluation, chips, and the input that its hosts must deliver."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu.data import tokens_of
from lamb_tpu.run.build import Run
from lamb_tpu.tasks import HostScored

# Examples per second of one CPU core of an AMD EPYC: photographs that it decodes and crops, by side
# length in pixels, and pairs of sentences that it masks for BERT, by sequence length. Sources:
# experiments/bench/image_throughput.md and text_throughput.md (rows `by record`).
IMAGES_PER_CORE = {224: 1_053, 260: 1_022, 456: 863}
PAIRS_PER_CORE = {128: 27_412, 512: 16_358}
# vCPUs of a host with four chips; source: docs.cloud.google.com/tpu/docs/tpu7x.
HOST_VCPUS = {"v5p": 208, "v6e": 180, "tpu7x": 224}


class Input(NamedTuple):
    """The input of a run."""

    unit: str  # name of the examples, such as 'images'
    tokens: int  # tokens of an example; 0 for data other than text
    per_core: int | None  # examples that a host's CPU core reads per second; None if not measured
    measured: str  # page with the measurement
    is_in_memory: bool  # whether reading only copies memory


class Work(NamedTuple):
    """The work of a run."""

    updates: int
    batch_size: int  # examples of an update
    evaluations: int  # number of evaluations
    # Examples of an evaluation, times the forward passes of each, including the padding of the last
    # batch; None if the size of the evaluation set is unknown.
    eval_examples: int | None
    input: Input


class Stretch(NamedTuple):
    """A number of consecutive updates and of their examples; a plan uses their average batch size."""

    updates: float
    examples: float


class Totals(NamedTuple):
    """Times of a run in seconds, without those in `trials.LEFT_OUT`, such as start-up."""

    updates: int
    # Time of the computation of all updates: shortest, expected, longest.
    compute: tuple[float, ...]
    # Time for which all updates wait for the network: shortest, expected, longest.
    network: tuple[float, ...]
    # Time of all evaluations, if an evaluated example takes a third of the time of a trained example;
    # None if the size of the evaluation set is unknown.
    evaluation: float | None
    chips: int

    @property
    def seconds(self) -> tuple[float, ...]:
        """Time of the run: shortest, expected, longest."""
        evaluation = self.evaluation or 0.0
        return tuple(
            compute + network + evaluation
            for compute, network in zip(self.compute, self.network, strict=True)
        )

    @property
    def chip_hours(self) -> float:
        """Number of chips times the expected hours of the run."""
        return self.seconds[1] * self.chips / 3600


def work_of(run: Run) -> Work:
    """Returns the work of a run, whose data sets may be `data.ShapeSource`s, which have no examples."""
    config, recipe = run.spec, run.recipe
    passes = (2 if isinstance(run.task, HostScored) else 1) * (2 if config.ema.decay else 1)
    batches, steps = math.ceil(len(run.eval_set) / run.eval_batch_size), recipe.total_steps
    counted = getattr(run.eval_set, "counted", True)
    # An evaluation of text streams has many windows per example; training has one.
    if "inputs" in (spec := run.eval_set.element_spec):
        passes *= math.prod(spec["inputs"].shape[:-1])
    return Work(
        updates=steps,
        batch_size=config.batch_size,
        evaluations=evaluations([Stretch(steps, steps)], recipe.eval_every),
        eval_examples=batches * run.eval_batch_size * passes if counted else None,
        input=_input(run),
    )


def evaluations(path: Sequence[Stretch], every: float) -> int:
    """Returns the number of evaluations along a path if one is due every `every` examples.

    >>> [evaluations([Stretch(steps, steps)], 10) for steps in (7, 25, 30)]
    [1, 3, 3]
    """
    seen = total = 0.0
    for updates, examples in path:
        due = times_passed(seen + examples, every) - times_passed(seen, every)
        # If several evaluations are due at an update, only one is made.
        seen, total = seen + examples, total + min(updates, due)
    # An evaluation always follows the last update.
    last = seen - path[-1].examples / path[-1].updates
    return round(total) + (times_passed(seen, every) == times_passed(last, every))


def times_passed(seen: float, every: float) -> int:
    """Returns the number of positive multiples of `every` that are at most `seen`.

    >>> times_passed(29.9, 10), times_passed(30, 10)
    (2, 3)
    """
    return math.floor(seen / every + 1e-9)


def totals(work: Work, compute: Sequence[float], network: Sequence[float], chips: int) -> Totals:
    """Returns the times of a run on `chips` chips.

    `compute` and `network` are an update's seconds of computation and of waiting for the network:
    shortest, expected, longest.
    """
    evaluation = None
    if work.eval_examples is not None:
        # Training costs three forward passes, see `lamb_tpu.cost.flops`.
        evaluation = work.evaluations * work.eval_examples * compute[1] / (3 * work.batch_size)
    return Totals(
        updates=work.updates,
        compute=tuple(work.updates * each for each in compute),
        network=tuple(work.updates * each for each in network),
        evaluation=evaluation,
        chips=chips,
    )


def describe_input(work: Work, seconds: float, hosts: int, version: str) -> str:
    """Describes in one line the input that each host must deliver if an update takes `seconds`."""
    need, rate = work.batch_size / seconds / hosts, work.input.per_core
    tokens = f" ({need * work.input.tokens:,.0f} tokens)" if work.input.tokens else ""
    line = f"input: {need:,.0f} {work.input.unit}{tokens} per second and host"
    if work.input.is_in_memory:
        return f"{line}, from memory"
    if rate is None:
        return f"{line}; the rate of a CPU core was not measured"
    has = f"; a host has {HOST_VCPUS[version]} vCPUs" if version in HOST_VCPUS else ""
    return f"{line}, {need / rate:.2g} CPU cores at {rate:,} per core ({work.input.measured}){has}"


def _input(run: Run) -> Input:
    spec, name = run.train_set.element_spec, run.spec.data.name
    if length := tokens_of(spec):
        per_core = _nearest(PAIRS_PER_CORE, length) if name == "masked_lm" else None
        page, unit = "text_throughput.md", "sequences"
    else:
        is_photograph = name in ("imagenet2012", "image_folder") or name.startswith("tfds:")
        side = spec["image"].shape[0] if "image" in spec and spec["image"].shape else 0
        per_core = _nearest(IMAGES_PER_CORE, side) if is_photograph else None
        page, unit = "image_throughput.md", "images" if "image" in spec else "examples"
    return Input(
        unit=unit,
        tokens=length,
        per_core=per_core,
        measured=f"experiments/bench/{page}",
        is_in_memory=run.train_set.in_memory,
    )


def _nearest(rates: dict[int, int], size: int) -> int:
    return rates[min(rates, key=lambda known: abs(known - size))]


def span_text(low: float, high: float) -> str:
    """Formats a range of seconds.

    >>> span_text(240, 540), span_text(1700, 1700), span_text(0.0012, 0.5), span_text(9e3, 1e5)
    ('4 to 9 min', '28 min', '0.0012 to 0.5 s', '2.5 to 28 h')
    """
    unit, length = next(
        (unit for unit in (("h", 3600.0), ("min", 60.0)) if high >= 2 * unit[1]), ("s", 1.0)
    )
    texts = [_number(each / length) for each in (low, high)]
    return f"{' to '.join(dict.fromkeys(texts))} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"

"""The totals of a run: updates, evaluation, chips, and the input that its hosts must deliver."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lamb_tpu.data import tokens_of
from lamb_tpu.run.build import Run
from lamb_tpu.tasks import HostScored

# Photographs that a core decodes and crops in a second, by their size, and BERT's pairs that it
# masks, by their length: experiments/bench/image_throughput.md and text_throughput.md (read by
# record), on an AMD EPYC.
IMAGES_PER_CORE = {224: 1_053, 260: 1_022, 456: 863}
PAIRS_PER_CORE = {128: 27_412, 512: 16_358}
# vCPUs of a host with four chips, by docs.cloud.google.com/tpu/docs/tpu7x.
HOST_VCPUS = {"v5p": 208, "v6e": 180, "tpu7x": 224}


class Input(NamedTuple):
    """The input of a run.

    Attributes:
      unit: name of an example.
      tokens: tokens of an example; 0 for other data than text.
      per_core: examples that a core reads in a second; None if it was not measured.
      measured: where the rate stands.
      is_in_memory: whether reading is only a copy.
    """

    unit: str
    tokens: int
    per_core: int | None
    measured: str
    is_in_memory: bool


class Work(NamedTuple):
    """The work of a run.

    Attributes:
      updates: updates of the run.
      batch_size: examples of an update.
      evaluations: number of evaluations.
      eval_examples: forward passes of an example in each evaluation, with the padding of the last
        batch; None if the size of the evaluation set is not known.
      input: the input.
    """

    updates: int
    batch_size: int
    evaluations: int
    eval_examples: int | None
    input: Input


class Totals(NamedTuple):
    """Times of a whole run in seconds, without start-up, compilation, checkpoints and waiting.

    Attributes:
      updates: updates of the run.
      compute: time of the computation of all updates: shortest, expected, longest.
      network: time for which they wait for the network: shortest, expected, longest.
      evaluation: time of all evaluations, at a third of the training's computation an example;
        None if the size of the evaluation set is not known.
      chips: number of chips.
    """

    updates: int
    compute: tuple[float, ...]
    network: tuple[float, ...]
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
        """Chips times hours of the expected time."""
        return self.seconds[1] * self.chips / 3600


def work_of(run: Run) -> Work:
    """Returns what a run does; its data sets may be `data.ShapeSource`."""
    config, recipe = run.config, run.recipe
    passes = (2 if isinstance(run.task, HostScored) else 1) * (2 if config.ema.decay else 1)
    batches = math.ceil(len(run.eval_set) / run.eval_batch_size)
    counted = getattr(run.eval_set, "counted", True)
    # An example of streams of text is many windows in an evaluation, and one in training.
    if "inputs" in (spec := run.eval_set.element_spec):
        passes *= math.prod(spec["inputs"].shape[:-1])
    return Work(
        recipe.total_steps,
        config.batch_size,
        times_due(recipe.eval_every, recipe.total_steps),
        batches * run.eval_batch_size * passes if counted else None,
        _input(run),
    )


def times_due(every: float, steps: int) -> int:
    """Returns how often `Recipe.is_due` holds in a run of `steps` updates.

    >>> times_due(10, 25), times_due(10, 30), times_due(0.4, 7)
    (3, 3, 7)
    """
    whole = math.floor(steps / every + 1e-9)
    is_last_due = whole > math.floor((steps - 1) / every + 1e-9)
    return min(steps, whole + (not is_last_due))


def totals(work: Work, compute: Sequence[float], network: Sequence[float], chips: int) -> Totals:
    """Returns the times of a run.

    Args:
      work: what the run does.
      compute: seconds of an update's computation: shortest, expected, longest.
      network: seconds for which an update waits for the network: shortest, expected, longest.
      chips: number of chips.
    """
    evaluation = None
    if work.eval_examples is not None:
        # Training takes the forward pass three times, see `lamb_tpu.cost.flops`.
        evaluation = work.evaluations * work.eval_examples * compute[1] / (3 * work.batch_size)
    return Totals(
        work.updates,
        tuple(work.updates * each for each in compute),
        tuple(work.updates * each for each in network),
        evaluation,
        chips,
    )


def describe_input(work: Work, seconds: float, hosts: int, version: str) -> str:
    """Returns a line on the input that each host must deliver.

    Args:
      work: what the run does.
      seconds: time of an update.
      hosts: number of hosts.
      version: the TPU's version.
    """
    need, rate = work.batch_size / seconds / hosts, work.input.per_core
    tokens = f" ({need * work.input.tokens:,.0f} tokens)" if work.input.tokens else ""
    line = f"input: {need:,.0f} {work.input.unit}{tokens} a second and host"
    if work.input.is_in_memory:
        return f"{line}, from memory"
    if rate is None:
        return f"{line}; how many a core reads was not measured"
    has = f"; a host has {HOST_VCPUS[version]} vCPUs" if version in HOST_VCPUS else ""
    return f"{line}, {need / rate:.2g} cores at {rate:,} a core ({work.input.measured}){has}"


def _input(run: Run) -> Input:
    spec, name = run.train_set.element_spec, run.config.data.name
    if length := tokens_of(spec):
        per_core = _nearest(PAIRS_PER_CORE, length) if name == "masked_lm" else None
        page, unit = "text_throughput.md", "sequences"
    else:
        is_photograph = name in ("imagenet2012", "image_folder") or name.startswith("tfds:")
        side = spec["image"].shape[0] if "image" in spec and spec["image"].shape else 0
        per_core = _nearest(IMAGES_PER_CORE, side) if is_photograph else None
        page, unit = "image_throughput.md", "images" if "image" in spec else "examples"
    return Input(unit, length, per_core, f"experiments/bench/{page}", run.train_set.in_memory)


def _nearest(rates: dict[int, int], size: int) -> int:
    return rates[min(rates, key=lambda known: abs(known - size))]


def span_text(low: float, high: float) -> str:
    """Returns a span of seconds as text.

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

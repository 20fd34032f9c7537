"""Search for the largest batch of a recipe that fits on a slice: `--find=batch`.

The search doubles or halves the config's batch until one batch fits and the next does not, and then
bisects the interval between the two three times. It assumes that memory grows with the batch.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax

from lamb_tpu import terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError
from lamb_tpu.plan.trials import HEAD, Answer, Trial, Trials, table
from lamb_tpu.plan.variants import Variants
from lamb_tpu.run import checks
from lamb_tpu.run.settings import settings
from lamb_tpu.spec import Spec

_STEPS = 16  # doublings, or halvings
_BISECTIONS = 3
_NEAR = 64  # multiples of the batch unit to try; BatchNorm groups and recipes reject some of them
MOST = 1 + _STEPS + _BISECTIONS  # plans of a search


class Batches:
    """Batch sizes that a recipe, its mesh, microbatches and BatchNorm groups allow on a slice."""

    def __init__(self, variants: Variants, devices: Sequence[jax.Device]) -> None:
        self._variants, self._devices = variants, devices
        given = settings(variants.config, devices, training=False)
        self._unit = checks.batch_unit(variants.config, given.mesh, given.task)

    def at(self, batch: int) -> Spec:
        """Returns the config with another batch; raises a UserError if the batch is not allowed."""
        config = self._variants.at_batch(batch)
        settings(config, self._devices)
        return config

    def nearest(self, batch: float, low: float, high: float) -> int | None:
        """Returns the allowed size nearest to `batch`, with low < size < high; None if there is none."""
        near = itertools.islice(self._near(batch, low, high), _NEAR)
        return next((each for each in near if not self.rejection(each)), None)

    def rejection(self, batch: int) -> list[str]:
        """Returns a list with the reason why a batch is rejected; [] if the batch is allowed."""
        try:
            self.at(batch)
        except UserError as error:
            return [f"{batch:,} is rejected: {error}"]
        return []

    def _near(self, batch: float, low: float, high: float) -> Iterator[int]:
        first = round(batch / self._unit)
        for distance in range(_NEAR + 1):
            for number in dict.fromkeys((first + distance, first - distance)):
                if low < number * self._unit < high:
                    yield number * self._unit


def find(variants: Variants, topology: str, trials: Trials) -> Answer:
    """Returns the largest batch of a recipe that fits on a slice, with a table of all plans.

    `trials` makes at most `MOST` plans on the slice named `topology`.

    Raises:
      UserError: the config has an error, or no batch near its batch is allowed.
    """
    devices = topology_lib.devices(topology_lib.topology(topology))
    return search(Batches(variants, devices), variants.config.batch_size, topology, trials)


def search(batches: Batches, asked: int, topology: str, trials: Trials) -> Answer:
    """Searches for the largest of `batches` that fits, and starts near the batch `asked`; see `find`.

    If a batch is allowed, but its plan is rejected, for example because the run would have no update,
    the search continues as if the batch did not fit.
    """
    start = batches.nearest(asked, 0, math.inf)
    if start is None:
        batches.at(asked)  # raises with the reason, unless the batch is allowed
        start = asked
    tried: dict[int, Trial] = {}
    notes = []
    if start != asked:
        text = f"the config's batch, {asked:,}, is rejected on {topology}; the search began at "
        notes = [f"{text}{start:,}"]

    def fits(batch: int) -> bool:
        make = trials.make if tried else trials.first
        tried[batch] = make(batches.at(batch), topology, f"batch {batch:,}")
        return tried[batch].fits

    low, high, batch = 0, math.inf, start
    for _ in range(1 + _STEPS):
        if fits(batch):
            low = batch
        else:
            high = batch
        # Stop after the first batch that does not fit or, when halving, the first that fits.
        if low and high < math.inf:
            break
        near = (2 * batch, batch, 4 * batch) if low else (batch / 2, 0, batch)
        following = batches.nearest(*near)
        if following is None:
            notes += batches.rejection(2 * batch if low else batch // 2)
            break
        batch = following
    for _ in range(_BISECTIONS):
        if not low or high == math.inf:
            break
        middle = batches.nearest((low + high) / 2, low, high)
        if middle is None:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return _answer(topology, tried, low, high, notes)


def _answer(
    topology: str, tried: dict[int, Trial], low: int, high: float, notes: list[str]
) -> Answer:
    rows = [
        (
            (
                f"{batch:,}",
                *trial.cells(),
                *([f"{batch / trial.expected:,.0f}"] if trial.expected < math.inf else []),
            ),
            trial,
        )
        for batch, trial in sorted(tried.items())
    ]
    shown = table(("batch", *HEAD, "examples a second"), rows, right=(0, 2, 4))
    if low:
        best = tried[low]
        line = f"the largest batch that fits on {topology}: {low:,} ({best.describe()}); "
        if high == math.inf:
            line += "no larger batch was tried"
        else:
            verb = "is rejected" if tried[int(high)].rejected else "does not fit"
            line += f"{high:,.0f} {verb}"
    else:
        line = f"no batch fits on {topology}, not even {min(tried):,}, the smallest that was tried"
    return Answer(
        "\n".join([shown, terminal.fit("\n".join([*notes, line]))]),
        {
            "topology": topology,
            "find": "batch",
            "batch_size": low or None,
            "decision": line,
            "trials": [
                trial.as_json() | {"batch_size": batch} for batch, trial in sorted(tried.items())
            ],
        },
    )

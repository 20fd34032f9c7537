"""The largest batch of a recipe that fits on a slice: `--find=batch`.

The search doubles the config's batch, or halves it, until one fits and the next does not, and then
halves the distance between the two three times. Memory is taken to grow with the batch.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax
from ml_collections import ConfigDict

from lamb_tpu import terminal
from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.errors import UserError
from lamb_tpu.plan.trials import HEAD, Answer, Trial, Trials, table
from lamb_tpu.plan.variants import Variants
from lamb_tpu.run import checks
from lamb_tpu.run.build import settings

_STEPS = 16  # doublings, or halvings
_BISECTIONS = 3
_NEAR = 64  # multiples of the unit that are checked for BatchNorm's groups and the recipe's rows
MOST = 1 + _STEPS + _BISECTIONS  # plans of a search


class Batches:
    """The batches that a recipe, its mesh, its microbatches and its BatchNorm allow on a slice.

    Args:
      variants: the recipe.
      devices: devices of the slice.

    Raises:
      UserError: the config has a mistake, other than in its batch.
    """

    def __init__(self, variants: Variants, devices: Sequence[jax.Device]) -> None:
        self._variants, self._devices = variants, devices
        found = settings(variants.config, devices, training=False)
        self._unit = checks.batch_unit(variants.config, found.mesh, found.task)

    def at(self, batch: int) -> ConfigDict:
        """Returns the config at a batch.

        Raises:
          UserError: the batch is not allowed.
        """
        config = self._variants.at_batch(batch)
        settings(config, self._devices)
        return config

    def nearest(self, batch: float, low: float, high: float) -> int | None:
        """Returns the allowed batch nearest to `batch` between `low` and `high`; None without one.

        Neither of the two is among them.
        """
        near = itertools.islice(self._near(batch, low, high), _NEAR)
        return next((each for each in near if not self.refusal(each)), None)

    def refusal(self, batch: int) -> list[str]:
        """Returns a line that says why a batch is not allowed; none if it is."""
        try:
            self.at(batch)
        except UserError as error:
            return [f"{batch:,} is refused: {error}"]
        return []

    def _near(self, batch: float, low: float, high: float) -> Iterator[int]:
        """Yields the multiples of the unit between two batches, nearest first."""
        first = round(batch / self._unit)
        for distance in range(_NEAR + 1):
            for number in dict.fromkeys((first + distance, first - distance)):
                if low < number * self._unit < high:
                    yield number * self._unit


def find(variants: Variants, topology: str, trials: Trials) -> Answer:
    """Returns the largest batch of a recipe that fits on a slice, and the table of those tried.

    Args:
      variants: the recipe.
      topology: name of the slice.
      trials: makes the plans, at most `MOST`.

    Raises:
      UserError: the config has a mistake, or no batch near its own is allowed.
    """
    devices = topology_lib.devices(topology_lib.topology(topology))
    return search(Batches(variants, devices), variants.config.batch_size, topology, trials)


def search(batches: Batches, asked: int, topology: str, trials: Trials) -> Answer:
    """Returns the largest batch that fits, and the table of those tried.

    A batch that is refused when it is planned, because the run would have no update for example,
    counts as one that does not fit.

    Args:
      batches: the batches that are allowed.
      asked: the batch near which the search begins.
      topology, trials: as those of `find`.

    Raises:
      UserError: the config has a mistake, or no batch near its own is allowed.
    """
    start = batches.nearest(asked, 0, math.inf)
    if start is None:
        batches.at(asked)  # raises, with the reason
        raise UserError(f"config.batch_size is {asked}, and no batch near it divides on {topology}")
    found: dict[int, Trial] = {}
    notes = (
        []
        if start == asked
        else [
            f"the config's own batch, {asked:,}, is refused on {topology}; the search began at "
            f"{start:,}"
        ]
    )

    def fits(batch: int) -> bool:
        make = trials.make if found else trials.first
        found[batch] = make(batches.at(batch), topology, f"batch {batch:,}")
        return found[batch].fits

    low, high, batch = 0, math.inf, start
    for _ in range(1 + _STEPS):
        if fits(batch):
            low = batch
        else:
            high = batch
        # Up to the first that does not fit, or down to the first that does.
        if low and high < math.inf:
            break
        following = (
            batches.nearest(2 * batch, batch, 4 * batch)
            if low
            else (batches.nearest(batch / 2, 0, batch))
        )
        if following is None:
            notes += batches.refusal(2 * batch if low else batch // 2)
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
    return _answer(topology, found, low, high, notes)


def _answer(
    topology: str, found: dict[int, Trial], low: int, high: float, notes: list[str]
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
        for batch, trial in sorted(found.items())
    ]
    shown = table(("batch", *HEAD, "examples a second"), rows, right=(0, 2, 4))
    if low:
        best = found[low]
        line = f"the largest batch that fits on {topology}: {low:,} ({best.describe()}); "
        if high == math.inf:
            line += "no larger one was tried"
        else:
            line += f"{int(high):,} {'is refused' if found[int(high)].refused else 'does not fit'}"
    else:
        line = f"no batch fits on {topology}, not even {min(found):,}, the smallest that was tried"
    return Answer(
        "\n".join([shown, terminal.fit("\n".join([*notes, line]))]),
        {
            "topology": topology,
            "find": "batch",
            "batch_size": low or None,
            "decision": line,
            "trials": [
                trial.as_json() | {"batch_size": batch} for batch, trial in sorted(found.items())
            ],
        },
    )

"""The number of updates in each call of the compiled step: `config.loop.updates_per_call`.

A call ends at each update after which the loop has work: a record, an evaluation, a save, a new
stage of the exchange, or work of an observer. Records, checkpoints and guards are therefore the
same as with one update per call.
"""

from collections.abc import Callable, Iterable

from lamb_tpu import spec_keys
from lamb_tpu.run import batches
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.spec import Spec

KEY = "config.loop.updates_per_call"
# The call size is chosen from the ends of calls within this many updates, several epochs in most
# runs.
_PLANNED = 4000


class Calls:
    """Divides a run's updates into calls of `size` updates, and single updates between them.

    Calls have only two sizes, so two compiled programs suffice. The first update after the run starts or
    resumes is a separate call, because rates and the time left are measured from its end.

    Args:
      most: largest number of updates in a call.
      ends: returns whether a call must end at an update, counted from 1. The constructor calls `ends`
        for up to 4,000 updates ahead; `count` calls it once per update, shortly before that update.
      first: number of completed updates.
      total: number of updates of the run.
    """

    def __init__(
        self,
        most: int = 1,
        ends: Callable[[int], bool] = lambda update: False,
        first: int = 0,
        total: int = 0,
    ) -> None:
        self._ends, self._first, self._total = ends, first, total
        self._end, self._seen = 0, first + 1
        self.size = 1
        if most > 1:
            distances, last = [], first + 1
            for update in range(first + 2, min(total, first + _PLANNED) + 1):
                if update == total or ends(update):
                    distances.append(update - last)
                    last = update
            # If no call must end within these updates, the next end is at least this far away.
            distances = distances or [min(total, first + _PLANNED) - last]
            self.size = best_size(distances, most)

    def count(self, step: int) -> int:
        """Returns the number of updates in the call after `step` completed updates."""
        if self.size == 1 or step == self._first:
            return 1
        if self._end <= step:
            # Look for the next end within the reach of one call.
            self._seen = max(self._seen, step)
            while self._seen < min(step + self.size, self._total):
                self._seen += 1
                if self._ends(self._seen):
                    self._end = self._seen
                    break
        reach = self._end if self._end > step else self._seen
        return self.size if reach - step >= self.size else 1


def best_size(distances: Iterable[int], most: int) -> int:
    """Returns the call size, at most `most`, that needs the fewest calls.

    `distances` are numbers of updates from one required end of a call to the next; single updates
    cover the remainder of each distance.

    >>> best_size([100, 100], 50), best_size([58, 59, 58], 50), best_size([10, 8, 2, 10], 50)
    (50, 29, 10)
    """
    distances = [distance for distance in distances if distance > 0]
    # Candidates: the size that divides each distance into as few equal calls as `most` allows.
    equal = {-(-distance // -(-distance // most)) for distance in distances}
    sizes = sorted({1, *equal, *(min(distance, most) for distance in distances)})
    return min(sizes, key=lambda size: sum(sum(divmod(each, size)) for each in distances))


def make_calls(
    loop: spec_keys.Loop,
    recipe: Recipe,
    observed: Callable[[int], bool],
    begins_stage: Callable[[int], bool],
    first: int,
) -> Calls:
    """Returns the calls of a run that starts or resumes after `first` updates.

    A call ends at each update that is recorded, evaluated or saved or that an observer must see
    (`observed`), and before each update that needs a new program (`begins_stage`).
    """

    def ends(update: int) -> bool:
        return (
            recipe.is_due(recipe.log_every, update)
            or recipe.is_due(recipe.eval_every, update)
            or recipe.is_save_due(update)
            or observed(update)
            or begins_stage(update)
        )

    return Calls(loop.updates_per_call, ends, first, recipe.total_steps)


def added_by_host(spec: Spec) -> str:
    """Returns the setting 'key=value' that makes the host add up microbatches; '' if devices do."""
    changes = batches.check_rule(spec)[0] is not None
    return f"config.batch_rule.name={spec.batch_rule.name!r}" if changes else ""

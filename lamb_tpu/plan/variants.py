"""Variants of a recipe with other values of keys, another batch or another argument."""

import shlex
from typing import Any

from lamb_tpu import overrides
from lamb_tpu.errors import UserError
from lamb_tpu.spec import Spec, changed, flatten, value_of


class Variants:
    """Makes variants of a recipe; overrides of the config's keys are preserved.

    A recipe can derive other settings from the batch: recipes with LARS have a learning rate, a
    warm-up and a BatchNorm group size for each batch. Therefore another batch is passed to the
    recipe as its argument `batch`, before the overrides are applied. If the recipe lacks that
    argument, or config.batch_size is overridden, only config.batch_size changes.

    Args:
      recipe: the recipe as --config takes it, such as 'configs/digits.py:batch=4096'.
      config: the recipe's config with all overrides, without phases.
    """

    def __init__(self, recipe: str, config: Spec) -> None:
        self.config = config
        self._recipe = recipe
        original = overrides.load(recipe)
        self._overrides = differences(original, config)
        # If the recipe accepts the argument, repeating its default batch changes nothing.
        self._takes_batch = "batch_size" not in self._overrides and (
            self._differences(original, f"batch={original.batch_size}") == {}
        )

    def at_batch(self, batch: int) -> Spec:
        """Returns the config with another batch; raises a UserError if the recipe rejects the batch."""
        if batch == self.config.batch_size:
            return self.config
        config = self._with(f"batch={batch}") if self._takes_batch else self.config
        # A smoke variant ignores the argument, so set the batch again.
        return changed(config, {**self._overrides, "batch_size": batch})

    def by_argument(self, argument: str) -> dict[str, Any]:
        """Returns the keys and values that an argument changes; {} if the recipe rejects the argument."""
        return self._differences(overrides.load(self._recipe), argument) or {}

    def _differences(self, original: Spec, argument: str) -> dict[str, Any] | None:
        """Returns the keys and values that an argument changes; None if the recipe rejects the argument."""
        try:
            return differences(original, self._with(argument))
        except UserError:
            return None

    def _with(self, argument: str) -> Spec:
        return overrides.load(overrides.with_argument(self._recipe, argument))


def differences(before: Spec, now: Spec) -> dict[str, Any]:
    """Returns the keys and values of `now` that are missing or different in `before`."""
    old = flatten(before)
    return {
        key: value_of(now, key)
        for key, value in flatten(now).items()
        if key not in old or old[key] != value
    }


def flag(key: str, value: Any) -> str:
    """Returns the flag that sets a key of the config, quoted for a shell.

    >>> flag("model.hidden_sizes", (4, 4))
    "'--config.model.hidden_sizes=(4, 4)'"
    """
    return shlex.quote(overrides.flag(key, value))

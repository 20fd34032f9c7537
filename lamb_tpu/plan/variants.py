"""Variants of a recipe: with other keys, at another batch, with an argument of its own."""

import shlex
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from lamb_tpu import cli
from lamb_tpu.config import flatten, section_of
from lamb_tpu.errors import UserError


class Variants:
    """A recipe with overrides, and its variants.

    A recipe's own rule can say what else changes with the batch: LARS has a row of rates, a warm-up
    and groups of BatchNorm for each. So another batch is given to the recipe as its argument
    `batch`, and the overrides are applied after that. A recipe without that argument, and a config
    whose batch_size is itself overridden, get another config.batch_size and nothing else.

    Args:
      recipe: the recipe as --config takes it, such as 'configs/digits.py:batch=4096'.
      config: its config with all overrides, without phases.

    Raises:
      UserError: the recipe cannot be loaded.
    """

    def __init__(self, recipe: str, config: ConfigDict) -> None:
        self.config = config
        self._recipe = recipe
        own = cli.load_recipe(recipe)
        self._overrides = differences(own, config)
        # An argument that the recipe takes changes nothing where it repeats the recipe's own batch.
        self._takes_batch = "batch_size" not in self._overrides and (
            self._differences(own, f"batch={own.batch_size}") == {}
        )

    def at_batch(self, batch: int) -> ConfigDict:
        """Returns the config at another batch.

        Raises:
          UserError: the recipe refuses the batch.
        """
        if batch == self.config.batch_size:
            return self.config
        found = cli.load_recipe(self._with(f"batch={batch}")) if self._takes_batch else self.config
        # A smoke variant keeps its own batch, whatever the argument.
        return changed(found, {**self._overrides, "batch_size": batch})

    def by_argument(self, argument: str) -> dict[str, Any]:
        """Returns the keys that an argument of the recipe changes; none if it takes no such."""
        return self._differences(cli.load_recipe(self._recipe), argument) or {}

    def _differences(self, own: ConfigDict, argument: str) -> dict[str, Any] | None:
        """Returns the keys that an argument changes; None if the recipe refuses it."""
        try:
            return differences(own, cli.load_recipe(self._with(argument)))
        except UserError:
            return None

    def _with(self, argument: str) -> str:
        return f"{self._recipe}{',' if ':' in self._recipe else ':'}{argument}"


def differences(before: ConfigDict, now: ConfigDict) -> dict[str, Any]:
    """Returns the keys of `now` that `before` lacks or has with another value."""
    old = flatten(before)
    return {
        key: section_of(now, key)[key.rpartition(".")[2]]
        for key, value in flatten(now).items()
        if key not in old or old[key] != value
    }


def changed(config: ConfigDict, changes: Mapping[str, Any]) -> ConfigDict:
    """Returns a copy of a config with the values of dotted keys; keys that it lacks are added."""
    copy = config.copy_and_resolve_references()
    with copy.unlocked(), copy.ignore_type():
        for key, value in changes.items():
            *sections, last = key.split(".")
            node = copy
            for name in sections:
                if name not in node:
                    node[name] = ConfigDict()
                node = node[name]
            node[last] = value
    return copy


def flag(key: str, value: Any) -> str:
    """Returns the flag that sets a key of the config, quoted for a shell.

    >>> flag("parallel.backend", "jit"), flag("accumulation_steps", 4)
    ('--config.parallel.backend=jit', '--config.accumulation_steps=4')
    >>> flag("model.hidden_sizes", (4, 4))
    "'--config.model.hidden_sizes=(4, 4)'"
    """
    return shlex.quote(f"--config.{key}={value if isinstance(value, str) else repr(value)}")

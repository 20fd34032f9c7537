"""The optimizer of a config, resolved once and then built for a recipe and parameters."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lamb_tpu.errors import naming
from lamb_tpu.optim import factory, parameters
from lamb_tpu.parallel.layout import Layout
from lamb_tpu.run.categories import OPTIMIZERS
from lamb_tpu.run.recipe import Recipe
from lamb_tpu.spec_keys import Component
from lamb_tpu.types import Params

# Parameter metadata of a custom optimizer that takes no rules.
_NO_RULES = (("", {"decay": False, "adapt": False}),)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The resolved section config.optimizer, after all checks that need no parameters.

    Attributes:
      build: the name of a shipped optimizer, or the function of a custom one, see
        `factory.make_optimizer`.
      fields: the arguments in the config, without the learning rate.
      rules: rules from which the parameter metadata are derived.
      arguments: all arguments, including defaults and the learning rate at the base batch size.
    """

    name: str
    build: str | Callable[..., Any]
    fields: Mapping[str, Any]
    rules: parameters.Rules
    arguments: Mapping[str, Any]

    @property
    def is_custom(self) -> bool:
        """True for an optimizer from another package."""
        return callable(self.build)

    def make(
        self,
        recipe: Recipe,
        params: Params = None,
        layout: Layout | None = None,
        rate: jax.typing.ArrayLike = math.nan,
    ) -> optax.GradientTransformation:
        """Returns the transformation with the learning rate of a recipe.

        Args:
          recipe: the recipe.
          params: the parameters, or their shapes and dtypes, to check arguments against; None: skip
            those checks.
          layout: inside shard_map, the shardings of parameters and moments; None under jit.
          rate: if the batch size changes, the learning rate of one update, a number or a tracer; the
            default NaN makes a forgotten rate visible. A constant batch uses the recipe's schedule.
        """
        fields = {"name": self.build, **self.fields}

        def learning_rate(count: Any) -> Any:
            if recipe.path is not None:
                return jnp.asarray(rate, jnp.float32)
            # With resumed moments, bias correction continues, but the schedule starts at 0.
            return recipe.learning_rate(count - recipe.updates_before)

        if recipe.weight_decay is not None:
            fields["weight_decay"] = recipe.weight_decay
        if layout is not None:
            # A custom optimizer gets only the mesh axes; a shipped optimizer also gets the dimension
            # that each axis splits.
            fields["axis_name"] = layout.axis_name if self.is_custom else layout.update_spec
        with naming("config.optimizer", fields):
            return factory.make_optimizer(fields, learning_rate, params)


def resolve_optimizer(section: Component) -> Optimizer:
    """Resolves the section config.optimizer."""
    fields = section.as_dict()
    name = fields.pop("name")
    with naming("config.optimizer", section.as_dict()):
        OPTIMIZERS.check(name, fields)
        build = OPTIMIZERS.find(name) if OPTIMIZERS.is_custom(name) else name
        arguments = factory.arguments_of({**fields, "name": build})
        del fields["learning_rate"]
        return Optimizer(name, build, fields, _rules(build, fields), arguments)


def _rules(build: Any, fields: Mapping[str, Any]) -> parameters.Rules:
    """Returns the optimizer's rules, or their default if the config has none."""
    if "rules" in fields:
        return fields["rules"]
    if not callable(build):
        return parameters.DEFAULT_RULES
    own_rules = factory.custom_arguments(build).get("rules")
    return _NO_RULES if own_rules is None else own_rules.default

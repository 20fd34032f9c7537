"""The registries of all component types, keyed by the config section that holds a component's fields.

The registry of optimizers is here, because `lamb_tpu.optim` imports no other package. Each other
registry is defined beside its shipped components.
"""

from typing import Any

from lamb_tpu.batching.rules import RULES
from lamb_tpu.components import Field, Registry
from lamb_tpu.data.registry import DATASETS
from lamb_tpu.errors import UserError, naming
from lamb_tpu.models import MODULES
from lamb_tpu.optim import factory
from lamb_tpu.parallel.exchange import EXCHANGES
from lamb_tpu.run.decays import DECAYS
from lamb_tpu.spec import Spec, as_dict, value_of
from lamb_tpu.tasks import TASKS


def _optimizer_fields(build: Any) -> dict[str, Field]:
    with naming("config.optimizer"):
        arguments = factory.custom_arguments(build)
    del arguments["axis_name"]  # set by config.parallel
    fields = {key: Field(p.annotation, p.default) for key, p in arguments.items()}
    return {"learning_rate": Field(float), **fields}


OPTIMIZERS = Registry("optimizer", factory.OPTIMIZERS, fields=_optimizer_fields)

REGISTRIES = {
    registry.section: registry
    for registry in (OPTIMIZERS, MODULES, TASKS, DATASETS, DECAYS, RULES, EXCHANGES)
}


def check_fields(spec: Spec) -> None:
    """Rejects unknown or missing fields of components, and values of the wrong type.

    Ignores an unknown component, because building the component reports it.
    """
    for section, registry in REGISTRIES.items():
        name = registry.name_of(as_dict(spec))
        try:
            registry.fields(name)
        except UserError:
            continue
        fields = value_of(spec, section)
        if registry.named_in_section:
            fields.pop("name", None)
        registry.check(name, fields)

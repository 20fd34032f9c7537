"""Learning problems, chosen by name: what the loss is, what is measured, what a batch holds."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from lamb_tpu.data import Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks.classification import Classification

Sums = Mapping[str, tuple[jax.Array, jax.Array]]


class Task(Protocol):
    """One learning problem.

    Every quantity is a pair (sum over examples, weight), never a mean, so that microbatches,
    devices and processes add up and a metric is divided once.
    """

    def check(self, source: Source) -> None:
        """Raises ValueError when the data does not fit the model or the task."""

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, Sums]]:
        """((loss sum, weight), (new model state, sums of the metrics to log))."""

    def evaluate(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Sums:
        """Metric sums over the examples whose `batch['mask']` is true."""


TASKS: dict[str, Callable[..., Task]] = {"classification": Classification}


def build(name: str, model: Model, **fields: Any) -> Task:
    """The named task around `model`.

    Raises:
      UserError: an unknown name or field; the message lists the known ones.
    """
    if name not in TASKS:
        raise UserError(f"config.task.name is {name!r}; known tasks: {', '.join(TASKS)}")
    known = [field for field in TASKS[name].__dataclass_fields__ if field != "model"]
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.task.{key} is no field of task {name!r}; known: {', '.join(known)}"
            )
    return TASKS[name](model, **fields)

"""Learning problems, chosen by name: what the loss is, what is measured, what a batch holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from lamb_tpu import own
from lamb_tpu.data import Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks.classification import Classification
from lamb_tpu.tasks.masked_lm import MaskedLm
from lamb_tpu.tasks.question_answering import QuestionAnswering

Sums = Mapping[str, tuple[jax.Array, jax.Array]]


class Task(Protocol):
    """One learning problem.

    The loss is a sum of named terms, each the mean of something over a batch: over its examples, or
    over its masked words. A task gives the sum and the weight of every term, never a mean, so that
    microbatches, devices and processes add up and a term is divided once. Metrics are pairs
    (sum, weight) for the same reason.

    Attributes:
      model: the network.
    """

    @property
    def model(self) -> Model: ...

    def check(self, source: Source) -> None:
        """Raises ValueError when the data does not fit the model or the task."""

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""

    def weights(self, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array | np.float32]:
        """The weight of each term of the loss, summed over the rows of `batch` in float32.

        A NumPy number where it follows from shapes alone: that is added up without communication.
        """

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[Mapping[str, jax.Array], tuple[Any, Sums]]:
        """(the terms' sums over the rows, (new model state, sums of the metrics to log))."""

    def evaluate(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Sums:
        """Metric sums over the examples whose `batch['mask']` is true."""


@runtime_checkable
class HostScored(Protocol):
    """What a task has besides where its scores are of all examples together, made on the host.

    Attributes:
      score_names: the metrics that `score` gives.
    """

    score_names: tuple[str, ...]

    def predict(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Any:
        """What the scores are made of: a tree of arrays (rows, ...)."""

    def score(self, source: Source, outputs: Any) -> tuple[dict[str, float], dict[str, str]]:
        """Scores the predictions for a whole set.

        Args:
          source: the set.
          outputs: those of `predict` for each of its examples once, in its order, as NumPy arrays.

        Returns:
          The metrics; and texts to keep beside the run, by file name.
        """


TASKS: dict[str, type[Classification | MaskedLm | QuestionAnswering]] = {
    "classification": Classification,
    "masked_lm": MaskedLm,
    "question_answering": QuestionAnswering,
}


def own_fields(name: str) -> dict[str, dataclasses.Field]:
    """The fields of config.task for the named task, with their types and defaults.

    Raises:
      UserError: an unknown name; the message lists the known ones.
    """
    if own.is_own(name):
        return own.fields(own.find(name, "config.task.name"), ("model",))
    if name not in TASKS:
        raise UserError(f"config.task.name is {name!r}; known tasks: {', '.join(TASKS)}")
    return {f.name: f for f in dataclasses.fields(TASKS[name]) if f.name != "model"}


def build(name: str, model: Model, **fields: Any) -> Task:
    """The named task around `model`; 'package.module:Name' is a user's own, see README.md here.

    Raises:
      UserError: an unknown name or field; the message lists the known ones.
    """
    known = own_fields(name)
    if own.is_own(name):
        return _build_own(name, model, known, fields)
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.task.{key} is no field of task {name!r}; known: "
                f"{', '.join(known) or 'none'}"
            )
    return TASKS[name](model, **fields)


_METHODS = ("check", "init", "weights", "loss", "evaluate")


def _build_own(
    name: str, model: Model, known: Mapping[str, dataclasses.Field], fields: Mapping[str, Any]
) -> Task:
    key = "config.task.name"
    own.check("config.task", "task", name, known, fields)
    with own.making(name, key):
        task = own.find(name, key)(model=model, **fields)
    missing = [part for part in ("model", *_METHODS) if not hasattr(task, part)]
    if missing:
        raise UserError(
            f"{key} is {name!r}, which makes {task!r} without {', '.join(missing)}; a task has "
            f"model and the methods {', '.join(_METHODS)}"
        )
    return task

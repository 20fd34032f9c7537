"""Learning problems, chosen by name: the loss, the metrics, and the fields of a batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from lamb_tpu import own
from lamb_tpu.data import Ranges, Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks.classification import Classification
from lamb_tpu.tasks.language_model import LanguageModel
from lamb_tpu.tasks.masked_lm import MaskedLm
from lamb_tpu.tasks.question_answering import QuestionAnswering
from lamb_tpu.tasks.translation import Translation

Sums = Mapping[str, tuple[jax.Array, jax.Array]]


class Task(Protocol):
    """One learning problem.

    The loss is a sum of named terms. Each is a mean over a batch: over its examples, or over its
    masked words. A task returns the sum and the weight of every term, never a mean, so that
    microbatches, devices and processes add up and a term is divided once. Metrics are pairs
    (sum, weight) for the same reason. Where a metric's name ends with 'perplexity', the exponential
    of the mean is reported.

    If the network hands on a state (`Model.carry_shape`), a training batch has it as the field
    `carry`, (rows, *shape), and `loss` returns the new one as `carry` in the model state. A batch
    without that field, as in `init`, gets no new one.

    Attributes:
      model: the network.
    """

    @property
    def model(self) -> Model: ...

    def check(self, source: Source) -> None:
        """Raises ValueError if the data does not fit the model or the task."""

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the model's variables for batches shaped like `batch`."""

    def weights(self, batch: Mapping[str, jax.Array]) -> Mapping[str, jax.Array | np.float32]:
        """Returns the weight of each term of the loss, summed over the rows of `batch` in float32.

        A weight that follows from shapes alone should be a NumPy number: it needs no communication.
        """

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[Mapping[str, jax.Array], tuple[Any, Sums]]:
        """Returns (sums of the terms over the rows, (new model state, metric sums to log))."""

    def evaluate(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Sums:
        """Returns metric sums over the examples whose `batch['mask']` is true."""


@runtime_checkable
class HostScored(Protocol):
    """Extra methods of a task that is scored on the whole set, on the host, such as F1.

    Attributes:
      score_names: names of the metrics that `score` returns.
    """

    score_names: tuple[str, ...]

    def predict(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> Any:
        """Returns the outputs that `score` needs, a tree of arrays (rows, ...)."""

    def score(self, source: Source, outputs: Any) -> tuple[dict[str, float], dict[str, str]]:
        """Scores the predictions for a whole set.

        Args:
          source: the set.
          outputs: outputs of `predict` for each example of the set once, in order, as NumPy arrays.

        Returns:
          The metrics; and the texts of files for the run's folder, by file name.
        """


@runtime_checkable
class HasRanges(Protocol):
    """Extra method of a task that knows the valid values of its fields.

    Every batch is checked by it on the host. Without it only shapes and dtypes are checked, that
    numbers are finite, and that `mask` is 0 or 1.
    """

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid values of the fields of `source`, which has passed `Task.check`."""


def field_ranges(task: Task, source: Source) -> Ranges:
    """Returns the valid values of the task's fields; none for a task that declares none."""
    return task.field_ranges(source) if isinstance(task, HasRanges) else {}


TASKS: dict[str, type[Any]] = {
    "classification": Classification,
    "language_model": LanguageModel,
    "masked_lm": MaskedLm,
    "question_answering": QuestionAnswering,
    "translation": Translation,
}


def own_fields(name: str) -> dict[str, dataclasses.Field]:
    """Returns the fields of config.task for the named task, with their types and defaults.

    Raises:
      UserError: the name is unknown; the message lists the known ones.
    """
    if own.is_own(name):
        return own.fields(own.find(name, "config.task.name"), ("model",))
    if name not in TASKS:
        raise UserError(
            f"config.task.name is {name!r}; known tasks: {', '.join(TASKS)}, and "
            "'package.module:Name' for your own"
        )
    return {f.name: f for f in dataclasses.fields(TASKS[name]) if f.name != "model"}


def build(name: str, model: Model, **fields: Any) -> Task:
    """Builds the named task around `model`; 'package.module:Name' is a user's own, see README.md.

    Raises:
      UserError: the name or a field is unknown; the message lists the known ones.
    """
    known = own_fields(name)
    if own.is_own(name):
        return _build_own(name, model, known, fields)
    for key in fields:
        if key not in known:
            raise UserError(
                f"config.task.{key} is not a field of task {name!r}; known: "
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
    # `isinstance` with the protocol would not say which part is missing.
    missing = [part for part in ("model", *_METHODS) if not hasattr(task, part)]
    if missing:
        raise UserError(
            f"{key} is {name!r}, which makes {task!r} without {', '.join(missing)}; a task has "
            f"model and the methods {', '.join(_METHODS)}"
        )
    return task

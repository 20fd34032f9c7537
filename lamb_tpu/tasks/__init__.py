"""Learning problems, chosen by name: the loss, the metrics, and the fields of a batch."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from lamb_tpu.components import Registry
from lamb_tpu.data import Ranges, Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks.classification import Classification
from lamb_tpu.tasks.language_model import LanguageModel
from lamb_tpu.tasks.masked_lm import MaskedLm
from lamb_tpu.tasks.question_answering import QuestionAnswering
from lamb_tpu.tasks.translation import Translation
from lamb_tpu.types import Batch, Params, PyTree

Sums = Mapping[str, tuple[jax.Array, jax.Array]]


class Task(Protocol):
    """One learning problem.

    The loss is a sum of named terms. Each term is a mean over the examples of a batch, or over its
    masked words. A task returns the sum and the weight of every term, never a mean, so that
    microbatches, devices and processes can add them up and divide once. Metrics are pairs
    (sum, weight) for the same reason. If a metric's name ends with 'perplexity', the exponential of
    its mean is reported.

    If the network has a recurrent state (`Model.carry_shape`), a training batch has the state as the
    field `carry`, of shape (rows, *carry_shape), and `loss` returns the new state as `carry` in the
    model state. If a batch lacks this field, as in `init`, `loss` returns no new state.
    """

    @property
    def model(self) -> Model: ...

    def check(self, source: Source) -> None:
        """Raises ValueError if the data does not fit the model or the task."""

    def init(self, key: jax.Array, batch: Batch) -> Mapping[str, Any]:
        """Returns the model's variables for batches shaped like `batch`."""

    def weights(self, batch: Batch) -> Mapping[str, jax.Array | np.float32]:
        """Returns the weight of each term of the loss, summed over the rows of `batch` in float32.

        A weight that depends only on shapes should be a NumPy number, which needs no communication.
        """

    def loss(
        self, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[Mapping[str, jax.Array], tuple[Any, Sums]]:
        """Returns (sums of the terms over the rows, (new model state, metric sums to log))."""

    def evaluate(self, params: Params, model_state: PyTree, batch: Batch) -> Sums:
        """Returns metric sums over the examples whose `batch['mask']` is true."""


@runtime_checkable
class HostScored(Protocol):
    """Additional methods of a task with a metric, such as F1, that the host computes from a full set."""

    score_names: tuple[str, ...]

    def predict(self, params: Params, model_state: PyTree, batch: Batch) -> Any:
        """Returns the outputs that `score` needs, a tree of arrays (rows, ...)."""

    def score(self, source: Source, outputs: Any) -> tuple[dict[str, float], dict[str, str]]:
        """Returns the metrics in `score_names`, and file name -> content of files for the workdir.

        `outputs` has the outputs of `predict` as NumPy arrays: one row per example of `source`, in order.
        """


@runtime_checkable
class HasRanges(Protocol):
    """Additional method of a task that declares valid values, which the host checks in every batch.

    Without this method, the host only checks shapes and dtypes, that numbers are finite, and that
    `mask` is 0 or 1.
    """

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid values of the fields of `source`, which `Task.check` has accepted."""


def field_ranges(task: Task, source: Source) -> Ranges:
    """Returns the valid values of a batch's fields; {} if the task does not declare them."""
    return task.field_ranges(source) if isinstance(task, HasRanges) else {}


TASKS = Registry(
    "task",
    {
        "classification": Classification,
        "language_model": LanguageModel,
        "masked_lm": MaskedLm,
        "question_answering": QuestionAnswering,
        "translation": Translation,
    },
    hidden=("model",),
)


def declared_metrics(name: str) -> tuple[str, ...] | None:
    """Returns the metrics that a shipped task can report; None for a custom task.

    Some metrics, such as 'top5_accuracy', are only reported for some data sets. If the run averages
    its weights, each metric is also reported with the prefix 'ema_'.
    """
    task = TASKS.get(name)
    return (task and getattr(task, "score_names", None)) or getattr(task, "metric_names", None)


_ATTRIBUTES = ("model", "check", "init", "weights", "loss", "evaluate")


def build(name: str, model: Model, **fields: Any) -> Task:
    """Builds a task from the fields of config.task.

    `name` is a key of `TASKS`, or 'package.module:Name' for a custom task.

    Raises:
      UserError: the name or a field is unknown, a value is invalid, or a method is missing.
    """
    task: Task = TASKS.make(name, fields, model=model)
    # `isinstance` with the protocol would not name the missing attribute.
    missing = [attribute for attribute in _ATTRIBUTES if not hasattr(task, attribute)]
    if missing:
        problem = f"makes {task!r} without {', '.join(missing)}"
        remedy = f"give the task the attribute model and the methods {', '.join(_ATTRIBUTES[1:])}"
        raise UserError("config.task.name", name, problem, remedy)
    return task

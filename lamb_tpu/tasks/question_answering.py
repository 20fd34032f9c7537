"""Question answering as in SQuAD: predicts the start and the end of the answer in a text."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.data import Ranges, title
from lamb_tpu.data.text.squad_source import SquadSource
from lamb_tpu.errors import UserError, out_of_range
from lamb_tpu.models import Model
from lamb_tpu.tasks import squad_metric
from lamb_tpu.tasks.squad_answers import best_answers, choose
from lamb_tpu.tasks.text import check_fields, check_text, positions, text_ranges
from lamb_tpu.types import Batch, Params, PyTree

_FIELDS = ("input_ids", "token_type_ids", "attention_mask", "start_position", "end_position")


@dataclasses.dataclass(frozen=True)
class QuestionAnswering:
    """Question answering; batches hold the fields of `data.text.squad_source.SquadSource`.

    The loss is the mean over features of (start cross entropy + end cross entropy) / 2, each over all
    positions. As in `run_squad.py`, the positions include the padding, so the network learns low
    logits for padding. Answers are only taken from the context. The network is a BERT with the head
    'span'.

    Attributes:
      num_best: number of likeliest starts and ends that are paired in each window, and maximum
        number of answers that are stored for each question.
      max_answer_length: the longest answer, in tokens.
      version2: whether the data has unanswerable questions, as in SQuAD v2; the right answer to such
        a question is "".
      null_threshold: with `version2`, the answer is "" if its score exceeds the best text's score by
        more than this threshold.
    """

    model: Model
    num_best: int = 20
    max_answer_length: int = 30
    version2: bool = False
    null_threshold: float = 0.0

    # Not annotated, so that it is not a field of the dataclass.
    score_names = ("exact_match", "f1")

    def __post_init__(self) -> None:
        check_fields(self, 1, "num_best", "max_answer_length")
        if not math.isfinite(self.null_threshold):
            raise out_of_range("config.task.null_threshold", self.null_threshold, "a finite number")

    def check(self, source: SquadSource) -> None:
        outputs = check_text("question_answering", self.model, source, _FIELDS)
        if "start_logits" not in outputs:
            problem = "has no 'span', which question_answering trains"
            raise UserError("config.model.heads", ..., problem, "set config.model.heads=('span',)")
        if not self.version2 and any(question.impossible for question in source.questions):
            problem = "has questions without an answer, as in SQuAD v2"
            raise UserError(title(source), ..., problem, "set config.task.version2=True")

    def field_ranges(self, source: SquadSource) -> Ranges:
        return {
            **text_ranges(self.model, source),
            "start_position": positions(source),
            "end_position": positions(source),
        }

    def init(self, key: jax.Array, batch: Batch) -> Mapping[str, Any]:
        return self.model.init(key, batch)

    def weights(self, batch: Batch) -> dict[str, np.float32]:
        """Returns the number of features."""
        # Computed from a shape, so it needs no communication.
        return {"span": np.float32(len(batch["input_ids"]))}

    def loss(
        self, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        `span_accuracy` is the fraction of features for which both start and end are right.
        """
        outputs, model_state = self.model.apply(
            {"params": params, **model_state}, batch, train=True, key=key
        )
        losses: float | jax.Array = 0.0
        right: bool | jax.Array = True
        for edge in ("start", "end"):
            logits, position = outputs[f"{edge}_logits"], batch[f"{edge}_position"]
            losses += optax.softmax_cross_entropy_with_integer_labels(logits, position) / 2
            right &= jnp.argmax(logits, -1) == position
        accuracy = jnp.sum(right, dtype=jnp.float32), jnp.float32(len(batch["start_position"]))
        return {"span": jnp.sum(losses)}, (model_state, {"span_accuracy": accuracy})

    def evaluate(self, params: Params, model_state: PyTree, batch: Batch) -> dict:
        """Returns no metrics: evaluation features have no answer positions, see `score`."""
        return {}

    def predict(self, params: Params, model_state: PyTree, batch: Batch) -> dict[str, jax.Array]:
        """Returns `start_logits` and `end_logits`, float32 (rows, length)."""
        outputs, _ = self.model.apply({"params": params, **model_state}, batch, train=False)
        return {name: outputs[name] for name in ("start_logits", "end_logits")}

    def score(
        self, source: SquadSource, outputs: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Returns exact match and F1 in percent over all questions, and files with the answers.

        `predictions.json`, question ID -> text, is the input of the official script;
        `nbest_predictions.json` has the best answers to each question with their scores.
        """
        answers = best_answers(
            source.questions,
            source.features,
            outputs["start_logits"],
            outputs["end_logits"],
            num_best=self.num_best,
            max_answer_length=self.max_answer_length,
            with_null=self.version2,
        )
        # In v1.1 every question has an answer, so "" does not compete.
        predictions = choose(answers, self.null_threshold if self.version2 else None)
        scores = squad_metric.evaluate(source.questions, predictions, self.version2)
        best = {id_: [each._asdict() for each in ranked] for id_, ranked in answers.items()}
        # The official script only reads texts, so the scores go into a second file.
        files = {"predictions.json": predictions, "nbest_predictions.json": best}
        return (
            {name: scores[name] for name in self.score_names},
            {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()},
        )

"""Question answering as in SQuAD: the start and the end of the answer in a text."""

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
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks import squad_metric
from lamb_tpu.tasks.squad_answers import best_answers, choose
from lamb_tpu.tasks.text import check_text, positions, text_ranges

_FIELDS = ("input_ids", "token_type_ids", "attention_mask", "start_position", "end_position")


@dataclasses.dataclass(frozen=True)
class QuestionAnswering:
    """Question answering; batches hold the fields of `data.text.squad_source.SquadSource`.

    The loss is the mean over features of half the cross entropy of the start and half that of the
    end, each over all positions. As in `run_squad.py` these include the padding, whose logits the
    network learns to keep low. Answers are taken from the context only.

    Attributes:
      model: a BERT with the head 'span'.
      num_best: number of starts and ends to pair in each window, and of answers to keep for each
        question.
      max_answer_length: the longest answer, in tokens.
      version2: whether the data has questions without an answer, as SQuAD v2; their answer is "".
      null_threshold: for version2: answer "" if its score exceeds that of the best text by more
        than this.
    """

    model: Model
    num_best: int = 20
    max_answer_length: int = 30
    version2: bool = False
    null_threshold: float = 0.0

    # Without an annotation, so that it is no field of the dataclass.
    score_names = ("exact_match", "f1")

    def __post_init__(self) -> None:
        for name in ("num_best", "max_answer_length"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError(
                    f"config.task.{name} is {value!r}; it must be a whole number of at least 1"
                )
        if type(self.version2) is not bool:
            raise UserError(f"config.task.version2 is {self.version2!r}; it must be True or False")
        threshold = self.null_threshold
        if type(threshold) not in (int, float) or not math.isfinite(threshold):
            raise UserError(f"config.task.null_threshold is {threshold!r}; it must be a number")

    def check(self, source: SquadSource) -> None:
        """Raises ValueError if the data does not fit the model or the task."""
        outputs = check_text("question_answering", self.model, source, _FIELDS)
        if "start_logits" not in outputs:
            raise ValueError(
                "config.model.heads has no 'span', which question_answering trains; set "
                "config.model.heads=('span',)"
            )
        if not self.version2 and any(question.impossible for question in source.questions):
            raise ValueError(
                f"{title(source)} has questions without an answer, as SQuAD v2; set "
                "config.task.version2=True"
            )

    def field_ranges(self, source: SquadSource) -> Ranges:
        """Returns the valid values of all fields, see `tasks.HasRanges`."""
        return {
            **text_ranges(self.model, source),
            "start_position": positions(source),
            "end_position": positions(source),
        }

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""
        return self.model.init(key, batch)

    def weights(self, batch: Mapping[str, jax.Array]) -> dict[str, np.float32]:
        """Returns the number of features."""
        # From a shape alone, so it needs no communication.
        return {"span": np.float32(len(batch["input_ids"]))}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        `span_accuracy` is the share of features with the right start and end.
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

    def evaluate(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> dict:
        """Returns no metrics: features for evaluation have no answer positions, see `score`."""
        return {}

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns `start_logits` and `end_logits`, float32 (rows, length)."""
        outputs, _ = self.model.apply({"params": params, **model_state}, batch, train=False)
        return {name: outputs[name] for name in ("start_logits", "end_logits")}

    def score(
        self, source: SquadSource, outputs: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Returns exact match and F1 in percent, over questions; and files with the answers.

        `predictions.json` is the official script's input, id -> text. `nbest_predictions.json` has
        for each id the best answers with their scores, the sums of a start and an end logit.
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
        best = {id_: [answer._asdict() for answer in found] for id_, found in answers.items()}
        # Only texts that the official script reads go into the first file.
        files = {"predictions.json": predictions, "nbest_predictions.json": best}
        return (
            {name: scores[name] for name in self.score_names},
            {name: json.dumps(content, indent=1) + "\n" for name, content in files.items()},
        )

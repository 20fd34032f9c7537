"""Translation, trained with the cross entropy of target tokens, evaluated by the BLEU of a beam search."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lamb_tpu.data import Range, Ranges, title
from lamb_tpu.data.text.pair_source import PairSource
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.models.beam_search import Search, best, search
from lamb_tpu.tasks.smoothing import smoothed_cross_entropy
from lamb_tpu.tasks.text import check_fields, lacks, other_size, words
from lamb_tpu.types import Batch, Params, PyTree

_FIELDS = ("source_ids", "source_length", "target_ids", "target_length")
# Ids of [CLS] and [SEP] in every trained vocabulary, see `vocabulary.SPECIAL_TOKENS`.
_BEGIN, _END = 2, 3


@dataclasses.dataclass(frozen=True)
class Translation:
    """Translation; batches hold the fields of `lamb_tpu.data.text.pair_source.PairSource`.

    The loss is the mean smoothed cross entropy over all target tokens of a batch, in nats.
    The network must have `Model.decode`, like GNMT.

    Attributes:
      label_smoothing: fraction of the target that is spread evenly over all words, in [0, 1).
      beam: see `beam_search.Search`.
      length_penalty, coverage_penalty: weights of the two penalties, see `beam_search.search`.
      max_length: maximum number of tokens of a translation in an evaluation.

    References:
      BLEU: Papineni et al., 2002; sacrebleu: Post, arXiv:1804.08771.
    """

    model: Model
    label_smoothing: float = 0.1
    beam: int = 5
    length_penalty: float = 0.6
    coverage_penalty: float = 0.1
    max_length: int = 80

    # Not annotated, so that it is not a field of the dataclass.
    score_names = ("loss", "perplexity", "accuracy", "bleu")

    def __post_init__(self) -> None:
        check_fields(self, 1, "beam")
        check_fields(self, 2, "max_length")
        check_fields(self, 0, "label_smoothing", below=1)
        check_fields(self, 0, "length_penalty", "coverage_penalty")

    def check(self, source: PairSource) -> None:
        if set(_FIELDS) - set(source.element_spec):
            raise lacks("translation", _FIELDS, source)
        if self.model.decode is None:
            remedy = "use gnmt or another network that can decode for translation"
            raise UserError("config.model.name", ..., "names a network that cannot decode", remedy)
        vocabulary, size = source.vocabulary, self.model.vocab_size
        if vocabulary is None:  # a plan has no vocabulary
            return
        if (vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id) != (_BEGIN, _END, 0):
            problem = "does not begin with [PAD], [UNK], [CLS], [SEP]"
            raise UserError(
                f"the vocabulary of {title(source)}", ..., problem, "use a vocabulary that does"
            )
        if size != len(vocabulary):
            raise other_size(size, len(vocabulary), source)

    def field_ranges(self, source: PairSource) -> Ranges:
        # The network also reads the padding, so the ids of the padding must be valid too.
        ranges: dict[str, Range] = {}
        for side in ("source", "target"):
            width = source.element_spec[f"{side}_ids"].shape[0]
            ranges[f"{side}_ids"] = words(self.model, source)
            ranges[f"{side}_length"] = Range(1, width, "the tokens of the sentence")
        return ranges

    def init(self, key: jax.Array, batch: Batch) -> Mapping[str, Any]:
        return self.model.init(key, batch)

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the number of target tokens to predict, including the end tokens."""
        return {"cross_entropy": jnp.sum(batch["target_length"] - 1, dtype=jnp.float32)}

    def loss(
        self, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        `accuracy` is the fraction of tokens predicted correctly, given the correct tokens before them.
        """
        outputs, model_state = self.model.apply(
            {"params": params, **model_state}, batch, train=True, key=key
        )
        logits, labels, counts = outputs["logits"], batch["target_ids"][:, 1:], _counts(batch)
        total, weight = smoothed_cross_entropy(logits, labels, counts, self.label_smoothing)
        right = jnp.sum(counts * jnp.float32(jnp.argmax(logits, -1) == labels))
        return {"cross_entropy": total}, (model_state, {"accuracy": (right, weight)})

    def evaluate(self, params: Params, model_state: PyTree, batch: Batch) -> dict:
        """Returns no metrics: BLEU and perplexity need the full set, see `score`."""
        return {}

    def predict(self, params: Params, model_state: PyTree, batch: Batch) -> dict[str, jax.Array]:
        """Returns each row's sums `loss` (unsmoothed), `correct` and `tokens`, and its `translation`."""
        variables = {"params": params, **model_state}
        outputs, _ = self.model.apply(variables, batch, train=False)
        logits, labels, counts = outputs["logits"], batch["target_ids"][:, 1:], _counts(batch)
        losses, tokens = jax.vmap(smoothed_cross_entropy, (0, 0, 0, None))(
            logits, labels, counts, 0.0
        )
        decode = self.model.decode
        assert decode is not None  # `check` rejects other networks
        memory, state = decode.start(variables, batch)
        hypotheses = search(
            lambda *given: decode.step(variables, *given),
            memory,
            state,
            Search(
                max_length=self.max_length,
                begin=_BEGIN,
                end=_END,
                beam=self.beam,
                length_penalty=self.length_penalty,
                coverage_penalty=self.coverage_penalty,
            ),
        )
        return {
            "loss": losses,
            "tokens": tokens,
            "correct": jnp.sum(counts * jnp.float32(jnp.argmax(logits, -1) == labels), -1),
            "translation": best(hypotheses, _END),
        }

    def score(
        self, source: PairSource, outputs: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Returns the metrics of the full set, and files with the translations.

        `loss` is in nats per token; `bleu` is sacrebleu's corpus score, from 0 to 100. `bleu.json`
        has sacrebleu's signature, which is needed to compare scores.
        """
        import sacrebleu  # only evaluations need it

        sums = {
            name: np.sum(outputs[name], dtype=np.float64) for name in ("loss", "correct", "tokens")
        }
        loss = float(sums["loss"] / sums["tokens"])
        texts = [source.text(ids) for ids in outputs["translation"]]
        metric = sacrebleu.BLEU()
        bleu = metric.corpus_score(texts, [source.references])
        report = {
            "bleu": bleu.score,
            "signature": str(metric.get_signature()),
            "precisions": bleu.precisions,
            "brevity_penalty": bleu.bp,
            "length": bleu.sys_len,
            "reference_length": bleu.ref_len,
            "beam": self.beam,
            "length_penalty": self.length_penalty,
            "coverage_penalty": self.coverage_penalty,
        }
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # avoids overflow
            "accuracy": float(sums["correct"] / sums["tokens"]),
            "bleu": bleu.score,
        }
        files = {
            "translations.txt": "".join(f"{text}\n" for text in texts),
            "bleu.json": json.dumps(report, indent=1) + "\n",
        }
        return metrics, files


def _counts(batch: Batch) -> jax.Array:
    """Returns float32 (rows, target steps), 1 at the tokens to predict and 0 at padding."""
    positions = jnp.arange(batch["target_ids"].shape[1] - 1)
    return jnp.float32(positions < batch["target_length"][:, None] - 1)

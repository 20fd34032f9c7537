"""Translation: cross entropy of the target's tokens in training, BLEU of a beam search after it."""

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
from lamb_tpu.tasks.text import words

_FIELDS = ("source_ids", "source_length", "target_ids", "target_length")
# Ids of [CLS] and [SEP] in every trained vocabulary, see `vocabulary.SPECIAL_TOKENS`.
_BEGIN, _END = 2, 3


@dataclasses.dataclass(frozen=True)
class Translation:
    """Translation; batches hold the fields of `lamb_tpu.data.text.pair_source.PairSource`.

    The loss is the mean smoothed cross entropy over all target tokens of a batch, in nats.

    Attributes:
      model: a network with `decode`, such as GNMT.
      label_smoothing: share of the target spread evenly over all words, in [0, 1).
      beam: see `beam_search.Search`.
      length_penalty, coverage_penalty: weights of both penalties, see `beam_search.search`.
      max_length: most tokens of a translation, in an evaluation.

    References:
      BLEU: Papineni et al., 2002; sacrebleu: Post, arXiv:1804.08771.
    """

    model: Model
    label_smoothing: float = 0.1
    beam: int = 5
    length_penalty: float = 0.6
    coverage_penalty: float = 0.1
    max_length: int = 80

    # Without an annotation, so that it is no field of the dataclass.
    score_names = ("loss", "perplexity", "accuracy", "bleu")

    def __post_init__(self) -> None:
        for name, least in (("beam", 1), ("max_length", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UserError(
                    f"config.task.{name} is {value!r}; it must be a whole number of at least "
                    f"{least}"
                )
        for name, bound in (
            ("label_smoothing", 1),
            ("length_penalty", math.inf),
            ("coverage_penalty", math.inf),
        ):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < bound:
                known = "in [0, 1)" if bound == 1 else "at least 0"
                raise UserError(f"config.task.{name} is {value!r}; it must be a number {known}")

    def check(self, source: PairSource) -> None:
        """Raises ValueError if the data does not fit the model or the task."""
        if set(_FIELDS) - set(source.element_spec):
            raise ValueError(
                f"translation needs the fields {', '.join(_FIELDS)}; {title(source)} has "
                f"{', '.join(source.element_spec)}"
            )
        if self.model.decode is None:
            raise ValueError("translation needs a network that writes, such as gnmt")
        vocabulary, size = source.vocabulary, self.model.vocab_size
        if vocabulary is None:  # of a plan
            return
        if (vocabulary.cls_id, vocabulary.sep_id, vocabulary.pad_id) != (_BEGIN, _END, 0):
            raise ValueError(
                f"the vocabulary of {title(source)} does not begin with [PAD], [UNK], [CLS], [SEP]"
            )
        if size != len(vocabulary):
            raise ValueError(
                f"config.model.vocab_size is {size}, the vocabulary of {title(source)} has "
                f"{len(vocabulary)} words; set config.model.vocab_size={len(vocabulary)}"
            )

    def field_ranges(self, source: PairSource) -> Ranges:
        """Returns the valid values of all fields, see `tasks.HasRanges`.

        Padding is read by the network too, so it has to be in the vocabulary.
        """
        ranges: dict[str, Range] = {}
        for side in ("source", "target"):
            width = source.element_spec[f"{side}_ids"].shape[0]
            ranges[f"{side}_ids"] = words(self.model, source)
            ranges[f"{side}_length"] = Range(1, width, "the tokens of the sentence")
        return ranges

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""
        return self.model.init(key, batch)

    def weights(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the number of target tokens to predict, the end signs among them."""
        return {"cross_entropy": jnp.sum(batch["target_length"] - 1, dtype=jnp.float32)}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        `accuracy` is the share of tokens that are the likeliest after the right ones before them.
        """
        outputs, model_state = self.model.apply(
            {"params": params, **model_state}, batch, train=True, key=key
        )
        logits, labels, counts = outputs["logits"], batch["target_ids"][:, 1:], _counts(batch)
        total, weight = smoothed_cross_entropy(logits, labels, counts, self.label_smoothing)
        right = jnp.sum(counts * jnp.float32(jnp.argmax(logits, -1) == labels))
        return {"cross_entropy": total}, (model_state, {"accuracy": (right, weight)})

    def evaluate(self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]) -> dict:
        """Returns no metrics: a perplexity is no mean of examples, see `score`."""
        return {}

    def predict(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Returns for each row the sums over its tokens, and its translation.

        `loss` (rows,), not smoothed, `correct` (rows,) and `tokens` (rows,), their number;
        `translation` int32 (rows, max_length).
        """
        variables = {"params": params, **model_state}
        outputs, _ = self.model.apply(variables, batch, train=False)
        logits, labels, counts = outputs["logits"], batch["target_ids"][:, 1:], _counts(batch)
        losses, tokens = jax.vmap(smoothed_cross_entropy, (0, 0, 0, None))(
            logits, labels, counts, 0.0
        )
        decode = self.model.decode
        assert decode is not None  # `check` refuses others
        memory, state = decode.start(variables, batch)
        found = search(
            lambda *given: decode.step(variables, *given),
            memory,
            state,
            Search(
                self.max_length,
                _BEGIN,
                _END,
                self.beam,
                self.length_penalty,
                coverage_penalty=self.coverage_penalty,
            ),
        )
        return {
            "loss": losses,
            "tokens": tokens,
            "correct": jnp.sum(counts * jnp.float32(jnp.argmax(logits, -1) == labels), -1),
            "translation": best(found, _END),
        }

    def score(
        self, source: PairSource, outputs: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Returns the metrics of the whole set, and files with the translations.

        `loss` in nats for each token, `perplexity` its exponential, `accuracy`, and `bleu`, that of
        the corpus by sacrebleu, from 0 to 100. `translations.txt` has a line for each example;
        `bleu.json` sacrebleu's signature, with which a score can be compared.
        """
        # Imported here, because only an evaluation needs it.
        import sacrebleu

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
        return (
            {
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),  # no overflow
                "accuracy": float(sums["correct"] / sums["tokens"]),
                "bleu": bleu.score,
            },
            {
                "translations.txt": "".join(f"{text}\n" for text in texts),
                "bleu.json": json.dumps(report, indent=1) + "\n",
            },
        )


def _counts(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns 1.0 at the tokens to predict, float32 (rows, target steps)."""
    places = jnp.arange(batch["target_ids"].shape[1] - 1)
    return jnp.float32(places < batch["target_length"][:, None] - 1)

"""BERT's pre-training: masked words and next-sentence prediction."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.data import LARGEST, Range, Ranges, Source, title
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks.text import check_text, positions, text_ranges, words
from lamb_tpu.types import Batch, Params, PyTree

_FIELDS = (
    "input_ids",
    "token_type_ids",
    "attention_mask",
    "masked_positions",
    "masked_ids",
    "masked_weights",
)
_PAIRS = "next_sentence_label"
Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class MaskedLm:
    """Pre-training; batches hold the fields of `lamb_tpu.data.text.masked_lm.MaskedLmSource`.

    The loss is the mean cross entropy over all masked words of a batch, in nats. If the batch has
    pairs of segments (`next_sentence_label`), the mean cross entropy of the next-sentence prediction
    over all pairs is added. The network is a BERT with the head 'mlm' and, for pairs, 'nsp'.
    """

    model: Model

    # Not annotated, so that it is not a field of the dataclass.
    metric_names = ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")

    def check(self, source: Source) -> None:
        outputs = check_text("masked_lm", self.model, source, _FIELDS)
        has_pairs, has_head = _PAIRS in source.element_spec, "nsp_logits" in outputs
        remedy = f"set config.model.heads={('mlm', 'nsp') if has_pairs else ('mlm',)}"
        if "mlm_logits" not in outputs:
            problem = "has no 'mlm', which masked_lm trains"
            raise UserError("config.model.heads", ..., problem, remedy)
        if has_pairs != has_head:
            head, pairs = (
                ("'nsp'", "no sentence pairs") if has_head else ("no 'nsp'", "sentence pairs")
            )
            problem = f"has {head}, but {title(source)} has {pairs}"
            remedy += f", or config.data.options.next_sentence={has_head}"
            raise UserError("config.model.heads", ..., problem, remedy)

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid values; where `masked_weights` is 0, `masked_ids` may have any value."""
        return {
            **text_ranges(self.model, source),
            # Checked even where the weight is 0: NaN from an invalid position would reach the gradient.
            "masked_positions": positions(source),
            "masked_ids": words(self.model, source)._replace(
                counted=lambda batch: batch["masked_weights"] > 0
            ),
            "masked_weights": Range(0, LARGEST, "the weights of words"),
            _PAIRS: Range(0, 1, "whether the second segment follows the first"),
        }

    def init(self, key: jax.Array, batch: Batch) -> Mapping[str, Any]:
        return self.model.init(key, batch)

    def weights(self, batch: Batch) -> dict[str, jax.Array | np.float32]:
        """Returns the number of masked words and the number of pairs."""
        words = jnp.sum(batch["masked_weights"], dtype=jnp.float32)
        pairs = {"nsp": np.float32(len(batch[_PAIRS]))} if _PAIRS in batch else {}
        return {"mlm": words, **pairs}

    def loss(
        self, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, dict[str, Pair]]]:
        """Returns (sums of the terms 'mlm' and 'nsp', (new model state, metric sums of `evaluate`))."""
        outputs, model_state = self.model.apply(
            {"params": params, **model_state}, batch, train=True, key=key
        )
        # A training batch has no padded rows.
        metrics = _metrics(outputs, batch, jnp.ones(len(batch["input_ids"]), bool))
        # Each term is divided by the weight with the same name in `weights`.
        terms = {term: metrics[f"{term}_loss"][0] for term in self.weights(batch)}
        return terms, (model_state, metrics)

    def evaluate(self, params: Params, model_state: PyTree, batch: Batch) -> dict[str, Pair]:
        """Returns sums of `mlm_loss` and `mlm_accuracy`; for pairs also `nsp_loss` and `nsp_accuracy`."""
        outputs, _ = self.model.apply({"params": params, **model_state}, batch, train=False)
        return _metrics(outputs, batch, batch["mask"] > 0)


def _metrics(outputs: Mapping[str, jax.Array], batch: Batch, mask: jax.Array) -> dict[str, Pair]:
    """Returns metric sums over the examples where `mask` (rows,) is true."""
    # (rows, max_predictions): 0 for unused entries and in padded rows.
    weights = jnp.where(mask[:, None], batch["masked_weights"], 0.0)
    sums = _scores("mlm", outputs["mlm_logits"], batch["masked_ids"], weights)
    if _PAIRS in batch:
        weights = mask.astype(jnp.float32)
        sums |= _scores("nsp", outputs["nsp_logits"], batch[_PAIRS], weights)
    return sums


def _scores(name: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> dict[str, Pair]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    total = jnp.sum(weights)

    def summed(values: jax.Array) -> Pair:
        # Use `where`, not multiplication: a padded example may give NaN.
        return jnp.sum(jnp.where(weights > 0, weights * values, 0.0)), total

    return {f"{name}_loss": summed(losses), f"{name}_accuracy": summed(right)}

"""Pre-training of BERT: masked words and next-sentence prediction."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.data import LARGEST, Range, Ranges, Source, title
from lamb_tpu.models import Model
from lamb_tpu.tasks.text import check_text, positions, text_ranges, words

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
    pairs of segments (`next_sentence_label`), the mean over all pairs is added.

    Attributes:
      model: a BERT with the head 'mlm', and for pairs 'nsp'.

    References:
      Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language
      Understanding, 2018.
    """

    model: Model

    def check(self, source: Source) -> None:
        """Raises ValueError if the data does not fit the model or its heads."""
        outputs = check_text("masked_lm", self.model, source, _FIELDS)
        has_pairs, has_head = _PAIRS in source.element_spec, "nsp_logits" in outputs
        if "mlm_logits" not in outputs:
            heads = ("mlm", "nsp") if has_pairs else ("mlm",)
            raise ValueError(
                "config.model.heads has no 'mlm', which masked_lm trains; set "
                f"config.model.heads={heads}"
            )
        if has_pairs and not has_head:
            raise ValueError(
                f"config.model.heads has no 'nsp', and {title(source)} has pairs for it; set "
                "config.model.heads=('mlm', 'nsp'), or config.data.options.next_sentence=False"
            )
        if has_head and not has_pairs:
            raise ValueError(
                f"config.model.heads has 'nsp', and {title(source)} no pairs for it; set "
                "config.model.heads=('mlm',), or config.data.options.next_sentence=True"
            )

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid values of all fields, see `tasks.HasRanges`.

        Where `masked_weights` is 0, `masked_ids` may be anything, such as -100 for "ignore".
        """
        return {
            **text_ranges(self.model, source),
            # Also where the weight is 0: NaN from a position outside would spoil the gradient.
            "masked_positions": positions(source),
            "masked_ids": words(self.model, source)._replace(
                counted=lambda batch: batch["masked_weights"] > 0
            ),
            "masked_weights": Range(0, LARGEST, "the weights of words"),
            _PAIRS: Range(0, 1, "whether the second segment follows the first"),
        }

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""
        return self.model.init(key, batch)

    def weights(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array | np.float32]:
        """Returns the number of masked words and the number of pairs."""
        words = jnp.sum(batch["masked_weights"], dtype=jnp.float32)
        found: dict[str, jax.Array | np.float32] = {"mlm": words}
        if _PAIRS in batch:
            found["nsp"] = np.float32(len(batch[_PAIRS]))
        return found

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, dict[str, Pair]]]:
        """Returns (sums of the terms 'mlm' and 'nsp', (new model state, sums as `evaluate`))."""
        outputs, model_state = self.model.apply(
            {"params": params, **model_state}, batch, train=True, key=key
        )
        # A training batch has no padded rows.
        metrics = _metrics(outputs, batch, jnp.ones(len(batch["input_ids"]), bool))
        # Terms have the names of `weights`, because each is divided by the weight of its name.
        terms = {term: metrics[f"{term}_loss"][0] for term in self.weights(batch)}
        return terms, (model_state, metrics)

    def evaluate(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, Pair]:
        """Returns sums of `mlm_loss` and `mlm_accuracy`; with pairs also of the two of 'nsp'."""
        outputs, _ = self.model.apply({"params": params, **model_state}, batch, train=False)
        return _metrics(outputs, batch, batch["mask"] > 0)


def _metrics(
    outputs: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], mask: jax.Array
) -> dict[str, Pair]:
    """Returns metric sums over the examples where `mask` (rows,) is true."""
    # (rows, max_predictions): 0 for unused places and in rows that do not count.
    weights = jnp.where(mask[:, None], batch["masked_weights"], 0.0)
    found = _scores("mlm", outputs["mlm_logits"], batch["masked_ids"], weights)
    if _PAIRS in batch:
        weights = mask.astype(jnp.float32)
        found |= _scores("nsp", outputs["nsp_logits"], batch[_PAIRS], weights)
    return found


def _scores(name: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> dict[str, Pair]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    total = jnp.sum(weights)

    def summed(values: jax.Array) -> Pair:
        # A padded example may give any loss, also a NaN: select, do not multiply.
        return jnp.sum(jnp.where(weights > 0, weights * values, 0.0)), total

    return {f"{name}_loss": summed(losses), f"{name}_accuracy": summed(right)}

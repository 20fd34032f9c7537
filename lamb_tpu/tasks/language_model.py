"""Language modelling with recurrent networks, which pass their state from window to window."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lamb_tpu.data import Batch, Range, Ranges, Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks.text import lacks, other_size
from lamb_tpu.types import Params, PyTree

CARRY = "carry"  # field of a batch, and key of the new state in the model state
_FIELDS = ("inputs", "targets", "start")
Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Prediction of the next word; batches hold the fields of `data.text.streams`.

    A training batch is one window of each stream. The network's state comes from the previous
    window, as the field `carry`. The state is zero in a stream's first window and gets no gradient:
    this is truncated backpropagation through time. An evaluation example is a full stream, whose windows
    are read one after the other.

    Attributes:
      sum_over_time: False for the mean cross entropy over all words of a batch, in nats, as in
        PyTorch's example word_language_model. True for the sum over the steps of a window and the
        mean over the rows, as in Zaremba's code and TensorFlow's tutorial. With T steps, the loss
        and gradient are then T times as large: a learning rate of 1 for the sum equals a rate of T
        for the mean, and clipping the gradient's norm at 5 for the sum equals clipping at 5 / T for the mean.
    """

    model: Model
    sum_over_time: bool = False

    # Not annotated, so that it is not a field of the dataclass.
    metric_names = ("loss", "accuracy", "perplexity")

    def check(self, source: Source) -> None:
        if set(_FIELDS) - set(source.element_spec):
            raise lacks("language_model", _FIELDS, source)
        if self.model.carry_shape is None:
            problem = "names a network without a recurrent state"
            remedy = "use a recurrent network for language_model, such as 'lstm_lm'"
            raise UserError("config.model.name", ..., problem, remedy)
        words = jax.ShapeDtypeStruct((1, *source.element_spec["inputs"].shape), jnp.int32)
        outputs = self.model.output_shapes({"inputs": words})
        model_classes, data_classes = outputs["logits"].shape[-1], source.num_classes
        if data_classes is not None and model_classes != data_classes:
            raise other_size(model_classes, data_classes, source)

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid values; `targets` may have any value after the first `length` words."""
        shape = source.element_spec["targets"].shape
        size = self.model.vocab_size if source.num_classes is None else source.num_classes
        known = Range(0, math.inf if size is None else size - 1, "the words of the vocabulary")
        positions = np.arange(math.prod(shape)).reshape(shape)

        def counted(batch: Batch) -> np.ndarray:
            if "length" not in batch:
                return np.ones((), bool)
            return positions < batch["length"].reshape(-1, *(1 for _ in shape))

        return {
            # An input out of range would make the recurrent state NaN.
            "inputs": known,
            "targets": known._replace(counted=counted),
            "length": Range(0, math.prod(shape), "the words of the example"),
        }

    def init(self, key: jax.Array, batch: Batch) -> Mapping[str, Any]:
        return self.model.init(key, {"inputs": batch["inputs"]})

    def weights(self, batch: Batch) -> dict[str, jax.Array | np.float32]:
        """Returns the number of words; with `sum_over_time`, the number of rows."""
        rows, steps = batch["targets"].shape
        if self.sum_over_time:
            return {"cross_entropy": np.float32(rows)}
        if "length" in batch:
            return {"cross_entropy": jnp.sum(batch["length"], dtype=jnp.float32)}
        # Computed from a shape, so it needs no communication.
        return {"cross_entropy": np.float32(rows * steps)}

    def loss(
        self, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, dict[str, Pair]]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        If the batch has the field `carry`, the new model state has the new carry of each row.
        """
        rows, steps = batch["targets"].shape
        carry = self._zero(rows)
        if CARRY in batch:
            starts = batch["start"].reshape(rows, *(1 for _ in carry.shape[1:]))
            carry = jnp.where(starts, 0, batch[CARRY])
        outputs, model_state = self.model.apply(
            {"params": params, **model_state},
            {"inputs": batch["inputs"], CARRY: carry},
            train=True,
            key=key,
        )
        lengths = batch.get("length", jnp.full(rows, steps))
        sums = _sums(outputs["logits"], batch["targets"], jnp.arange(steps) < lengths[:, None])
        if CARRY in batch:
            model_state = {**model_state, CARRY: outputs[CARRY]}
        total, words = sums["loss"]
        return {"cross_entropy": total}, (model_state, {"perplexity": (total, words)})

    def evaluate(self, params: Params, model_state: PyTree, batch: Batch) -> dict[str, Pair]:
        """Returns sums of `loss` (nats per word), `perplexity` and `accuracy` over full streams.

        `perplexity` has the sums of `loss`; the exponential of their ratio is recorded. Dropout is off.
        """
        rows, windows, steps = batch["targets"].shape
        lengths = jnp.where(batch["mask"] > 0, batch["length"], 0)
        valid = jnp.arange(windows * steps).reshape(windows, 1, steps) < lengths[:, None]

        def window(
            carry: jax.Array, each: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, dict[str, Pair]]:
            inputs, targets, valid = each
            outputs, _ = self.model.apply(
                {"params": params, **model_state}, {"inputs": inputs, CARRY: carry}, train=False
            )
            return outputs[CARRY], _sums(outputs["logits"], targets, valid, accuracy=True)

        # A scan iterates over the first axis, so move the windows to this axis.
        inputs, targets = (jnp.moveaxis(batch[name], 1, 0) for name in ("inputs", "targets"))
        _, sums = lax.scan(window, self._zero(rows), (inputs, targets, valid))
        totals = jax.tree.map(jnp.sum, sums)
        return {**totals, "perplexity": totals["loss"]}

    def _zero(self, rows: int) -> jax.Array:
        assert self.model.carry_shape is not None  # `check` has rejected other networks
        return jnp.zeros((rows, *self.model.carry_shape), jnp.float32)


def _sums(
    logits: jax.Array, targets: jax.Array, valid: jax.Array, accuracy: bool = False
) -> dict[str, Pair]:
    """Returns metric sums over the words where `valid` (rows, steps) is true."""
    words = jnp.sum(valid, dtype=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    # Use `where`, not multiplication: padding may give NaN.
    sums = {"loss": (jnp.sum(jnp.where(valid, losses, 0.0)), words)}
    if accuracy:
        right = (jnp.argmax(logits, -1) == targets) & valid
        sums["accuracy"] = jnp.sum(right, dtype=jnp.float32), words
    return sums

"""Language modelling by networks that hand a state on, from one window of a text to the next."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lamb_tpu.data import Batch, Range, Ranges, Source, title
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model

CARRY = "carry"  # a field of a batch, and where the new one stands in the model state
_FIELDS = ("inputs", "targets", "start")
Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Prediction of each next word; batches hold the fields of `data.text.streams`.

    In training a batch is one window of each stream. The network's state comes from the window
    before, as the field `carry`, is zero in a stream's first window, and gets no gradient: this is
    truncated backpropagation through time. In an evaluation an example is a whole stream, whose
    windows are read one after the other.

    Attributes:
      model: the network, such as 'lstm_lm'.
      sum_over_time: False for the mean of the cross entropy over all words of a batch, in nats, as
        in PyTorch's example. True for its sum over the steps of a window and mean over the rows, as
        in Zaremba's code and TensorFlow's tutorial. Loss and gradient are then T times as large in
        a window of T steps: a learning rate of 1 does what T does for the mean, and a clip of the
        gradient's norm at 5 is one at 5 / T.

    References:
      Zaremba, Sutskever and Vinyals, Recurrent Neural Network Regularization, arXiv:1409.2329.
    """

    model: Model
    sum_over_time: bool = False

    def __post_init__(self) -> None:
        if type(self.sum_over_time) is not bool:
            raise UserError(
                f"config.task.sum_over_time is {self.sum_over_time!r}; it must be True or False"
            )

    def check(self, source: Source) -> None:
        """Raises ValueError if the data does not fit the model or the task."""
        if set(_FIELDS) - set(source.element_spec):
            raise ValueError(
                f"language_model needs the fields {', '.join(_FIELDS)}; {title(source)} has "
                f"{', '.join(source.element_spec)}"
            )
        if self.model.carry_shape is None:
            raise ValueError(
                "language_model needs a network that hands on a state, such as 'lstm_lm'; "
                "config.model.name has another"
            )
        # The network is traced, not run.
        words = jax.ShapeDtypeStruct((1, *source.element_spec["inputs"].shape), jnp.int32)
        variables = jax.eval_shape(self.model.init, jax.random.key(0), {"inputs": words})
        outputs, _ = jax.eval_shape(
            lambda v, x: self.model.apply(v, {"inputs": x}, train=False), variables, words
        )
        known, there = outputs["logits"].shape[-1], source.num_classes
        if there is not None and known != there:
            raise ValueError(
                f"config.model.vocab_size is {known}, the vocabulary of {title(source)} has "
                f"{there} words; set config.model.vocab_size={there}"
            )

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid values of all fields, see `tasks.HasRanges`.

        Behind `length` words `targets` may be anything.
        """
        shape = source.element_spec["targets"].shape
        size = self.model.vocab_size if source.num_classes is None else source.num_classes
        known = Range(0, math.inf if size is None else size - 1, "the words of the vocabulary")
        places = np.arange(math.prod(shape)).reshape(shape)

        def counted(batch: Batch) -> np.ndarray:
            if "length" not in batch:
                return np.ones((), bool)
            return places < batch["length"].reshape(-1, *(1 for _ in shape))

        return {
            # An input outside would be NaN, and spoil the state that is handed on.
            "inputs": known,
            "targets": known._replace(counted=counted),
            "length": Range(0, math.prod(shape), "the words of the example"),
        }

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""
        return self.model.init(key, {"inputs": batch["inputs"]})

    def weights(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array | np.float32]:
        """Returns the number of words, or with `sum_over_time` of rows."""
        rows, steps = batch["targets"].shape
        if self.sum_over_time:
            return {"cross_entropy": np.float32(rows)}
        if "length" in batch:
            return {"cross_entropy": jnp.sum(batch["length"], dtype=jnp.float32)}
        # From a shape alone, so it needs no communication.
        return {"cross_entropy": np.float32(rows * steps)}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, dict[str, Pair]]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        If the batch has the field `carry`, the model state has the new one, by rows.
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

    def evaluate(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, Pair]:
        """Returns sums of `loss` (nats a word), `perplexity` and `accuracy` over whole streams.

        The record has the exponential of the mean for `perplexity`. Dropout is off.
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

        # The windows in front, because a scan goes along the first axis.
        inputs, targets = (jnp.moveaxis(batch[name], 1, 0) for name in ("inputs", "targets"))
        _, sums = lax.scan(window, self._zero(rows), (inputs, targets, valid))
        found = jax.tree.map(jnp.sum, sums)
        return {**found, "perplexity": found["loss"]}

    def _zero(self, rows: int) -> jax.Array:
        assert self.model.carry_shape is not None  # `check` has refused other networks
        return jnp.zeros((rows, *self.model.carry_shape), jnp.float32)


def _sums(
    logits: jax.Array, targets: jax.Array, valid: jax.Array, accuracy: bool = False
) -> dict[str, Pair]:
    """Returns metric sums over the words where `valid` (rows, steps) is true."""
    words = jnp.sum(valid, dtype=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    # Padding may give any loss, also a NaN: select, do not multiply.
    found = {"loss": (jnp.sum(jnp.where(valid, losses, 0.0)), words)}
    if accuracy:
        right = (jnp.argmax(logits, -1) == targets) & valid
        found["accuracy"] = jnp.sum(right, dtype=jnp.float32), words
    return found

"""Classification of images (or any arrays) into classes by softmax cross entropy."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.data import Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model


@dataclasses.dataclass(frozen=True)
class Classification:
    """Batches hold `image` (batch, ...) and `label` (batch,) int32.

    Attributes:
      model: the network; its outputs are logits (batch, num_classes).
      label_smoothing: share of the target spread evenly over all classes, in [0, 1).
      input_mean: subtracted from the raw pixel values, in their units.
      input_std: what the difference is divided by; 255 maps uint8 to [0, 1].
    """

    model: Model
    label_smoothing: float = 0.0
    input_mean: float = 0.0
    input_std: float = 255.0

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "input_mean", "input_std"):
            value = getattr(self, name)
            if type(value) not in (int, float):
                raise UserError(f"config.task.{name} is {value!r}; it must be a number")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"config.task.label_smoothing is {self.label_smoothing}; it must be in [0, 1)"
            )
        if self.input_std <= 0:
            raise UserError(f"config.task.input_std is {self.input_std}; it must be positive")

    def _inputs(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        # Images cross to the device in their stored type and are normalised there.
        return (jnp.asarray(batch["image"], jnp.float32) - self.input_mean) / self.input_std

    def check(self, source: Source) -> None:
        """Raises ValueError when a field is missing, or the model cannot tell the classes apart."""
        missing = {"image", "label"} - set(source.element_spec)
        if missing:
            raise ValueError(
                f"classification needs the fields image and label; {source.name} has "
                f"{', '.join(source.element_spec)}"
            )
        spec = source.element_spec["image"]
        image = jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
        variables = jax.eval_shape(self.init, jax.random.key(0), {"image": image})
        logits, _ = jax.eval_shape(
            lambda v, x: self.model.apply(v, self._inputs({"image": x}), train=False),
            variables, image,
        )
        if source.num_classes is not None and logits.shape[-1] != source.num_classes:
            raise ValueError(
                f"the model tells {logits.shape[-1]} classes apart, {source.name} has "
                f"{source.num_classes}; set config.model.num_classes={source.num_classes}"
            )

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""
        return self.model.init(key, self._inputs(batch))

    def weights(self, batch: Mapping[str, jax.Array]) -> dict[str, np.float32]:
        """The number of examples."""
        return {"cross_entropy": np.float32(len(batch["label"]))}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """(sum of the loss, (new model state, metric sums)); logits in training."""
        logits, model_state = self.model.apply(
            {"params": params, **model_state}, self._inputs(batch), train=True, key=key
        )
        labels = batch["label"]
        if self.label_smoothing:
            num_classes = logits.shape[-1]
            targets = optax.smooth_labels(jax.nn.one_hot(labels, num_classes), self.label_smoothing)
            losses = optax.softmax_cross_entropy(logits, targets)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weight = jnp.float32(losses.shape[0])
        correct = jnp.sum(jnp.argmax(logits, -1) == labels, dtype=jnp.float32)
        terms = {"cross_entropy": jnp.sum(losses)}
        return terms, (model_state, {"accuracy": (correct, weight)})

    def evaluate(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Sums of `loss` (cross entropy in nats, unsmoothed) and `accuracy`, where unmasked."""
        logits, _ = self.model.apply(
            {"params": params, **model_state}, self._inputs(batch), train=False
        )
        labels, mask = batch["label"], batch["mask"] > 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weight = jnp.sum(mask, dtype=jnp.float32)
        correct = jnp.sum(jnp.where(mask, jnp.argmax(logits, -1) == labels, 0), dtype=jnp.float32)
        # A padded example may give any loss, also a NaN: select, do not multiply.
        return {
            "loss": (jnp.sum(jnp.where(mask, losses, 0.0)), weight),
            "accuracy": (correct, weight),
        }

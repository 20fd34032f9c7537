"""Classification of images (or any arrays) into classes by softmax cross entropy."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lamb_tpu.data import Range, Ranges, Source
from lamb_tpu.errors import UserError
from lamb_tpu.models import Model
from lamb_tpu.tasks import mixing

# With fewer classes top-5 accuracy says little.
_MIN_CLASSES_OF_TOP5 = 11


@dataclasses.dataclass(frozen=True)
class Classification:
    """Classification; batches hold `image` (batch, ...) and `label` (batch,) int32.

    Attributes:
      model: the network; its outputs are logits (batch, num_classes).
      label_smoothing: share of the target spread evenly over all classes, in [0, 1).
      input_mean: subtracted from the raw pixel values, in their units; a number, or a tuple of one
        for each channel.
      input_std: divisor of the difference, in the same form; 255 maps uint8 to [0, 1].
      mixup_alpha, cutmix_alpha: if one is not 0, examples are mixed in pairs in training, see
        `mixing.mix`.
    """

    model: Model
    label_smoothing: float = 0.0
    input_mean: float | Sequence[float] = 0.0
    input_std: float | Sequence[float] = 255.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "mixup_alpha", "cutmix_alpha"):
            value = getattr(self, name)
            # `isinstance` would accept True as a number.
            if type(value) not in (int, float):
                raise UserError(f"config.task.{name} is {value!r}; it must be a number")
            if name != "label_smoothing" and not 0 <= value < math.inf:
                raise UserError(f"config.task.{name} is {value}; it must be at least 0")
        for name in ("input_mean", "input_std"):
            value = getattr(self, name)
            # An empty tuple becomes its own element, which the next check refuses.
            numbers = value if isinstance(value, (tuple, list)) and value else (value,)
            if any(type(x) not in (int, float) or not math.isfinite(x) for x in numbers):
                raise UserError(
                    f"config.task.{name} is {value!r}; it must be a number, or a tuple of one for "
                    "each channel"
                )
            if name == "input_std" and min(numbers) <= 0:
                raise UserError(f"config.task.input_std is {value}; it must be positive")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"config.task.label_smoothing is {self.label_smoothing}; it must be in [0, 1)"
            )

    @property
    def mixed_by(self) -> tuple[str, ...]:
        """Names of the fields that ask for mixed pairs; () if none does."""
        return tuple(name for name in ("mixup_alpha", "cutmix_alpha") if getattr(self, name))

    def _inputs(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        # Images are sent to the device in their stored type and normalised there.
        images = jnp.asarray(batch["image"], jnp.float32)
        mean, std = (np.asarray(x, np.float32) for x in (self.input_mean, self.input_std))
        return (images - mean) / std

    def check(self, source: Source) -> None:
        """Raises ValueError if a field is missing, or the model has too few classes."""
        missing = {"image", "label"} - set(source.element_spec)
        if missing:
            raise ValueError(
                f"classification needs the fields image and label; {source.name} has "
                f"{', '.join(source.element_spec)}"
            )
        spec = source.element_spec["image"]
        for name in ("input_mean", "input_std"):
            channels = np.size(getattr(self, name))
            if channels > 1 and channels != (spec.shape or (1,))[-1]:
                raise ValueError(
                    f"config.task.{name} is {getattr(self, name)!r}, of {channels} channels; the "
                    f"images of {source.name} have the shape {spec.shape}"
                )
        if self.cutmix_alpha and len(spec.shape) < 2:
            raise ValueError(
                f"config.task.cutmix_alpha is {self.cutmix_alpha}; it takes images of a height and "
                f"a width, those of {source.name} have the shape {spec.shape}"
            )
        known = self._num_classes(source)
        if source.num_classes is not None and known != source.num_classes:
            # Only photographs have a tally, and only their options have `num_classes`: a folder may
            # lack some of the classes that a network knows.
            lacking = source.tally is not None and source.num_classes < known
            raise ValueError(
                f"the model tells {known} classes apart, {source.name} has {source.num_classes}; "
                f"set config.model.num_classes={source.num_classes}"
                + f", or config.data.options.num_classes={known} if it lacks some"
                * lacking
            )

    def _num_classes(self, source: Source) -> int:
        # The network is traced, not run: an error is reported before anything is compiled.
        spec = source.element_spec["image"]
        image = jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
        variables = jax.eval_shape(self.init, jax.random.key(0), {"image": image})
        logits, _ = jax.eval_shape(
            lambda v, x: self.model.apply(v, self._inputs({"image": x}), train=False),
            variables,
            image,
        )
        return logits.shape[-1]

    def field_ranges(self, source: Source) -> Ranges:
        """Returns the valid labels, see `tasks.HasRanges`."""
        # `check` has compared the two; the data set's number needs no tracing.
        classes = source.num_classes or self._num_classes(source)
        return {"label": Range(0, classes - 1, "the classes of the model, counted from 0")}

    def init(self, key: jax.Array, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The model's variables for batches shaped like `batch`."""
        return self.model.init(key, self._inputs(batch))

    def weights(self, batch: Mapping[str, jax.Array]) -> dict[str, np.float32]:
        """Returns the number of examples."""
        # From a shape alone, so it needs no communication.
        return {"cross_entropy": np.float32(len(batch["label"]))}

    def loss(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        If examples are mixed, so are the targets: a predicted class counts for the accuracy by its
        share of the example.
        """
        images, labels = self._inputs(batch), batch["label"]
        if self.mixed_by:
            images, shares = mixing.mix(images, key, self.mixup_alpha, self.cutmix_alpha)
        logits, model_state = self.model.apply(
            {"params": params, **model_state}, images, train=True, key=key
        )
        named = jnp.argmax(logits, -1)
        correct = jnp.float32(named == labels)
        if self.mixed_by:
            others = mixing.partners(labels)
            correct = shares * correct + (1 - shares) * jnp.float32(named == others)
        # Targets as an array (batch, num_classes) are made only where they are not one-hot.
        if self.mixed_by or self.label_smoothing:
            targets = jax.nn.one_hot(labels, logits.shape[-1])
            if self.mixed_by:
                shares = shares[:, None]
                targets = shares * targets + (1 - shares) * mixing.partners(targets)
            targets = optax.smooth_labels(targets, self.label_smoothing)
            losses = optax.softmax_cross_entropy(logits, targets)
        else:
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weight = jnp.float32(losses.shape[0])
        terms = {"cross_entropy": jnp.sum(losses)}
        return terms, (model_state, {"accuracy": (jnp.sum(correct), weight)})

    def evaluate(
        self, params: Any, model_state: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns sums of `loss` (cross entropy in nats, unsmoothed) and `accuracy`.

        With more than 10 classes also `top5_accuracy`: the label is among the five most likely.
        Masked examples do not count.
        """
        logits, _ = self.model.apply(
            {"params": params, **model_state}, self._inputs(batch), train=False
        )
        labels, mask = batch["label"], batch["mask"] > 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weight = jnp.sum(mask, dtype=jnp.float32)

        def total(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            # A padded example may give any loss, also a NaN: select, do not multiply.
            selected = jnp.where(mask, values, jnp.zeros_like(values))
            return jnp.sum(selected, dtype=jnp.float32), weight

        sums = {"loss": total(losses), "accuracy": total(jnp.argmax(logits, -1) == labels)}
        if logits.shape[-1] >= _MIN_CLASSES_OF_TOP5:
            _, likeliest = jax.lax.top_k(logits, 5)
            sums["top5_accuracy"] = total(jnp.any(likeliest == labels[:, None], -1))
        return sums

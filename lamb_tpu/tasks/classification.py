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
from lamb_tpu.errors import UserError, out_of_range
from lamb_tpu.models import Model
from lamb_tpu.tasks import mixing
from lamb_tpu.tasks.text import check_fields
from lamb_tpu.types import Batch, Params, PyTree

# With fewer classes, top-5 accuracy is not informative.
_MIN_CLASSES_OF_TOP5 = 11


@dataclasses.dataclass(frozen=True)
class Classification:
    """Classification; batches hold `image` (batch, ...) and `label` (batch,) int32.

    The network's outputs are logits (batch, num_classes).

    Attributes:
      label_smoothing: fraction of the target that is spread evenly over all classes, in [0, 1).
      input_mean: subtracted from the raw pixel values, in the same unit; a number, or a tuple with
        one number for each channel.
      input_std: divisor of the pixel values after the subtraction; a number or a tuple, as for
        `input_mean`. With the mean 0, the divisor 255 maps uint8 to [0, 1].
      mixup_alpha, cutmix_alpha: if either is above 0, training examples are mixed, see `mixing.mix`.
    """

    model: Model
    label_smoothing: float = 0.0
    input_mean: float | Sequence[float] = 0.0
    input_std: float | Sequence[float] = 255.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    # Not annotated, so that it is not a field of the dataclass.
    metric_names = ("loss", "accuracy", "top5_accuracy")

    def __post_init__(self) -> None:
        check_fields(self, 0, "mixup_alpha", "cutmix_alpha")
        check_fields(self, 0, "label_smoothing", below=1)
        for name in ("input_mean", "input_std"):
            value = getattr(self, name)
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            if not numbers or not all(map(math.isfinite, numbers)):
                remedy = "use a finite number, or a tuple of finite numbers, one for each channel"
                raise UserError(f"config.task.{name}", value, "is not finite", remedy)
            if name == "input_std" and min(numbers) <= 0:
                raise out_of_range("config.task.input_std", value, "a number above 0")

    @property
    def mixed_by(self) -> tuple[str, ...]:
        """The names of the mixing fields that are not 0; () if examples are not mixed."""
        return tuple(name for name in ("mixup_alpha", "cutmix_alpha") if getattr(self, name))

    def _inputs(self, batch: Batch) -> jax.Array:
        # Images are sent to the device in their stored dtype and normalised there.
        images = jnp.asarray(batch["image"], jnp.float32)
        mean, std = (np.asarray(x, np.float32) for x in (self.input_mean, self.input_std))
        return (images - mean) / std

    def check(self, source: Source) -> None:
        missing = {"image", "label"} - set(source.element_spec)
        if missing:
            problem = f"has the fields {', '.join(source.element_spec)}"
            remedy = "use a data set with image and label for classification"
            raise UserError(source.name, ..., problem, remedy)
        spec = source.element_spec["image"]
        for name in ("input_mean", "input_std"):
            value = getattr(self, name)
            channels = np.size(value)
            if channels > 1 and channels != (spec.shape or (1,))[-1]:
                problem = f"has {channels} numbers, but the images of {source.name} have shape {spec.shape}"
                remedy = "give one number for each channel"
                raise UserError(f"config.task.{name}", value, problem, remedy)
        if self.cutmix_alpha and len(spec.shape) < 2:
            problem = f"needs images, but the examples of {source.name} have shape {spec.shape}"
            raise UserError("config.task.cutmix_alpha", self.cutmix_alpha, problem, "use 0")
        known = self._num_classes(source)
        if source.num_classes is not None and known != source.num_classes:
            # Only data sets of photographs have a tally and the option `num_classes`, because a
            # folder may lack some of the network's classes.
            lacking = source.tally is not None and source.num_classes < known
            problem = f"has {known} classes, but {source.name} has {source.num_classes}"
            remedy = f"set config.model.num_classes={source.num_classes}"
            if lacking:
                remedy += (
                    f", or config.data.options.num_classes={known} if the data lack some classes"
                )
            raise UserError("the model", ..., problem, remedy)

    def _num_classes(self, source: Source) -> int:
        spec = source.element_spec["image"]
        image = jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
        inputs = jax.eval_shape(self._inputs, {"image": image})
        return self.model.output_shapes(inputs).shape[-1]

    def field_ranges(self, source: Source) -> Ranges:
        # `check` has shown that the data set and the network have the same number of classes; reading
        # this number from the network would require tracing.
        classes = source.num_classes or self._num_classes(source)
        return {"label": Range(0, classes - 1, "the classes of the model, counted from 0")}

    def init(self, key: jax.Array, batch: Batch) -> Mapping[str, Any]:
        return self.model.init(key, self._inputs(batch))

    def weights(self, batch: Batch) -> dict[str, np.float32]:
        """Returns the number of examples."""
        # Computed from a shape, so it needs no communication.
        return {"cross_entropy": np.float32(len(batch["label"]))}

    def loss(
        self, params: Params, model_state: PyTree, batch: Batch, key: jax.Array
    ) -> tuple[dict[str, jax.Array], tuple[Any, Any]]:
        """Returns (sum of the loss, (new model state, metric sums)).

        If examples are mixed, their targets are mixed too. The accuracy then counts each prediction
        by the share of the predicted class in the mixed example.
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
        # Make targets (batch, num_classes) only if they are not one-hot.
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
        self, params: Params, model_state: PyTree, batch: Batch
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns sums of `loss` (cross entropy in nats, unsmoothed) and `accuracy`.

        With more than 10 classes, the result also has `top5_accuracy`: whether the label is among the
        five most likely classes. Examples with `mask` 0 do not count.
        """
        logits, _ = self.model.apply(
            {"params": params, **model_state}, self._inputs(batch), train=False
        )
        labels, mask = batch["label"], batch["mask"] > 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weight = jnp.sum(mask, dtype=jnp.float32)

        def total(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Use `where`, not multiplication: a padded example may give NaN.
            selected = jnp.where(mask, values, jnp.zeros_like(values))
            return jnp.sum(selected, dtype=jnp.float32), weight

        sums = {"loss": total(losses), "accuracy": total(jnp.argmax(logits, -1) == labels)}
        if logits.shape[-1] >= _MIN_CLASSES_OF_TOP5:
            _, likeliest = jax.lax.top_k(logits, 5)
            sums["top5_accuracy"] = total(jnp.any(likeliest == labels[:, None], -1))
        return sums

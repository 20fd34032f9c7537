"""Rules for BERT's parameters: facts for optimizers, and the split over the mesh axis 'model'."""

from typing import Any

# For config.optimizer.rules: the exclusions of the named rules 'bert' (biases and LayerNorm neither
# decay nor adapt), and for `scan_layers` the axis that stacks layers, so that every layer has its
# own trust ratio.
PARAMETERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("(^|/)(bias|scale)$", {"decay": False, "adapt": False}),
    ("", {}),
)
# The first rule that matches decides, so the narrower ones come first. The empty pattern matches
# every path.
PARAMETERS_SCANNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("^encoder/layers/.*(bias|scale)$", {"decay": False, "adapt": False, "layer_axes": (0,)}),
    ("^encoder/layers/", {"layer_axes": (0,)}),
    *PARAMETERS,
)
# The same, but every leaf adapts, as in DeepSpeed's LAMB.
PARAMETERS_ADAPTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("(^|/)(bias|scale)$", {"decay": False}),
    ("", {}),
)
PARAMETERS_ADAPTED_SCANNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("^encoder/layers/.*(bias|scale)$", {"decay": False, "layer_axes": (0,)}),
    ("^encoder/layers/", {"layer_axes": (0,)}),
    *PARAMETERS_ADAPTED,
)

# For config.parallel.rules: each device of the axis 'model' has some of the heads and some of the
# intermediate units, so an encoder layer sums twice over that axis. The number of heads must divide
# over it. Embeddings are split by hidden unit, because the 30,522 words of the published vocabulary
# divide only over 2, 3 and 6.
_ENCODER: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    # Kernels are (inputs, outputs). The first product of each pair is split by its outputs, the
    # second by its inputs, so that only the second's result must be summed.
    ("(query|key|value|intermediate)/kernel$", (None, "model")),
    ("(query|key|value|intermediate)/bias$", ("model",)),
    # The bias of the second product is added once, after the sum, and is not split.
    ("^encoder/.*output/kernel$", ("model", None)),
)
_EMBEDDINGS = (("^embeddings/(word|position|token_type)$", (None, "model")),)
TENSOR_PARALLEL = (*_ENCODER, *_EMBEDDINGS)
TENSOR_PARALLEL_SCANNED = (
    # The leading axis stacks the layers and stays whole.
    *((pattern, (None, *split)) for pattern, split in _ENCODER),
    *_EMBEDDINGS,
)

"""Rules for BERT's parameters: optimizer metadata, and their split over the mesh axis 'model'."""

from typing import Any

# For config.optimizer.rules: biases and LayerNorm neither decay nor adapt, as in the rule preset
# 'bert'. With `scan_layers`, use PARAMETERS_SCANNED, which also names the axis that stacks layers, so
# that every layer has a separate trust ratio.
PARAMETERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("(^|/)(bias|scale)$", {"decay": False, "adapt": False}),
    ("", {}),
)
# The first rule that matches decides, so specific rules come first. The empty pattern matches every
# path.
PARAMETERS_SCANNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("^encoder/layers/.*(bias|scale)$", {"decay": False, "adapt": False, "layer_axes": (0,)}),
    ("^encoder/layers/", {"layer_axes": (0,)}),
    *PARAMETERS,
)
# Like the two lists of rules above, but every leaf adapts, as in DeepSpeed's LAMB.
PARAMETERS_ADAPTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("(^|/)(bias|scale)$", {"decay": False}),
    ("", {}),
)
PARAMETERS_ADAPTED_SCANNED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("^encoder/layers/.*(bias|scale)$", {"decay": False, "layer_axes": (0,)}),
    ("^encoder/layers/", {"layer_axes": (0,)}),
    *PARAMETERS_ADAPTED,
)

# For config.parallel.rules: each device along the axis 'model' has some of the attention heads and
# some of the intermediate units, so an encoder layer needs two sums over that axis. The size of the
# axis must divide the number of heads. Embeddings are split by hidden unit, because 2, 3 and 6 are
# the only small divisors of the published vocabulary's 30,522 words.
_ENCODER: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    # Kernels are (inputs, outputs). In each pair of products, the first is split by its outputs and
    # the second by its inputs, so that only the second result must be summed.
    ("(query|key|value|intermediate)/kernel$", (None, "model")),
    ("(query|key|value|intermediate)/bias$", ("model",)),
    # The bias of the second product is not split; it is added once, after the sum.
    ("^encoder/.*output/kernel$", ("model", None)),
)
_EMBEDDINGS = (("^embeddings/(word|position|token_type)$", (None, "model")),)
TENSOR_PARALLEL = (*_ENCODER, *_EMBEDDINGS)
TENSOR_PARALLEL_SCANNED = (
    # The leading axis stacks layers and is not split.
    *((pattern, (None, *split)) for pattern, split in _ENCODER),
    *_EMBEDDINGS,
)

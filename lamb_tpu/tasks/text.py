"""Checks that tasks on text make of their data and model before anything compiles."""

import math
from collections.abc import Mapping, Sequence

import jax

from lamb_tpu.data import ZERO_OR_ONE, Range, Ranges, Source, title
from lamb_tpu.models import Model


def check_text(
    task: str, model: Model, source: Source, fields: Sequence[str]
) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Refuses data that a model of text cannot read.

    Args:
      task: name of the task.
      model: the network, with `vocab_size` and `max_positions`.
      source: the data.
      fields: names of the fields that the task needs, `input_ids` among them.

    Returns:
      Shapes and dtypes of the model's outputs for one example, by name.

    Raises:
      ValueError: a field is missing, the vocabularies differ, or sequences are too long.
    """
    if set(fields) - set(source.element_spec):
        raise ValueError(
            f"{task} needs the fields {', '.join(fields)}; {title(source)} has "
            f"{', '.join(source.element_spec)}"
        )
    vocabulary = source.vocabulary
    if vocabulary is not None and model.vocab_size not in (None, len(vocabulary)):
        raise ValueError(
            f"config.model.vocab_size is {model.vocab_size}, the vocabulary of {title(source)} has "
            f"{len(vocabulary)} words; set config.model.vocab_size={len(vocabulary)}, or give data "
            "with the vocabulary that the model is for"
        )
    length = source.element_spec["input_ids"].shape[0]
    if model.max_positions is not None and length > model.max_positions:
        raise ValueError(
            f"config.model.max_positions is {model.max_positions}, the sequences of "
            f"{title(source)} have {length} tokens; set config.model.max_positions={length}, or "
            "make them shorter"
        )
    batch = {
        name: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
        for name, spec in source.element_spec.items()
    }
    # The network is traced, not run, to learn the names and shapes of its outputs.
    variables = jax.eval_shape(model.init, jax.random.key(0), batch)
    outputs, _ = jax.eval_shape(lambda v, x: model.apply(v, x, train=False), variables, batch)
    return outputs


def words(model: Model, source: Source) -> Range:
    """Returns the range of token ids: the model's words, or else those of the data's vocabulary."""
    size = model.vocab_size
    if size is None and source.vocabulary is not None:
        size = len(source.vocabulary)
    return Range(0, math.inf if size is None else size - 1, "the words of the vocabulary")


def positions(source: Source, field: str = "input_ids") -> Range:
    """Returns the range of positions within the sequence of a field."""
    length = source.element_spec[field].shape[0]
    return Range(0, length - 1, "the positions of the sequence")


def text_ranges(model: Model, source: Source) -> Ranges:
    """Returns the ranges of the fields that `check_text` requires of BERT's inputs."""
    segments = math.inf if model.num_segments is None else model.num_segments - 1
    return {
        "input_ids": words(model, source),
        "token_type_ids": Range(0, segments, "the segments of the model"),
        "attention_mask": ZERO_OR_ONE,
    }

"""Checks of a task's fields, and checks that data and model fit a text task."""

import math
from collections.abc import Mapping, Sequence

import jax

from lamb_tpu.data import ZERO_OR_ONE, Range, Ranges, Source, title
from lamb_tpu.errors import UserError, listed, out_of_range
from lamb_tpu.models import Model


def check_fields(task: object, least: float, *names: str, below: float = math.inf) -> None:
    """Rejects fields of a task that are less than `least`, or not less than `below`."""
    for name in names:
        value = getattr(task, name)
        if not least <= value < below:
            bound = f" and less than {below}" if below < math.inf else ""
            raise out_of_range(f"config.task.{name}", value, f"at least {least}{bound}")


def lacks(task: str, fields: Sequence[str], source: Source) -> UserError:
    """Returns the error for data without the fields that a task needs."""
    problem = f"has the fields {', '.join(source.element_spec)}"
    remedy = f"use a data set with {listed(fields, 'and')} for {task}"
    return UserError(title(source), ..., problem, remedy)


def other_size(size: int | None, words: int, source: Source) -> UserError:
    """Returns the error for a vocabulary whose size differs from the model's."""
    problem = f"differs from the {words} words of the vocabulary of {title(source)}"
    remedy = f"set config.model.vocab_size={words}, or use data with the model's vocabulary"
    return UserError("config.model.vocab_size", size, problem, remedy)


def check_text(
    task: str, model: Model, source: Source, fields: Sequence[str]
) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Rejects data that a text model cannot read; returns the shapes of the model's outputs for one example.

    Raises:
      UserError: one of the `fields` is missing, the vocabularies differ, or sequences are too long.
    """
    if set(fields) - set(source.element_spec):
        raise lacks(task, fields, source)
    vocabulary = source.vocabulary
    if vocabulary is not None and model.vocab_size not in (None, len(vocabulary)):
        raise other_size(model.vocab_size, len(vocabulary), source)
    length = source.element_spec["input_ids"].shape[0]
    if model.max_positions is not None and length > model.max_positions:
        problem = f"is less than the {length} tokens of the sequences of {title(source)}"
        remedy = f"set config.model.max_positions={length}, or use shorter sequences"
        raise UserError("config.model.max_positions", model.max_positions, problem, remedy)
    batch = {
        name: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype)
        for name, spec in source.element_spec.items()
    }
    return model.output_shapes(batch)


def words(model: Model, source: Source) -> Range:
    """Returns the range of token IDs in the model's vocabulary or, if its size is None, in the data's."""
    size = model.vocab_size
    if size is None and source.vocabulary is not None:
        size = len(source.vocabulary)
    return Range(0, math.inf if size is None else size - 1, "the words of the vocabulary")


def positions(source: Source, field: str = "input_ids") -> Range:
    """Returns the range of positions within the sequence of a field."""
    length = source.element_spec[field].shape[0]
    return Range(0, length - 1, "the positions of the sequence")


def text_ranges(model: Model, source: Source) -> Ranges:
    """Returns the valid ranges of BERT's input fields."""
    segments = math.inf if model.num_segments is None else model.num_segments - 1
    return {
        "input_ids": words(model, source),
        "token_type_ids": Range(0, segments, "the segments of the model"),
        "attention_mask": ZERO_OR_ONE,
    }

"""BERT's pre-training examples, made from prepared text while it is read."""

from dataclasses import dataclass

import numpy as np

from lamb_tpu.data.hashing import words
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec
from lamb_tpu.data.text.masking import mask_tokens
from lamb_tpu.data.text.packing import pack_pairs, pack_sentences
from lamb_tpu.data.text.shards import TokenShards
from lamb_tpu.errors import UserError


@dataclass(frozen=True)
class Options:
    """Options of the examples.

    Attributes:
      sequence_length: tokens of an example, including special tokens and padding.
      max_predictions: the largest number of predictions in an example; the papers have 20 at 128
        tokens, 80 at 512.
      next_sentence: True for pairs of segments with next-sentence prediction, as in BERT; False for
        full sentences without it, as in RoBERTa.
      whole_words: predict all tokens of a word or none.
      dupe_factor: 0 masks anew in every epoch. k >= 1 is the original's static data: k copies of
        the text, each packed and masked once.
      short_probability: share of pairs with a shorter target length.
      mask_probability: share of the tokens that are predicted.
      seed: seed of packing and masking, 0 to 2**64 - 1.
    """

    sequence_length: int = 128
    max_predictions: int = 20
    next_sentence: bool = True
    whole_words: bool = False
    dupe_factor: int = 0
    short_probability: float = 0.1
    mask_probability: float = 0.15
    seed: int = 0


class MaskedLmSource(BaseSource):
    """A `Source` whose examples are a function of (options, text, epoch, index).

    Its name depends on the text only; the options are part of the config, which must stay the same
    when a run is resumed.

    Fields of an example, with sequence length L and P places for predictions:
      input_ids: int32 (L,): [CLS] A [SEP] B [SEP] [PAD] ..., masked; or [CLS], sentences, [SEP].
      token_type_ids: int32 (L,): 1 for B and its [SEP], otherwise 0.
      attention_mask: bool (L,): False for padding.
      masked_positions, masked_ids: int32 (P,): positions to predict, ascending, and the original
        ids; 0 in unused places.
      masked_weights: float32 (P,): 1 for a prediction, 0 for an unused place.
      next_sentence_label: int32 (): 0 if B follows A, 1 if it is from another document. Only with
        `next_sentence`.
    """

    in_memory = False  # even if the ids are: masking is work that should overlap with the step

    def __init__(self, shards: TokenShards, options: Options) -> None:
        """Packs the text.

        Raises:
          UserError: an option is out of range, or the text has too few documents.
        """
        _check(shards, options)
        self._shards, self._options = shards, options
        self.name = f"masked_lm:{shards.folder.name}:{shards.fingerprint}"
        self.vocabulary, self.cased = shards.vocabulary, shards.cased
        bounds = shards.sentence_starts, shards.document_starts
        if options.next_sentence:
            copies = [
                pack_pairs(
                    # Without [CLS] and two [SEP].
                    *bounds,
                    options.sequence_length - 3,
                    options.seed,
                    copy,
                    options.short_probability,
                )
                for copy in range(max(1, options.dupe_factor))
            ]
            self._pairs = tuple(np.concatenate(column) for column in zip(*copies))
            self._length = len(self._pairs[0])
        else:
            # Without [CLS] and the last [SEP]. All copies have the same examples and differ in
            # their masks.
            self._spans = pack_sentences(*bounds, options.sequence_length - 2)
            self._length = len(self._spans.start) * max(1, options.dupe_factor)
        self.element_spec = element_spec(options)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Returns the examples at `indices` (int, (n,)), masked for `epochs`, (n,) or one number.

        Evaluation leaves `epochs` out and so gets the same masks every time.
        """
        indices = np.asarray(indices, np.int64)
        options, vocabulary = self._options, self._shards.vocabulary
        make = self._gather_pairs if options.next_sentence else self._gather_spans
        # First the examples without masks, (n, length).
        ids, is_text, lengths, extra = make(indices)
        # Static data has the same masks in every epoch.
        epochs = 0 if options.dupe_factor else epochs
        # Every token is a word of its own unless whole words are asked for.
        is_head = ~vocabulary.continues[ids] if options.whole_words else np.ones_like(is_text)
        masked, positions, targets, weights = mask_tokens(
            ids,
            is_text,
            is_head,
            words(options.seed, np.broadcast_to(epochs, indices.shape), indices),
            mask_id=vocabulary.mask_id,
            vocabulary_size=len(vocabulary),
            max_predictions=options.max_predictions,
            probability=options.mask_probability,
        )
        return {
            "input_ids": masked,
            "attention_mask": np.arange(options.sequence_length) < lengths[:, None],
            "masked_positions": positions,
            "masked_ids": targets,
            "masked_weights": weights,
            **extra,
        }

    def _gather_pairs(
        self, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Batch]:
        a_start, a_length, b_start, b_length, is_random = (
            column[indices][:, None] for column in self._pairs
        )
        # Columns of an example: [CLS], A from 1 on, [SEP], B from `b_column` on, [SEP], padding.
        columns = np.arange(self._options.sequence_length)
        in_a = (columns >= 1) & (columns < 1 + a_length)
        b_column = 2 + a_length
        in_b = (columns >= b_column) & (columns < b_column + b_length)
        lengths = (b_column + b_length + 1)[:, 0]
        ids = self._special_ids(lengths)
        # Places outside of both segments mean nothing; only those of `is_text` are read.
        places = np.where(in_a, a_start + columns - 1, b_start + columns - b_column)
        is_text = in_a | in_b
        ids[is_text] = self._shards.read(places[is_text])
        types = (columns >= b_column) & (columns < lengths[:, None])
        return (
            ids,
            is_text,
            lengths,
            {
                "token_type_ids": types.astype(np.int32),
                "next_sentence_label": is_random[:, 0].astype(np.int32),
            },
        )

    def _gather_spans(
        self, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Batch]:
        # The copies follow each other, so that the index tells them apart and masks each anew.
        start, length = (column[indices % len(self._spans.start)] for column in self._spans)
        # All tokens of all examples in one row: the example of each, and its place within.
        rows = np.repeat(np.arange(len(indices)), length)
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        places = start[rows] + within
        # Each document that ended since the example began adds a separator.
        document = np.searchsorted(self._shards.document_token_starts, places, side="right")
        first = np.searchsorted(self._shards.document_token_starts, start, side="right")
        last = np.searchsorted(self._shards.document_token_starts, start + length - 1, side="right")
        columns = 1 + within + document - first[rows]
        lengths = 2 + length + last - first
        ids = self._special_ids(lengths)
        is_text = np.zeros(ids.shape, bool)
        is_text[rows, columns] = True
        ids[rows, columns] = self._shards.read(places)
        return ids, is_text, lengths, {"token_type_ids": np.zeros(ids.shape, np.int32)}

    def _special_ids(self, lengths: np.ndarray) -> np.ndarray:
        """Returns rows of [CLS], separators in all places before the padding, and padding."""
        vocabulary = self._shards.vocabulary
        columns = np.arange(self._options.sequence_length)
        separators = columns < lengths[:, None]
        ids = np.where(separators, vocabulary.sep_id, vocabulary.pad_id).astype(np.int32)
        ids[:, 0] = vocabulary.cls_id
        return ids


def element_spec(options: Options) -> dict[str, FieldSpec]:
    """Returns shapes and dtypes of the fields of an example, see `MaskedLmSource`."""
    tokens, places = (options.sequence_length,), (options.max_predictions,)
    spec = {
        "input_ids": FieldSpec(tokens, np.dtype(np.int32)),
        "token_type_ids": FieldSpec(tokens, np.dtype(np.int32)),
        "attention_mask": FieldSpec(tokens, np.dtype(bool)),
        "masked_positions": FieldSpec(places, np.dtype(np.int32)),
        "masked_ids": FieldSpec(places, np.dtype(np.int32)),
        "masked_weights": FieldSpec(places, np.dtype(np.float32)),
    }
    if options.next_sentence:
        spec["next_sentence_label"] = FieldSpec((), np.dtype(np.int32))
    return spec


def check_options(options: Options) -> None:
    """Refuses options out of range.

    Raises:
      UserError: an option is out of range; the message names it.
    """
    # The special tokens, and a token for each segment.
    least = 5 if options.next_sentence else 3
    for name, found, low in (
        ("sequence_length", options.sequence_length, least),
        ("max_predictions", options.max_predictions, 1),
        ("dupe_factor", options.dupe_factor, 0),
    ):
        if found < low:
            raise UserError(f"config.data.options.{name} must be at least {low}, found {found}")
    for name, share in (
        ("short_probability", options.short_probability),
        ("mask_probability", options.mask_probability),
    ):
        if not 0 <= share <= 1:
            raise UserError(f"config.data.options.{name} must lie in 0..1, found {share}")
    if not 0 <= options.seed < 2**64:
        raise UserError(f"config.seed must lie in 0..2**64-1, found {options.seed}")


def _check(shards: TokenShards, options: Options) -> None:
    check_options(options)
    num_documents = len(shards.document_starts) - 1
    if options.next_sentence and num_documents < 2:
        raise UserError(
            f"next-sentence prediction needs at least 2 documents, {shards.folder} has "
            f"{num_documents}; prepare the text with another --documents, or set "
            "config.data.options.next_sentence=False"
        )

"""BERT's pre-training examples, made when the prepared text is read."""

import math
from dataclasses import dataclass

import numpy as np

from lamb_tpu.data import checking
from lamb_tpu.data.hashing import words
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec
from lamb_tpu.data.text.masking import mask_tokens
from lamb_tpu.data.text.packing import pack_pairs, pack_sentences
from lamb_tpu.data.text.shards import TokenShards
from lamb_tpu.errors import UserError, out_of_range


@dataclass(frozen=True)
class MaskedLmOptions:
    """Options of the examples.

    Attributes:
      sequence_length: number of tokens in an example, including special tokens and padding.
      max_predictions: maximum number of predictions in an example; the papers use 20 for 128
        tokens and 80 for 512.
      next_sentence: True for pairs of segments with next-sentence prediction, as in BERT; False for
        full sentences without it, as in RoBERTa.
      whole_words: whether to predict either all tokens of a word or none.
      dupe_factor: 0 draws new masks in every epoch. k >= 1 makes static data as the original code
        does: k copies of the text, each masked once (with `next_sentence`, also packed separately).
      short_probability: fraction of the pairs that get a random, shorter target length.
      mask_probability: fraction of the tokens that are predicted.
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

    Fields of an example, with sequence length L and at most P predictions:

      input_ids: int32 (L,): [CLS] A [SEP] B [SEP] [PAD] ..., masked. Without `next_sentence`:
        [CLS] sentences [SEP] [PAD] ...
      token_type_ids: int32 (L,): 1 for B and its [SEP], otherwise 0.
      attention_mask: bool (L,): False for padding.
      masked_positions, masked_ids: int32 (P,): positions to predict, ascending, and the original
        ids; 0 in unused entries.
      masked_weights: float32 (P,): 1 for a prediction, 0 for an unused entry.
      next_sentence_label: int32 (): 0 if B follows A, 1 if it is from another document. Only with
        `next_sentence`.
    """

    in_memory = False  # even if the ids are in memory, so that masking overlaps with the step

    def __init__(self, shards: TokenShards, options: MaskedLmOptions) -> None:
        """Packs the text; raises a UserError for an option out of range or too few documents."""
        check_options(options)
        num_documents = len(shards.document_starts) - 1
        if options.next_sentence and num_documents < 2:
            problem = f"needs at least 2 documents, but {shards.folder} has {num_documents}"
            remedy = "use False, or prepare the text with another rule for --documents"
            raise UserError("config.data.options.next_sentence", True, problem, remedy)
        self._shards, self._options = shards, options
        self.name = f"masked_lm:{shards.folder.name}:{shards.fingerprint}"
        self.vocabulary, self.cased = shards.vocabulary, shards.cased
        bounds = shards.sentence_starts, shards.document_starts
        if options.next_sentence:
            max_tokens = options.sequence_length - 3  # without [CLS] and two [SEP]
            copies = [
                pack_pairs(*bounds, max_tokens, options.seed, copy, options.short_probability)
                for copy in range(max(1, options.dupe_factor))
            ]
            self._pairs = tuple(np.concatenate(column) for column in zip(*copies))
            self._length = len(self._pairs[0])
        else:
            # The length without [CLS] and the last [SEP]. All copies have the same examples and
            # differ only in their masks.
            self._spans = pack_sentences(*bounds, options.sequence_length - 2)
            self._length = len(self._spans.start) * max(1, options.dupe_factor)
        self.element_spec = element_spec(options)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers examples with the masks of their epochs; see `Source`."""
        indices = np.asarray(indices, np.int64)
        options, vocabulary = self._options, self._shards.vocabulary
        make = self._gather_pairs if options.next_sentence else self._gather_spans
        ids, is_text, lengths, extra = make(indices)  # without masks, (n, length)
        # Static data has the same masks in every epoch.
        epochs = 0 if options.dupe_factor else epochs
        # Unless whole words are masked, every token counts as a word.
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
        # An example is [CLS], A from column 1, [SEP], B from column `b_column`, [SEP], padding.
        columns = np.arange(self._options.sequence_length)
        in_a = (columns >= 1) & (columns < 1 + a_length)
        b_column = 2 + a_length
        in_b = (columns >= b_column) & (columns < b_column + b_length)
        lengths = (b_column + b_length + 1)[:, 0]
        ids = self._special_ids(lengths)
        # Positions outside both segments are arbitrary; only those of `is_text` are read.
        token_indices = np.where(in_a, a_start + columns - 1, b_start + columns - b_column)
        is_text = in_a | in_b
        ids[is_text] = self._shards.read(token_indices[is_text])
        types = (columns >= b_column) & (columns < lengths[:, None])
        labels = is_random[:, 0].astype(np.int32)
        extra = {"token_type_ids": types.astype(np.int32), "next_sentence_label": labels}
        return ids, is_text, lengths, extra

    def _gather_spans(
        self, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Batch]:
        # A copy repeats the spans at higher indices, so its masks are different.
        start, length = (column[indices % len(self._spans.start)] for column in self._spans)
        # For each token of all examples: its example, and its index within the example.
        rows = np.repeat(np.arange(len(indices)), length)
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        token_indices = start[rows] + within
        # Each document that has ended since the start of the example adds a separator.
        document, first, last = (
            np.searchsorted(self._shards.document_token_starts, tokens, side="right")
            for tokens in (token_indices, start, start + length - 1)
        )
        columns = 1 + within + document - first[rows]
        lengths = 2 + length + last - first
        ids = self._special_ids(lengths)
        is_text = np.zeros(ids.shape, bool)
        is_text[rows, columns] = True
        ids[rows, columns] = self._shards.read(token_indices)
        return ids, is_text, lengths, {"token_type_ids": np.zeros(ids.shape, np.int32)}

    def _special_ids(self, lengths: np.ndarray) -> np.ndarray:
        """Returns rows that begin with [CLS], have [SEP] up to `lengths`, and end with padding."""
        vocabulary = self._shards.vocabulary
        columns = np.arange(self._options.sequence_length)
        separators = columns < lengths[:, None]
        ids = np.where(separators, vocabulary.sep_id, vocabulary.pad_id).astype(np.int32)
        ids[:, 0] = vocabulary.cls_id
        return ids


def element_spec(options: MaskedLmOptions) -> dict[str, FieldSpec]:
    """Returns the shapes and dtypes of an example's fields, see `MaskedLmSource`."""
    tokens, predictions = (options.sequence_length,), (options.max_predictions,)
    spec = {
        "input_ids": FieldSpec(tokens, np.dtype(np.int32)),
        "token_type_ids": FieldSpec(tokens, np.dtype(np.int32)),
        "attention_mask": FieldSpec(tokens, np.dtype(bool)),
        "masked_positions": FieldSpec(predictions, np.dtype(np.int32)),
        "masked_ids": FieldSpec(predictions, np.dtype(np.int32)),
        "masked_weights": FieldSpec(predictions, np.dtype(np.float32)),
    }
    if options.next_sentence:
        spec["next_sentence_label"] = FieldSpec((), np.dtype(np.int32))
    return spec


def check_options(options: MaskedLmOptions) -> None:
    """Raises a UserError if an option is out of range."""
    checking.check_options(
        options,
        # At least the special tokens, and one token for each segment.
        sequence_length=(5 if options.next_sentence else 3, math.inf),
        max_predictions=(1, math.inf),
        dupe_factor=(0, math.inf),
        short_probability=(0, 1),
        mask_probability=(0, 1),
    )
    if not 0 <= options.seed < 2**64:
        raise out_of_range("config.seed", options.seed, "0 to 2**64-1")

"""Pairs of sentences as a data set: padded ids, in batches of similar length."""

import math
from dataclasses import dataclass

import numpy as np

from lamb_tpu.data import checking
from lamb_tpu.data.source import BaseSource, Batch, FieldSpec
from lamb_tpu.data.splits import slices
from lamb_tpu.data.text import grammar, parallel
from lamb_tpu.data.text.pairs import Multi30k, Wmt16
from lamb_tpu.data.text.subwords import to_text
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError, out_of_range

_MULTIPLE = 8  # widths of evaluation batches are multiples of this
_INT32 = np.dtype(np.int32)
# Field that `trim` cuts -> number of columns before the sentence.
_CUT = {"source_ids": 0, "target_ids": 1}


@dataclass(frozen=True)
class PairOptions:
    """Options of parallel text.

    Attributes:
      vocab_size: maximum size of the joint vocabulary, which is trained on the split `train`.
      max_length: maximum number of tokens of a sentence in training, including its end token; pairs
        with a longer sentence are left out.
      widths: number of widths to which training batches are padded. The widths are evenly spaced, and
        the largest is `max_length`. The step is compiled once for each width.
    """

    vocab_size: int = 8000
    max_length: int = 48
    widths: int = 4


def element_spec(source: int, target: int) -> dict[str, FieldSpec]:
    """Returns the fields of a pair; `source` and `target` are the widths, including the end tokens."""
    return {
        "source_ids": FieldSpec((source,), _INT32),
        "source_length": FieldSpec((), _INT32),
        "target_ids": FieldSpec((target + 1,), _INT32),
        "target_length": FieldSpec((), _INT32),
    }


class PairSource(BaseSource):
    """Pairs of sentences; training leaves out pairs longer than `max_length`, evaluation does not.

    Fields of an example: `source_ids` and `target_ids`, padded with 0, and `source_length` and
    `target_length`. A source ends with [SEP]; a target begins with [CLS] and ends with [SEP]; the
    lengths include these tokens. Evaluation pads all sentences of a language to the longest
    sentence, rounded up to a multiple of 8.

    In training, `buckets` has the index of the width that each example needs.
    """

    cased = True

    def __init__(
        self,
        name: str,
        tokens: parallel.Tokens,
        chosen: np.ndarray,
        vocabulary: Vocabulary,
        options: PairOptions,
        training: bool,
    ) -> None:
        """Selects the pairs `chosen`; raises a UserError if all of them are too long for training."""
        check_options(options)
        self.name, self.vocabulary = name, vocabulary
        self.in_memory = not isinstance(tokens.ids, np.memmap)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens.lengths.ravel())[:-1]])
        lengths = tokens.lengths[chosen]
        longest = lengths.max(1)
        widths = lengths.max(0) + -lengths.max(0) % _MULTIPLE
        if training:
            fits = longest <= options.max_length
            if left := int(len(fits) - fits.sum()):
                self.notes = (
                    f"{name}: {left:,} of {len(fits):,} pairs have a sentence of more than "
                    f"{options.max_length} tokens and are left out of training",
                )
            if not fits.any():
                key = "config.data.options.max_length"
                problem = f"is less than the length of every pair of {name}"
                raise UserError(key, options.max_length, problem, "use a larger value")
            chosen, lengths, longest = chosen[fits], lengths[fits], longest[fits]
            widths = np.array([options.max_length] * 2)
        self._tokens, self._chosen, self._lengths = tokens, chosen, lengths
        self._starts = starts.reshape(-1, 2)[chosen]
        self.element_spec = element_spec(*map(int, widths))
        self._options = options
        if training and options.widths > 1:
            # The smallest width that holds both sentences.
            self.buckets = np.searchsorted(_widths(options), longest).astype(np.int8)

    def __len__(self) -> int:
        return len(self._chosen)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        del epochs
        batch: Batch = {}
        for side, name in enumerate(("source", "target")):
            field = f"{name}_ids"
            first = _CUT[field]
            width = self.element_spec[field].shape[0] - first
            lengths = self._lengths[indices, side]
            columns = np.arange(width)
            within = columns < lengths[:, None]
            starts = self._starts[indices, side][:, None]
            ids = np.where(within, self._tokens.ids[np.where(within, starts + columns, 0)], 0)
            ids = ids.astype(np.int32)
            if first:
                assert self.vocabulary is not None
                begin = np.full((len(indices), 1), self.vocabulary.cls_id, np.int32)
                ids = np.concatenate([begin, ids], 1)
            batch[field] = ids
            batch[f"{name}_length"] = (lengths + first).astype(np.int32)
        return batch

    def trim(self, batch: Batch, bucket: int) -> Batch:
        """Trims padding from a batch, to the width with the index `bucket`."""
        width = int(_widths(self._options)[bucket])
        return {
            field: values[:, : width + _CUT[field]] if field in _CUT else values
            for field, values in batch.items()
        }

    @property
    def references(self) -> list[str]:
        """The texts of the targets, in order."""
        texts = self._tokens.references()
        return [texts[number] for number in self._chosen]

    def text(self, ids: np.ndarray) -> str:
        """Converts a sentence's ids, int (n,), to text, up to its end token."""
        assert self.vocabulary is not None
        return to_text(ids, self.vocabulary)


def _widths(options: PairOptions) -> np.ndarray:
    """Returns the widths of training batches, ascending; the last width is `max_length`."""
    return -(-np.arange(1, options.widths + 1) * options.max_length // options.widths)


def check_options(options: PairOptions) -> None:
    """Raises a UserError if an option is out of range."""
    checking.check_options(options, max_length=(1, math.inf), widths=(1, math.inf))
    if options.widths > min(options.max_length, 64):
        raise out_of_range(
            "config.data.options.widths",
            options.widths,
            f"at most 64 and at most max_length={options.max_length}",
        )


def load_pairs(
    name: str,
    split: str,
    source_dir: str | None,
    data_dir: str | None,
    options: PairOptions,
    training: bool,
) -> PairSource:
    """Loads a split, see `registry.load`; if necessary, prepares the set below `data_dir` first."""
    check_options(options)
    if name == "grammar_de_en":
        prepared = _embedded(options.vocab_size)
    else:
        corpus = Multi30k(source_dir) if name == "multi30k" else Wmt16(data_dir)
        prepared = parallel.prepare(name, corpus, options.vocab_size, data_dir)
    ranges = slices(name, split, prepared.sizes)
    if len({each for each, *_ in ranges}) > 1:
        problem = "joins several splits"
        raise UserError(
            f"split {split!r} of data set {name}", ..., problem, "use slices of one split"
        )
    chosen = np.concatenate([np.arange(start, stop) for _, start, stop in ranges])
    return PairSource(
        name=f"{name}:{split}:{prepared.digest}",
        tokens=prepared.open(ranges[0][0]),
        chosen=chosen,
        vocabulary=prepared.vocabulary,
        options=options,
        training=training,
    )


def _embedded(vocab_size: int) -> parallel.Prepared:
    pairs_of = {split: list(grammar.read(split)) for split in grammar.SPLITS}
    vocabulary = parallel.train_vocabulary(lambda: pairs_of["train"], vocab_size)
    return parallel.Prepared(
        vocabulary,
        parallel.digest(pairs_of, vocabulary),
        {split: len(pairs) for split, pairs in pairs_of.items()},
        lambda split: parallel.tokenize(pairs_of[split], vocabulary),
    )

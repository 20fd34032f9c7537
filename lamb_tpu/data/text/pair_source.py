"""Pairs of sentences as a data set: padded ids, in batches of like lengths."""

from dataclasses import dataclass

import numpy as np

from lamb_tpu.data.source import BaseSource, Batch, FieldSpec
from lamb_tpu.data.splits import slices
from lamb_tpu.data.text import grammar, parallel
from lamb_tpu.data.text.pairs import Multi30k, Wmt16
from lamb_tpu.data.text.subwords import to_text
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError

_MULTIPLE = 8  # the width of evaluation is a multiple of this
_INT32 = np.dtype(np.int32)
# Fields whose second axis is cut, and by how much they are longer than a sentence.
_CUT = {"source_ids": 0, "target_ids": 1}


@dataclass(frozen=True)
class Options:
    """Options of parallel text.

    Attributes:
      vocab_size: most words of the joint vocabulary, which is trained on the split `train`.
      max_length: in training, pairs with a longer sentence are left out; in tokens, its end sign
        counted.
      widths: number of widths, equal parts of `max_length`, to which training batches are padded;
        1 pads all of them to `max_length`. The step is compiled for each.
    """

    vocab_size: int = 8000
    max_length: int = 48
    widths: int = 4


def element_spec(source: int, target: int) -> dict[str, FieldSpec]:
    """Returns the fields of a pair, for sentences of so many tokens with their end signs."""
    return {
        "source_ids": FieldSpec((source,), _INT32),
        "source_length": FieldSpec((), _INT32),
        "target_ids": FieldSpec((target + 1,), _INT32),
        "target_length": FieldSpec((), _INT32),
    }


class PairSource(BaseSource):
    """Pairs of sentences; in training those within `max_length`, in evaluation all of them.

    Fields of an example: `source_ids` and `target_ids`, padded with 0, and `source_length` and
    `target_length`. A source ends with [SEP]; a target begins with [CLS] and ends with [SEP], and
    both count. All sentences of an evaluation are padded to its longest one.

    Attributes:
      references: the targets' texts, in order.
      buckets: int8 (examples,), the number of the width that each example needs, from 0; None for
        one width.
    """

    cased = True

    def __init__(
        self,
        name: str,
        tokens: parallel.Tokens,
        chosen: np.ndarray,
        vocabulary: Vocabulary,
        options: Options,
        training: bool,
    ) -> None:
        """Takes the pairs `chosen`, int (pairs,), of `tokens`.

        Raises:
          UserError: an option is out of range, or no pair is within `max_length`.
        """
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
                raise UserError(
                    f"config.data.options.max_length is {options.max_length}, and every pair of "
                    f"{name} is longer"
                )
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
        """Gathers pairs, see `Source`."""
        del epochs
        batch: Batch = {}
        for side, name in enumerate(("source", "target")):
            field = f"{name}_ids"
            first = _CUT[field]
            width = self.element_spec[field].shape[0] - first
            lengths = self._lengths[indices, side]
            places = np.arange(width)
            within = places < lengths[:, None]
            starts = self._starts[indices, side][:, None]
            ids = np.where(within, self._tokens.ids[np.where(within, starts + places, 0)], 0)
            ids = ids.astype(np.int32)
            if first:
                assert self.vocabulary is not None
                begin = np.full((len(indices), 1), self.vocabulary.cls_id, np.int32)
                ids = np.concatenate([begin, ids], 1)
            batch[field] = ids
            batch[f"{name}_length"] = (lengths + first).astype(np.int32)
        return batch

    def trim(self, batch: Batch, bucket: int) -> Batch:
        """Cuts a batch whose examples are all in buckets up to this one to its width."""
        width = int(_widths(self._options)[bucket])
        return {
            field: values[:, : width + _CUT[field]] if field in _CUT else values
            for field, values in batch.items()
        }

    @property
    def references(self) -> list[str]:
        texts = self._tokens.references()
        return [texts[number] for number in self._chosen]

    def text(self, ids: np.ndarray) -> str:
        """Returns the text of a sentence's ids, int (n,), up to its end sign."""
        assert self.vocabulary is not None
        return to_text(ids, self.vocabulary)


def _widths(options: Options) -> np.ndarray:
    """The widths of training batches, ascending; the last one is `max_length`."""
    return -(-np.arange(1, options.widths + 1) * options.max_length // options.widths)


def check_options(options: Options) -> None:
    """Raises UserError if an option is out of range."""
    for key in ("max_length", "widths"):
        value = getattr(options, key)
        if value < 1:
            raise UserError(f"config.data.options.{key} is {value}; it must be at least 1")
    if options.widths > min(options.max_length, 64):
        raise UserError(
            f"config.data.options.widths is {options.widths}; it must be at most 64 and at most "
            f"max_length, which is {options.max_length}"
        )


def load_pairs(
    name: str,
    split: str,
    source_dir: str | None,
    data_dir: str | None,
    options: Options,
    training: bool,
) -> PairSource:
    """Loads a split of `multi30k`, `wmt16` or the embedded `grammar_de_en`.

    The first two are prepared first if necessary, below `data_dir`.

    Raises:
      UserError: files are missing or damaged, or a split or an option is wrong.
    """
    check_options(options)
    prepared = (
        _embedded(options.vocab_size)
        if name == "grammar_de_en"
        else parallel.prepare(
            name,
            Multi30k(source_dir) if name == "multi30k" else Wmt16(data_dir),
            options.vocab_size,
            data_dir,
        )
    )
    parts = slices(name, split, prepared.sizes)
    if len({part for part, *_ in parts}) > 1:
        raise UserError(f"data set {name}: split {split!r} is of several; give slices of one")
    chosen = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
    return PairSource(
        f"{name}:{split}:{prepared.digest}",
        prepared.open(parts[0][0]),
        chosen,
        prepared.vocabulary,
        options,
        training,
    )


def _embedded(vocab_size: int) -> parallel.Prepared:
    """Returns the sentences of the grammar, in memory."""
    found = {split: list(grammar.read(split)) for split in grammar.SPLITS}
    vocabulary = parallel.train_vocabulary(lambda: found["train"], vocab_size)
    digest = parallel.digest(found, vocabulary)
    return parallel.Prepared(
        vocabulary,
        digest,
        {split: len(pairs) for split, pairs in found.items()},
        lambda split: parallel.tokenize(found[split], vocabulary),
    )

"""A text as contiguous streams, one for each row of a batch, for networks that keep a state.

In training the text is cut into as many streams as a batch has rows. Window w of all streams is the
w-th batch of an epoch: row b of a batch goes on where row b of the batch before ended. The examples
are not shuffled, and a batch has one row of each stream.

An evaluation must not depend on the size of its batches. So a whole stream is one example there,
with all its windows, and the number of streams is an option of the data.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamb_tpu.data.source import ArraySource, BaseSource, Batch, FieldSpec, Source
from lamb_tpu.errors import UserError

LAYOUTS = ("tensorflow", "pytorch", "zaremba")
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class Options:
    """Options of streams.

    Attributes:
      steps: words of a window, through which a gradient goes back.
      layout: layout of the training text, see `cut` and `num_windows`.
      eval_streams: streams of an evaluation. In 1 every word but the first is predicted from all
        before it. More streams take less time, and start with a zero state each.
    """

    steps: int = 20
    layout: str = "tensorflow"
    eval_streams: int = 1


def cut(tokens: np.ndarray, count: int, layout: str) -> np.ndarray:
    """Returns a text as streams, (count, L), of L = floor(n / count) words each.

    'tensorflow' and 'pytorch': stream b is the b-th run of L words, and the last n - count * L
    words are dropped. 'zaremba', which is Zaremba's own code in Lua: stream b starts at word
    round(b n / count), so the words that are dropped lie between the streams.

    >>> cut(np.arange(11), 2, "tensorflow").tolist(), cut(np.arange(11), 2, "zaremba").tolist()
    ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]])
    """
    total, length = len(tokens), len(tokens) // count
    rows = np.arange(count)
    # The nearest whole number, halves upwards.
    starts = (2 * rows * total + count) // (2 * count) if layout == "zaremba" else rows * length
    return tokens[starts[:, None] + np.arange(length)]


def num_windows(length: int, options: Options) -> int:
    """Returns the number of training windows of a stream of `length` words.

    A window needs the word after it as its last target. 'pytorch' has a last, shorter window, whose
    other places are padding; the other layouts drop it.

    >>> [num_windows(35, Options(5, layout)) for layout in LAYOUTS]
    [6, 7, 6]
    """
    targets = max(length - 1, 0)
    return -(-targets // options.steps) if options.layout == "pytorch" else targets // options.steps


def training_spec(options: Options) -> dict[str, FieldSpec]:
    """Returns the fields of a training example, see `TrainingStreams`."""
    window = FieldSpec((options.steps,), _INT32)
    spec = {"inputs": window, "targets": window, "start": FieldSpec((), np.dtype(bool))}
    return spec | ({"length": FieldSpec((), _INT32)} if options.layout == "pytorch" else {})


def eval_spec(total: int, options: Options) -> dict[str, FieldSpec]:
    """Returns the fields of an evaluation example of a text of `total` words."""
    length = -(-max(total - 1, 0) // options.eval_streams)
    windows = FieldSpec((-(-length // options.steps), options.steps), _INT32)
    return {"inputs": windows, "targets": windows, "length": FieldSpec((), _INT32)}


def check_options(options: Options) -> None:
    """Raises a UserError if an option is out of range."""
    for key in ("steps", "eval_streams"):
        if getattr(options, key) < 1:
            raise UserError(
                f"config.data.options.{key} is {getattr(options, key)}; it must be at least 1"
            )
    if options.layout not in LAYOUTS:
        raise UserError(
            f"config.data.options.layout is {options.layout!r}; known: {', '.join(LAYOUTS)}"
        )


def count_examples(name: str, total: int, streams: int, options: Options) -> int:
    """Returns the number of training examples in a text of `total` words.

    Raises:
      UserError: the text is too short for one window of every stream.
    """
    windows = num_windows(total // streams, options)
    if not windows:
        raise UserError(
            f"config.batch_size is {streams}: of the {total:,} words of {name} each row gets "
            f"{total // streams}, which is no window of config.data.options.steps="
            f"{options.steps} words; make one of the two smaller"
        )
    return streams * windows


class TrainingStreams(BaseSource):
    """Windows of the streams of a text. Example p is window p // streams of stream p % streams.

    Fields of an example, with T = `steps`:
      inputs, targets: int32 (T,), words, and for each the word after it.
      start: bool (), True for the first window of a stream, which starts from a zero state.
      length: int32 (), with the layout 'pytorch' only: places before the padding.

    Attributes:
      streams: number of streams, which is the size of every batch.
    """

    in_memory = True

    def __init__(
        self,
        name: str,
        tokens: np.ndarray,
        vocabulary: Sequence[str],
        streams: int,
        options: Options,
    ) -> None:
        """Cuts the text.

        Args:
          name: set and split.
          tokens: the text, int32 (n,).
          vocabulary: the words by their numbers.
          streams: the number of streams.
          options: see `Options`.

        Raises:
          UserError: an option is out of range, or the text is too short.
        """
        check_options(options)
        self.name = f"{name}:{_digest(tokens, vocabulary)}"
        self.num_classes = len(vocabulary)
        self.streams = streams
        self.element_spec = training_spec(options)
        self._length = count_examples(name, len(tokens), streams, options)
        self._options = options
        self._rows = cut(tokens, streams, options.layout)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        # The same examples in every epoch.
        del epochs
        windows, rows = np.divmod(np.asarray(indices, np.int64), len(self._rows))
        steps, last = self._options.steps, self._rows.shape[1] - 1
        first = windows * steps
        # Padding repeats the last word.
        places = np.minimum(first[:, None] + np.arange(steps + 1), last)
        words = self._rows[rows[:, None], places]
        batch = {"inputs": words[:, :-1], "targets": words[:, 1:], "start": windows == 0}
        if "length" in self.element_spec:
            batch["length"] = np.minimum(last - first, steps).astype(np.int32)
        return batch


class EvalStreams(ArraySource):
    """Streams of a text, each of them one example, so that no result depends on a batch.

    Each word but the first of the text is a target once; the streams have ceil((n - 1) / streams)
    of them, and the last one the rest.

    Fields of an example of W windows of T = `steps` words:
      inputs, targets: int32 (W, T), words, and for each the word after it.
      length: int32 (), places before the padding, of W * T.
    """

    def __init__(
        self, name: str, tokens: np.ndarray, vocabulary: Sequence[str], options: Options
    ) -> None:
        """Cuts the text; see `TrainingStreams`."""
        check_options(options)
        total, count = len(tokens) - 1, options.eval_streams
        if total < count:
            raise UserError(
                f"config.data.options.eval_streams is {count}; {name} has {len(tokens):,} words, "
                "and each stream needs one to predict"
            )
        shape = eval_spec(len(tokens), options)["inputs"].shape
        length = -(-total // count)
        starts = np.arange(count) * length
        places = np.minimum(starts[:, None] + np.arange(shape[0] * shape[1]), total - 1)
        places = places.reshape(count, *shape)
        arrays = {
            "inputs": tokens[places],
            "targets": tokens[places + 1],
            # With many streams of a short text nothing may be left for the last ones.
            "length": np.clip(total - starts, 0, length).astype(np.int32),
        }
        super().__init__(f"{name}:{_digest(tokens, vocabulary)}", arrays, len(vocabulary))


def make(
    name: str,
    tokens: np.ndarray,
    vocabulary: Sequence[str],
    options: Options,
    batch_size: int,
    training: bool,
) -> Source:
    """Returns a text as `TrainingStreams` of `batch_size` rows, or as `EvalStreams`."""
    if training:
        return TrainingStreams(name, tokens, vocabulary, batch_size, options)
    return EvalStreams(name, tokens, vocabulary, options)


def _digest(tokens: np.ndarray, vocabulary: Sequence[str]) -> str:
    """Returns a hash of the content: a resumed run must find the same text and numbers."""
    content = hashlib.sha256(tokens.tobytes())
    content.update("\n".join(vocabulary).encode())
    return content.hexdigest()[:12]

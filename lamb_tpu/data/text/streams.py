"""A text as contiguous streams, one for each row of a batch, for recurrent networks.

In training the text is cut into as many streams as a batch has rows. The w-th batch of an epoch has
window w of all streams, so that each row continues the same row of the previous batch. Examples are
not shuffled, and a batch has one row for each stream.

An evaluation must not depend on the batch size. Therefore an example of an evaluation is a full
stream with all its windows, and the number of streams is an option of the data set.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lamb_tpu.data import checking
from lamb_tpu.data.source import ArraySource, BaseSource, Batch, FieldSpec, Source
from lamb_tpu.errors import UserError, unknown

LAYOUTS = ("tensorflow", "pytorch", "zaremba")
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class StreamOptions:
    """Options of streams.

    Attributes:
      steps: number of words in a window, which is the length of backpropagation through time.
      layout: layout of the training text, see `cut` and `num_windows`.
      eval_streams: number of streams in an evaluation. With 1, every word but the first is
        predicted from all words before it. More streams are faster, but each stream starts from a
        zero state.
    """

    steps: int = 20
    layout: str = "tensorflow"
    eval_streams: int = 1


def cut(tokens: np.ndarray, count: int, layout: str) -> np.ndarray:
    """Cuts a text of n words into `count` streams of L = floor(n / count) words; returns (count, L).

    'tensorflow' and 'pytorch': stream b is the b-th run of L words, and the last n - count * L
    words are dropped. 'zaremba', as in Zaremba's code in Lua: stream b starts at word
    round(b n / count), so the dropped words are between the streams.

    >>> cut(np.arange(11), 2, "tensorflow").tolist(), cut(np.arange(11), 2, "zaremba").tolist()
    ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]])
    """
    total, length = len(tokens), len(tokens) // count
    rows = np.arange(count)
    # Rounds to the nearest integer, and halves up.
    starts = (2 * rows * total + count) // (2 * count) if layout == "zaremba" else rows * length
    return tokens[starts[:, None] + np.arange(length)]


def num_windows(length: int, options: StreamOptions) -> int:
    """Returns the number of training windows of a stream of `length` words.

    The last target of a window is the word after the window. If the last window is shorter, 'pytorch'
    fills it with padding; the other layouts drop it.

    >>> [num_windows(35, StreamOptions(5, layout)) for layout in LAYOUTS]
    [6, 7, 6]
    """
    targets = max(length - 1, 0)
    return -(-targets // options.steps) if options.layout == "pytorch" else targets // options.steps


def training_spec(options: StreamOptions) -> dict[str, FieldSpec]:
    """Returns the fields of a training example, see `TrainingStreams`."""
    window = FieldSpec((options.steps,), _INT32)
    spec = {"inputs": window, "targets": window, "start": FieldSpec((), np.dtype(bool))}
    return spec | ({"length": FieldSpec((), _INT32)} if options.layout == "pytorch" else {})


def eval_spec(total: int, options: StreamOptions) -> dict[str, FieldSpec]:
    """Returns the fields of an evaluation example, see `EvalStreams`, for `total` words."""
    length = -(-max(total - 1, 0) // options.eval_streams)
    windows = FieldSpec((-(-length // options.steps), options.steps), _INT32)
    return {"inputs": windows, "targets": windows, "length": FieldSpec((), _INT32)}


def check_options(options: StreamOptions) -> None:
    """Raises a UserError if an option is out of range."""
    checking.check_options(options, steps=(1, math.inf), eval_streams=(1, math.inf))
    if options.layout not in LAYOUTS:
        raise unknown("config.data.options.layout", options.layout, LAYOUTS)


def count_examples(name: str, total: int, streams: int, options: StreamOptions) -> int:
    """Returns the number of training examples; raises a UserError if the text is too short."""
    windows = num_windows(total // streams, options)
    if not windows:
        problem = f"leaves only {total // streams} of the {total:,} words of {name} for each row"
        remedy = f"use a smaller batch size, or config.data.options.steps below {options.steps}"
        raise UserError("config.batch_size", streams, problem, remedy)
    return streams * windows


class TrainingStreams(BaseSource):
    """Windows of the streams of a text. Example p is window p // streams of stream p % streams.

    Fields of an example, with T = `steps`:
      inputs, targets: int32 (T,): words, and the word after each of them.
      start: bool (), True for the first window of a stream, which starts from a zero state.
      length: int32 (), only with the layout 'pytorch': number of words before the padding.
    """

    in_memory = True

    def __init__(
        self,
        name: str,
        tokens: np.ndarray,
        vocabulary: Sequence[str],
        streams: int,
        options: StreamOptions,
    ) -> None:
        """Cuts the text `tokens`, int32 (n,); raises a UserError if it is too short."""
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
        del epochs
        windows, rows = np.divmod(np.asarray(indices, np.int64), len(self._rows))
        steps, last = self._options.steps, self._rows.shape[1] - 1
        first = windows * steps
        # Padding repeats the last word.
        positions = np.minimum(first[:, None] + np.arange(steps + 1), last)
        words = self._rows[rows[:, None], positions]
        batch = {"inputs": words[:, :-1], "targets": words[:, 1:], "start": windows == 0}
        if "length" in self.element_spec:
            batch["length"] = np.minimum(last - first, steps).astype(np.int32)
        return batch


class EvalStreams(ArraySource):
    """Streams of a text as examples.

    Each word of the text but the first is a target exactly once. If the text has n words, a stream
    has ceil((n - 1) / streams) targets; the last stream has the remaining targets.

    Fields of an example of W windows of T = `steps` words:
      inputs, targets: int32 (W, T): words, and the word after each of them.
      length: int32 (), number of words before the padding, at most W * T.
    """

    def __init__(
        self, name: str, tokens: np.ndarray, vocabulary: Sequence[str], options: StreamOptions
    ) -> None:
        """Cuts the text `tokens`, int32 (n,); raises a UserError for more streams than targets."""
        check_options(options)
        total, count = len(tokens) - 1, options.eval_streams
        if total < count:
            problem = f"is more than the {total:,} words to predict in {name}"
            remedy = f"use at most {total}"
            raise UserError("config.data.options.eval_streams", count, problem, remedy)
        shape = eval_spec(len(tokens), options)["inputs"].shape
        length = -(-total // count)
        starts = np.arange(count) * length
        positions = np.minimum(starts[:, None] + np.arange(shape[0] * shape[1]), total - 1)
        positions = positions.reshape(count, *shape)
        arrays = {
            "inputs": tokens[positions],
            "targets": tokens[positions + 1],
            # If the text is short, the last streams are empty.
            "length": np.clip(total - starts, 0, length).astype(np.int32),
        }
        super().__init__(f"{name}:{_digest(tokens, vocabulary)}", arrays, len(vocabulary))


def make(
    name: str,
    tokens: np.ndarray,
    vocabulary: Sequence[str],
    options: StreamOptions,
    batch_size: int,
    training: bool,
) -> Source:
    """Returns a text as `TrainingStreams` of `batch_size` rows, or as `EvalStreams`."""
    if training:
        return TrainingStreams(
            name=name, tokens=tokens, vocabulary=vocabulary, streams=batch_size, options=options
        )
    return EvalStreams(name, tokens, vocabulary, options)


def _digest(tokens: np.ndarray, vocabulary: Sequence[str]) -> str:
    """Returns a hash, by which a resumed run checks that the content is the same."""
    content = hashlib.sha256(tokens.tobytes())
    content.update("\n".join(vocabulary).encode())
    return content.hexdigest()[:12]

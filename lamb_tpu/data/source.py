"""Sources of examples: sets that are read by index, a batch at a time."""

import abc
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lamb_tpu.data.images.tally import Tally
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError, unreadable

Batch = dict[str, np.ndarray]
_READ_CHUNK = 1024  # records fetched together when a full set is read into memory


class FieldSpec(NamedTuple):
    """Shape (without the batch axis) and dtype of one field of an example."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(Protocol):
    """Examples 0 to `len(source) - 1`, each a dict of arrays of fixed shape.

    Attributes:
      name: set and split, such as `mnist:train`; saved with the loader's position.
      num_classes: number of values of `label` or, for streams, number of words in the vocabulary;
        None for other sets.
      element_spec: field name -> shape and dtype of one example.
      in_memory: whether `gather` only copies from memory, so that reading ahead would not help.
      vocabulary: vocabulary of a text set; None for other sets.
      cased: whether the tokens keep case and accents; False for other sets.
      notes: sentences for the terminal, for example about examples that are left out.
      buckets: int (examples,): length class of each example, from 0. A loader makes batches of
        examples with similar lengths. None if all examples have one shape.
      tally: counts of unusual and damaged photographs read so far; None for other sets.
      streams: the batch size, for a set that is read in order so that each row of a batch continues
        the same row of the previous batch; None for other sets, which are shuffled.
    """

    name: str
    element_spec: dict[str, FieldSpec]
    num_classes: int | None = None
    in_memory: bool = False
    vocabulary: Vocabulary | None = None
    cased: bool = False
    notes: tuple[str, ...] = ()
    tally: Tally | None = None
    streams: int | None = None
    buckets: np.ndarray | None = None

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Returns the examples at `indices` (int, (n,)), each field stacked to (n, *shape).

        Random examples also depend on `epochs`: one number per example, (n,), or one for all.
        Evaluation omits `epochs` and gets the same examples every time. An evaluation set may add
        `mask`, float32 (n,), with 0 for examples that must not count.
        """

    def trim(self, batch: Batch, bucket: int) -> Batch:
        """Trims padding from a batch; `bucket` is the largest bucket among the batch's examples."""
        del bucket
        return batch


class BaseSource(Source):
    """Base class of sources. A subclass must define `name`, `element_spec`, `__len__` and `gather`."""


def title(source: Source) -> str:
    """Returns the source's name for messages, without a trailing digest."""
    return re.sub(":[0-9a-f]{12}$", "", source.name)


def num_bytes(source: Source) -> int:
    """Returns the size in bytes of all examples of a source, as `gather` returns them."""
    return len(source) * sum(spec.num_bytes for spec in source.element_spec.values())


def zeros(source: Source, rows: int) -> Batch:
    """Returns a batch of zeros with the shapes and dtypes of a source."""
    return {
        field: np.zeros((rows, *spec.shape), spec.dtype)
        for field, spec in source.element_spec.items()
    }


def tokens_of(spec: Mapping[str, FieldSpec]) -> int:
    """Returns the number of tokens in a training example, including padding; 0 for data without text.

    The tokens are the field `input_ids`, or a one-dimensional integer field `inputs`.
    """
    for name in ("input_ids", "inputs"):
        if name in spec and len(spec[name].shape) == 1 and spec[name].dtype.kind in "iu":
            return spec[name].shape[0]
    return 0


class ArraySource(BaseSource):
    """A set in memory, with one array (examples, *shape) for each field.

    `name` and `num_classes` are those of `Source`. Raises a ValueError if the arrays differ in length.
    """

    in_memory = True

    def __init__(self, name: str, arrays: Mapping[str, np.ndarray], num_classes: int | None):
        lengths = {field: len(array) for field, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the arrays of {name} differ in length: {lengths}; use equal lengths")
        self.name = name
        self.num_classes = num_classes
        self.arrays = dict(arrays)
        self.element_spec = {
            field: FieldSpec(array.shape[1:], array.dtype) for field, array in arrays.items()
        }
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        del epochs
        return {field: array[indices] for field, array in self.arrays.items()}


class RecordSource(BaseSource):
    """A set that is too large for memory, read from its records by index.

    Text fields are left out, because devices cannot hold them. Class labels become int32.

    Args:
      name, num_classes: see `Source`.
      records: an object with `__len__` and `__getitems__`, such as a TFDS data source.
      label_fields: the fields that hold class labels.
      folder: folder of the record files, for error messages.

    Raises:
      UserError: no field is a number or an array of numbers, or a record cannot be read.
    """

    def __init__(
        self,
        name: str,
        records: Any,
        num_classes: int | None,
        label_fields: Sequence[str] = ("label",),
        folder: str = "its folder",
    ):
        self.name = name
        self.num_classes = num_classes
        self._records = records
        self._label_fields = frozenset(label_fields)
        self._folder = folder
        # `gather` checks that all examples have the shapes of the first example.
        (first,) = self._read([0])
        arrays = {field: self._as_array(field, value) for field, value in first.items()}
        specs = {field: FieldSpec(array.shape, array.dtype) for field, array in arrays.items()}
        # Booleans, integers and floating-point numbers, but not text.
        self.element_spec = {key: spec for key, spec in specs.items() if spec.dtype.kind in "biuf"}
        if not self.element_spec:
            problem = "has no field that is a number or an array of numbers"
            raise UserError(f"data set {name}", ..., problem, "use another set")

    def __len__(self) -> int:
        return len(self._records)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers examples, see `Source`; raises a UserError if their records cannot be read."""
        del epochs
        records = self._read([int(index) for index in indices])
        batch = {}
        for field, spec in self.element_spec.items():
            values = [self._as_array(field, record[field]) for record in records]
            for index, value in zip(indices, values):
                if value.shape != spec.shape:
                    key = f"field {field!r} of example {index} of data set {self.name}"
                    problem = f"has shape {value.shape}, but example 0 has {spec.shape}"
                    remedy = "use a set in which all examples have the same shapes"
                    raise UserError(key, ..., problem, remedy)
            # `np.stack` rejects an empty list.
            empty = np.empty((0, *spec.shape), spec.dtype)
            batch[field] = np.stack(values).astype(spec.dtype, copy=False) if values else empty
        return batch

    def read_all(self) -> ArraySource:
        """Reads the full set, in chunks, into an `ArraySource` of the same name."""
        arrays = zeros(self, len(self))
        # Fills the arrays chunk by chunk: concatenating a list would need twice the memory.
        for start in range(0, len(self), _READ_CHUNK):
            stop = min(start + _READ_CHUNK, len(self))
            for field, values in self.gather(np.arange(start, stop)).items():
                arrays[field][start:stop] = values
        return ArraySource(self.name, arrays, self.num_classes)

    def _read(self, indices: list[int]) -> Sequence[Mapping[str, Any]]:
        try:
            return self._records.__getitems__(indices)
        except (RuntimeError, OSError) as error:  # raised by ArrayRecord and by decoders
            remedy = f"delete {self._folder} and prepare the set again"
            problem = "is damaged or incomplete"
            raise unreadable(f"a record of data set {self.name}", error, remedy, problem) from error

    def _as_array(self, field: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        return array.astype(np.int32) if field in self._label_fields else array

"""Sources of examples: sets of records that are read by index, a batch at a time."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lamb_tpu.data.images.tally import Tally
from lamb_tpu.data.text.vocabulary import Vocabulary
from lamb_tpu.errors import UserError

Batch = dict[str, np.ndarray]
_READ_CHUNK = 1024  # records fetched together when a whole set is read into memory


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
      num_classes: number of values of `label`, or of the words of streams; None for other sets.
      element_spec: field name -> shape and dtype of one example.
      in_memory: whether `gather` is only a copy, with no work to overlap with the step.
      vocabulary: vocabulary of a set of text; None for other sets.
      cased: whether the tokens keep case and accents; False for other sets.
      notes: sentences for the terminal, such as about examples that are left out.
      buckets: int (examples,): class of length of each example, from 0, by which a loader makes
        batches of like lengths; None if all examples have one shape.
      tally: counts of odd and damaged photographs read so far; None for other sets.
      streams: size of every batch, for a set whose rows go on from batch to batch and which is
        read in order; None for other sets, which are shuffled.
    """

    @property
    def name(self) -> str: ...

    @property
    def num_classes(self) -> int | None: ...

    @property
    def element_spec(self) -> dict[str, FieldSpec]: ...

    @property
    def in_memory(self) -> bool: ...

    @property
    def vocabulary(self) -> Vocabulary | None: ...

    @property
    def cased(self) -> bool: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def tally(self) -> Tally | None: ...

    @property
    def streams(self) -> int | None: ...

    @property
    def buckets(self) -> np.ndarray | None: ...

    def __len__(self) -> int: ...

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Returns the examples at `indices` (int, (n,)), each field stacked to (n, *shape).

        A set with random examples draws them for `epochs`, (n,) or one number for all; evaluation
        leaves it out and gets the same examples every time. A set for evaluation may add `mask`,
        float32 (n,), with 0 for examples that must not count.
        """
        ...

    def trim(self, batch: Batch, bucket: int) -> Batch:
        """Cuts padding off a batch whose examples are all in buckets up to `bucket`."""
        ...


def title(source: Source) -> str:
    """Returns the name for messages, without the digest at the end of some names."""
    return re.sub(":[0-9a-f]{12}$", "", source.name)


def zeros(source: Source, rows: int) -> Batch:
    """Returns a batch of zeros with the shapes and dtypes of a source."""
    return {
        field: np.zeros((rows, *spec.shape), spec.dtype)
        for field, spec in source.element_spec.items()
    }


def tokens_of(spec: Mapping[str, FieldSpec]) -> int:
    """Returns the number of tokens in a training example of text, with padding; 0 for other data.

    The tokens are the field `input_ids`, or whole numbers in a row in the field `inputs`.
    """
    for name in ("input_ids", "inputs"):
        if name in spec and len(spec[name].shape) == 1 and spec[name].dtype.kind in "iu":
            return spec[name].shape[0]
    return 0


class BaseSource:
    """Defaults of the attributes that a set may leave out: all but `name` and `element_spec`."""

    num_classes: int | None = None
    in_memory = False
    vocabulary: Vocabulary | None = None
    cased = False
    notes: tuple[str, ...] = ()
    tally: Tally | None = None
    streams: int | None = None
    buckets: np.ndarray | None = None

    def trim(self, batch: Batch, bucket: int) -> Batch:
        del bucket
        return batch


class ArraySource(BaseSource):
    """A set in memory, with one array for each field, gathered by fancy indexing."""

    in_memory = True

    def __init__(self, name: str, arrays: Mapping[str, np.ndarray], num_classes: int | None):
        lengths = {field: len(array) for field, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"the arrays of {name} must have one length, found {lengths}")
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
        # The same examples in every epoch.
        del epochs
        return {field: array[indices] for field, array in self.arrays.items()}


class RecordSource(BaseSource):
    """A set that is read from its records by index, for sets too large for memory.

    Text fields are left out, because a batch goes to devices. Class labels become int32.

    Args:
      name: see `Source`.
      records: random access with `__len__` and `__getitems__`, such as a TFDS data source.
      num_classes: see `Source`.
      label_fields: the fields that hold class labels.
      folder: folder of the record files, for error messages.

    Raises:
      UserError: the first record cannot be read, or has no field of numbers.
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
        # The first example's shapes and dtypes stand for the whole set; `gather` checks the others.
        (first,) = self._read([0])
        arrays = {field: self._as_array(field, value) for field, value in first.items()}
        self.element_spec = {
            field: FieldSpec(array.shape, array.dtype)
            for field, array in arrays.items()
            # Booleans, integers and floating-point numbers; not text.
            if array.dtype.kind in "biuf"
        }
        if not self.element_spec:
            raise UserError(f"data set {name}: no field is a number or an array of numbers")

    def __len__(self) -> int:
        return len(self._records)

    def gather(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> Batch:
        """Gathers examples, see `Source`.

        Raises:
          UserError: records cannot be read or differ in shape.
        """
        del epochs
        records = self._read([int(index) for index in indices])
        batch = {}
        for field, spec in self.element_spec.items():
            values = [self._as_array(field, record[field]) for record in records]
            for index, value in zip(indices, values):
                if value.shape != spec.shape:
                    raise UserError(
                        f"data set {self.name}: field {field!r} of example {index} has shape "
                        f"{value.shape}, example 0 has {spec.shape}; only fields of one shape "
                        "can be batched"
                    )
            # `np.stack` refuses an empty list.
            empty = np.empty((0, *spec.shape), spec.dtype)
            batch[field] = np.stack(values).astype(spec.dtype, copy=False) if values else empty
        return batch

    def read_all(self) -> ArraySource:
        """Reads the whole set, in bulk, into an `ArraySource` of the same name."""
        arrays = {
            field: np.empty((len(self), *spec.shape), spec.dtype)
            for field, spec in self.element_spec.items()
        }
        # Filled part by part: a list of parts would need the memory twice.
        for start in range(0, len(self), _READ_CHUNK):
            stop = min(start + _READ_CHUNK, len(self))
            for field, values in self.gather(np.arange(start, stop)).items():
                arrays[field][start:stop] = values
        return ArraySource(self.name, arrays, self.num_classes)

    def _read(self, indices: list[int]) -> Sequence[Mapping[str, Any]]:
        try:
            return self._records.__getitems__(indices)
        except (RuntimeError, OSError) as error:  # ArrayRecord's own, and those of a decoder
            raise UserError(
                f"data set {self.name}: a record cannot be read, so the files are damaged or "
                f"incomplete; delete {self._folder} and prepare the set again "
                f"({' '.join(str(error).split())})"
            ) from error

    def _as_array(self, field: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        return array.astype(np.int32) if field in self._label_fields else array

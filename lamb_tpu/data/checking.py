"""Checks of batches on the host: values in range, finite numbers, declared shapes and dtypes.

A field is checked by its minimum and maximum, which takes microseconds. A batch whose extremes are
in range is correct; only for another one the example is searched.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

import numpy as np

from lamb_tpu import own
from lamb_tpu.data.source import Batch, FieldSpec, Source, title
from lamb_tpu.errors import UserError

MASK = "mask"  # a field of evaluation batches: examples where it is 0 do not count
# Arrays reach the devices as float32.
LARGEST = float(np.finfo(np.float32).max)


class Range(NamedTuple):
    """Valid values of a field.

    Attributes:
      low, high: the least and the greatest value; both are valid.
      meaning: what the values are, for messages, such as "the classes of the model".
      whole: whether only whole numbers are valid, for masks of floating-point numbers.
      counted: returns, from a batch, where values count, in a shape that broadcasts to the field's;
        None: everywhere. Values elsewhere, such as labels of padding, may be anything.
    """

    low: float
    high: float
    meaning: str
    whole: bool = False
    counted: Callable[[Batch], np.ndarray] | None = None


Ranges = Mapping[str, Range]
ZERO_OR_ONE = Range(0, 1, "0 where something does not count and 1 where it does", whole=True)
_FINITE = Range(-LARGEST, LARGEST, "finite as float32")


class Check:
    """Check of the batches of a data set.

    Args:
      source: the data set.
      split: name of its split, for messages.
      ranges: valid values of some fields, see `Task.field_ranges`. Other fields of floating-point
        numbers must be finite.
      finite: False for a run that may skip updates with a gradient that is not finite: NaN and
        infinity then pass.
    """

    def __init__(self, source: Source, split: str, ranges: Ranges, finite: bool = True) -> None:
        self._finite = finite
        self._source, self._spec = source, dict(source.element_spec)
        self._title = f"{title(source)} (split {split!r})"
        self._ranges = {MASK: ZERO_OR_ONE, **ranges}

    def read(self, indices: np.ndarray, epochs: np.ndarray | int | None = None) -> Batch:
        """Gathers examples from the source and checks them.

        Args:
          indices: int (n,); see `Source.gather`.
          epochs: see `Source.gather`; None leaves them out, as an evaluation does.

        Raises:
          UserError: a value is out of range, a shape or dtype is not as declared, or the code of a
            custom data set fails.
        """
        batch = gather(self._source, indices, epochs)
        if not isinstance(batch, Mapping):
            raise UserError(
                f"gather of {self._title} returns {type(batch).__name__}; it must return a dict "
                "of arrays"
            )
        arrays = {field: np.asarray(values) for field, values in batch.items()}
        self(arrays, indices)
        return arrays

    def __call__(self, batch: Batch, indices: np.ndarray) -> None:
        """Checks a batch of the examples `indices`, int (n,).

        Raises:
          UserError: see `read`.
        """
        rows = len(indices)
        if batch.keys() != self._spec.keys() or any(
            batch[field].shape != (rows, *spec.shape) or batch[field].dtype != spec.dtype
            for field, spec in self._spec.items()
        ):
            self._check_specs(batch, indices)
        self._check_values(batch, indices, self._finite)

    def _check_values(self, batch: Batch, indices: np.ndarray, finite: bool) -> None:
        for field, values in batch.items():
            bound = self._ranges.get(field)
            if values.dtype.kind == "f" and not finite and field != MASK:
                continue
            if bound is None and values.dtype.kind == "f":
                bound = _FINITE
            if bound is not None and values.dtype.kind in "iuf" and values.size:
                # A comparison with NaN, which both return if there is any, is False.
                low = np.minimum.reduce(values, axis=None)
                high = np.maximum.reduce(values, axis=None)
                if not (bound.low <= low and high <= bound.high) or (
                    bound.whole and values.dtype.kind == "f"
                ):
                    self._search(field, bound, batch, indices)

    def examine(self, batch: Batch, indices: np.ndarray) -> None:
        """Checks a batch after whose update a number is not finite, more strictly than a new one.

        It also rejects values whose square overflows float32, and, where the task declares no
        range, values outside the classes or the vocabulary of the data set.

        Raises:
          UserError: a value may have caused it.
        """
        self._check_values(batch, indices, finite=True)
        vocabulary, classes = self._source.vocabulary, self._source.num_classes
        doubts: dict[str, Range] = {}
        if classes is not None:
            doubts["label"] = Range(0, classes - 1, "the classes of the data set")
        if vocabulary is not None:
            doubts["input_ids"] = Range(0, len(vocabulary) - 1, "the words of the vocabulary")
        root = math.sqrt(LARGEST)
        for field, values in batch.items():
            if values.dtype.kind == "f":
                doubts[field] = Range(-root, root, "numbers whose square is finite in float32")
        for field, bound in doubts.items():
            if field in batch and (field not in self._ranges or batch[field].dtype.kind == "f"):
                self._search(field, bound, batch, indices)

    def _check_specs(self, batch: Batch, indices: np.ndarray) -> None:
        # A set for evaluation may add `mask`, which `element_spec` does not list.
        extra = {MASK: FieldSpec((), np.dtype(np.float32))} if MASK in batch else {}
        declared = {**extra, **self._spec}
        for field in sorted({*batch, *declared}):
            values, spec = batch.get(field), declared.get(field)
            shape = None if spec is None else (len(indices), *spec.shape)
            # The mask is converted to float32, whatever its dtype.
            if (
                values is None
                or spec is None
                or values.shape != shape
                or (values.dtype != spec.dtype and field != MASK)
            ):
                raise UserError(
                    f"field {field!r} of {self._title} is {_text(values)} in the batch of examples "
                    f"{_listed(indices)}, and element_spec declares {_text(spec, len(indices))}; "
                    "gather must return what element_spec declares"
                )

    def _search(self, field: str, bound: Range, batch: Batch, indices: np.ndarray) -> None:
        """Raises for the first value out of range that counts, if there is one."""
        values = batch[field]
        wrong = ~((values >= bound.low) & (values <= bound.high))
        if bound.whole:
            wrong |= values != np.floor(values)
        if bound.counted is not None:
            wrong &= bound.counted(batch)
        if MASK in batch and field != MASK:
            rows = np.asarray(batch[MASK]) > 0
            wrong &= rows.reshape(-1, *(1 for _ in values.shape[1:]))
        if wrong.any():
            self._reject(field, bound, values, np.argwhere(wrong)[0], indices)

    def _reject(
        self, field: str, bound: Range, values: np.ndarray, place: np.ndarray, indices: np.ndarray
    ) -> NoReturn:
        row, *within = (int(index) for index in place)
        where = f"[{', '.join(map(str, within))}]" if within else ""
        allowed = f"{bound.low:.6g} to {bound.high:.6g}, {bound.meaning}"
        if bound is _FINITE:
            allowed = bound.meaning
        elif bound.high >= LARGEST:
            finite = " and finite" if values.dtype.kind == "f" else ""
            allowed = f"at least {bound.low:.6g}{finite}, {bound.meaning}"
        raise UserError(
            f"{field}{where} of example {int(indices[row])} of {self._title} is "
            f"{values[tuple(place)].item():.6g}; it must be {allowed}; correct the data set"
        )


def gather(source: Source, indices: np.ndarray, epochs: np.ndarray | int | None = None) -> Batch:
    """Returns examples of a source; an error in the code of a custom one is a UserError.

    Threads that read ahead call it. An exit that ended such a thread would leave the run waiting.
    """
    with own.calling(title(source), failures=True):
        return source.gather(indices) if epochs is None else source.gather(indices, epochs)


def _text(found: np.ndarray | FieldSpec | None, rows: int | None = None) -> str:
    if found is None:
        return "missing" if rows is None else "no such field"
    shape = found.shape if rows is None else (rows, *found.shape)
    return f"{found.dtype}{list(shape)}"


def _listed(indices: np.ndarray) -> str:
    shown = ", ".join(str(int(index)) for index in indices[:3])
    return shown + ", ..." * (len(indices) > 3)

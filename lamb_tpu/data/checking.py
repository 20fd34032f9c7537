"""Checks of batches on the host: values in range, finite numbers, declared shapes and dtypes.

A field is checked by its minimum and maximum, which takes microseconds. If either is out of range,
the values are searched for the example to report.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from lamb_tpu import custom
from lamb_tpu.data.source import Batch, FieldSpec, Source, title
from lamb_tpu.errors import UserError, out_of_range

MASK = "mask"  # a field of evaluation batches; examples with mask 0 do not count
# The largest finite float32: devices hold floating-point arrays as float32.
LARGEST = float(np.finfo(np.float32).max)


class Range(NamedTuple):
    """Valid values of a field.

    Attributes:
      low, high: the least and the greatest valid value.
      meaning: what the values are, for messages, such as "the classes of the model".
      integer: whether floating-point values must be integers, as in masks.
      counted: function of a batch that selects the elements of the field to check. It returns bool,
        in a shape that broadcasts to the field's shape. Other elements, such as the labels of
        padding, are not checked. If `counted` is None, all elements are checked.
    """

    low: float
    high: float
    meaning: str
    integer: bool = False
    counted: Callable[[Batch], np.ndarray] | None = None


Ranges = Mapping[str, Range]
ZERO_OR_ONE = Range(0, 1, "0 for padding and 1 elsewhere", integer=True)
_FINITE = Range(-LARGEST, LARGEST, "finite as float32")


class Check:
    """Checks the batches of a data set.

    Args:
      source: the data set.
      split: name of the split, for messages.
      ranges: valid values of some fields, see `tasks.field_ranges`. Other floating-point fields must
        be finite.
      finite: whether to reject NaN and infinity; False for a run that may skip updates with a
        gradient that is not finite.
    """

    def __init__(self, source: Source, split: str, ranges: Ranges, finite: bool = True) -> None:
        self._finite = finite
        self._source, self._spec = source, dict(source.element_spec)
        self._title = f"{title(source)} (split {split!r})"
        self._ranges = {MASK: ZERO_OR_ONE, **ranges}

    def read(self, indices: np.ndarray, epochs: np.ndarray | int | None = None) -> Batch:
        """Gathers examples (see `gather`) and checks them.

        Raises:
          UserError: a value is out of range, a shape or dtype is not as declared, or the code of a
            custom data set raises an error.
        """
        batch = gather(self._source, indices, epochs)
        if not isinstance(batch, Mapping):
            problem = f"returns {type(batch).__name__}"
            raise UserError(f"gather of {self._title}", ..., problem, "return a dict of arrays")
        try:
            arrays = {field: np.asarray(values) for field, values in batch.items()}
        except ValueError as error:  # ragged nested lists
            problem = f"returns ragged values for the examples {_listed(indices)} ({error})"
            remedy = "return a dict of arrays"
            raise UserError(f"gather of {self._title}", ..., problem, remedy) from None
        self(arrays, indices)
        return arrays

    def __call__(self, batch: Batch, indices: np.ndarray) -> None:
        """Checks a batch of the examples `indices`, int (n,); raises a UserError as `read` does."""
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
                # If any value is NaN, both results are NaN, and comparisons with NaN are False.
                low = np.minimum.reduce(values, axis=None)
                high = np.maximum.reduce(values, axis=None)
                if not (bound.low <= low and high <= bound.high) or (
                    bound.integer and values.dtype.kind == "f"
                ):
                    self._search(field, bound, batch, indices)

    def examine(self, batch: Batch, indices: np.ndarray) -> None:
        """Raises a UserError if a batch may have caused the NaN or infinity after its update.

        This check is stricter than `__call__`: it also rejects values whose square overflows float32 and, if
        the task declares no range, values outside the data set's classes or vocabulary.
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
        # An evaluation set may add `mask`, which `element_spec` does not list.
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
                problem = f"is {_text(values)} for the examples {_listed(indices)}"
                remedy = f"return {_text(spec, len(indices))}, as element_spec declares"
                raise UserError(f"field {field!r} of {self._title}", ..., problem, remedy)

    def _search(self, field: str, bound: Range, batch: Batch, indices: np.ndarray) -> None:
        """Raises a UserError for the first checked value that is out of range, if there is one."""
        values = batch[field]
        wrong = ~((values >= bound.low) & (values <= bound.high))
        if bound.integer:
            wrong |= values != np.floor(values)
        if bound.counted is not None:
            wrong &= bound.counted(batch)
        if MASK in batch and field != MASK:
            rows = np.asarray(batch[MASK]) > 0
            wrong &= rows.reshape(-1, *(1 for _ in values.shape[1:]))
        if wrong.any():
            position = np.argwhere(wrong)[0].tolist()
            row, *within = position
            where = f"[{', '.join(map(str, within))}]" if within else ""
            raise self._error(
                f"{field}{where} of example {int(indices[row])}", values[tuple(position)], bound
            )

    def _error(self, key: str, number: np.generic, bound: Range) -> UserError:
        value = number.item()
        numbers = "an integer from " if bound.integer else "in the range "
        allowed = f"{numbers}{bound.low:.6g} to {bound.high:.6g}, {bound.meaning}"
        if bound is _FINITE:
            allowed = bound.meaning
        elif bound.high >= LARGEST:
            finite = " and finite" if number.dtype.kind == "f" else ""
            allowed = f"at least {bound.low:.6g}{finite}, {bound.meaning}"
        shown = value if isinstance(value, int) else float(f"{value:.6g}")
        key = f"{key} of {self._title}"
        return UserError(key, shown, f"is not {allowed}", "correct the data set")


def check_options(options: Any, **bounds: tuple[float, float]) -> None:
    """Raises a UserError if an option of a data set is below its lower or above its upper bound."""
    for name, (least, most) in bounds.items():
        value = getattr(options, name)
        if not least <= value <= most:
            valid = f"at least {least}" if most == math.inf else f"{least} to {most}"
            raise out_of_range(f"config.data.options.{name}", value, valid)


def check_same_form(trained: Source, evaluated: Source) -> None:
    """Raises a UserError if a field has a different rank or number type in two custom sets.

    Sizes may differ, because some networks are evaluated on larger images; see `split_difference`.
    """
    if _is_stream(trained, evaluated):
        return
    for field in sorted(trained.element_spec.keys() & evaluated.element_spec.keys()):
        first, second = trained.element_spec[field], evaluated.element_spec[field]
        if len(first.shape) != len(second.shape) or _type(first) != _type(second):
            raise _differing(field, trained, evaluated)


def split_difference(trained: Source, evaluated: Source) -> UserError | None:
    """Returns an error if the evaluation set lacks a field or a field's shape differs; otherwise None.

    For custom sets only. Does not compare dtypes: `check_same_form` compares the number types.
    """
    if _is_stream(trained, evaluated):
        return None
    first, second = trained.element_spec, evaluated.element_spec
    for field in sorted(first):
        if field not in second or first[field].shape != second[field].shape:
            return _differing(field, trained, evaluated)
    return None


def _is_stream(trained: Source, evaluated: Source) -> bool:
    # Shapes differ: a training example is one window of a stream, an evaluation example a full stream.
    return trained.streams is not None or evaluated.streams is not None


def _differing(field: str, trained: Source, evaluated: Source) -> UserError:
    first, second = (source.element_spec.get(field) for source in (trained, evaluated))
    return UserError(
        f"field {field!r}",
        problem=f"is {_text(second)} in config.data.eval_split ({title(evaluated)}) and "
        f"{_text(first)} in config.data.train_split ({title(trained)})",
        remedy="use splits with the same fields, shapes and dtypes, or correct the data set",
    )


def _type(spec: FieldSpec) -> str:
    return {"u": "i"}.get(spec.dtype.kind, spec.dtype.kind)


def gather(source: Source, indices: np.ndarray, epochs: np.ndarray | int | None = None) -> Batch:
    """Gathers examples, see `Source.gather`; `epochs` is None in an evaluation.

    An error in the code of a custom source becomes a UserError, because a SystemExit in a thread
    that reads ahead would hang the run.
    """
    with custom.calling(title(source), failures=True):
        return source.gather(indices) if epochs is None else source.gather(indices, epochs)


def _text(value: np.ndarray | FieldSpec | None, rows: int | None = None) -> str:
    if value is None:
        return "missing" if rows is None else "no field of this name"
    shape = value.shape if rows is None else (rows, *value.shape)
    return f"{value.dtype}{list(shape)}"


def _listed(indices: np.ndarray) -> str:
    shown = ", ".join(str(int(index)) for index in indices[:3])
    return shown + ", ..." * (len(indices) > 3)

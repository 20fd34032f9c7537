"""Encoded images with labels, read by index, for `ImageSource`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lamb_tpu.errors import unreadable


class Record(NamedTuple):
    """An example as it is stored."""

    content: bytes  # the encoded image
    label: int  # class index
    problem: str = ""  # why the record cannot be used; '' if no problem is known


class Records(Protocol):
    """Examples 0 to `len(records) - 1`; several threads may read at once."""

    num_classes: int  # labels are 0 to `num_classes - 1`
    notes: tuple[str, ...]  # see `Source.notes`

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Record]: ...

    def name(self, index: int) -> str:
        """Returns the name of an example for messages, such as the path of its file."""


class TfdsRecords:
    """Records of a set prepared by TFDS, with the fields `image` (bytes) and `label`.

    The TFDS data source `source` must leave images encoded. It is read in batches, which is twice
    as fast as reading single records.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, source: Any, num_classes: int, folder: str) -> None:
        self.num_classes = num_classes
        self._source = source
        self._folder = folder

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads examples; raises a UserError if the files are damaged."""
        return [Record(each["image"], int(each["label"])) for each in self._records(list(indices))]

    def name(self, index: int) -> str:
        """Returns the example's number, with the original file's name if TFDS has stored it."""
        (record,) = self._records([index])
        stored = record.get("file_name") or record.get("image/filename")
        shown = f" ({stored.decode(errors='replace')})" if isinstance(stored, bytes) else ""
        return f"example {index}{shown}"

    def _records(self, indices: list[int]) -> Sequence[dict[str, Any]]:
        try:
            return self._source.__getitems__(indices)
        except (RuntimeError, OSError) as error:  # raised by ArrayRecord
            remedy = "delete the folder and prepare the set again"
            problem = "is damaged or incomplete"
            raise unreadable(f"a record in {self._folder}", error, remedy, problem) from error

"""Encoded pictures with labels, read by index, for `ImageSource`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from lamb_tpu.errors import UserError


class Record(NamedTuple):
    """One example as it is stored.

    Attributes:
      content: the encoded picture.
      label: class index.
      problem: why the record cannot be used; '' if no reason is known.
    """

    content: bytes
    label: int
    problem: str = ""


class Records(Protocol):
    """Examples 0 to `len - 1`; several threads may read at once.

    Attributes:
      num_classes: labels are 0 to `num_classes - 1`.
      notes: see `Source.notes`.
    """

    num_classes: int
    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Returns the examples at `indices`, in this order."""
        ...

    def name(self, index: int) -> str:
        """Returns the name of an example for messages, such as the path of its file."""
        ...


class TfdsRecords:
    """Records of a set prepared by TFDS, with fields `image` (bytes) and `label`.

    Args:
      source: a TFDS data source that leaves images encoded. It is read in batches, which is twice
        as fast as one by one.
      num_classes: see `Records`.
      folder: folder of the files, for error messages.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, source: Any, num_classes: int, folder: str) -> None:
        self.num_classes = num_classes
        self._source = source
        self._folder = folder

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """Reads examples, see `Records`. Raises UserError if the files are damaged."""
        return [
            Record(record["image"], int(record["label"])) for record in self._records(list(indices))
        ]

    def name(self, index: int) -> str:
        """Returns the original file's name if TFDS has kept it, otherwise the number."""
        (record,) = self._records([index])
        kept = record.get("file_name") or record.get("image/filename")
        number = f"example {index}"
        return f"{number} ({kept.decode(errors='replace')})" if isinstance(kept, bytes) else number

    def _records(self, indices: list[int]) -> Sequence[dict[str, Any]]:
        try:
            return self._source.__getitems__(indices)
        except (RuntimeError, OSError) as error:  # ArrayRecord's own
            raise UserError(
                f"a record in {self._folder} cannot be read, so the files are damaged or "
                f"incomplete; delete the folder and prepare the set again "
                f"({' '.join(str(error).split())})"
            ) from error

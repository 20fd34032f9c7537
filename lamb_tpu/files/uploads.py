"""Files that grow on this machine, with copies in a bucket that are replaced now and then."""

import contextlib
import pathlib
import tempfile
import time

from lamb_tpu.files import buckets

_SECONDS = 30.0  # between two uploads, but before a checkpoint
_REST = 20  # at least this many times as long as the upload before took


class Upload:
    """A temporary folder whose files are written whole into a bucket, which cannot append.

    What was added since the last upload is lost when the process is killed. It belongs to updates
    behind the last checkpoint, before which everything is uploaded: a resumed run adds it again.

    Args:
      folder: the folder in the bucket.

    Attributes:
      local: the temporary folder.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._temporary = tempfile.TemporaryDirectory(prefix="lamb_tpu-")
        self.local = pathlib.Path(self._temporary.name)
        self._uploaded: dict[str, int] = {}  # the files' lengths
        self._due = time.monotonic() + _SECONDS

    def fetch(self, name: str) -> pathlib.Path:
        """Returns a file's path in the temporary folder, with what the bucket has of it.

        Raises:
          OSError: the object cannot be read.
        """
        file = self.local / name
        with contextlib.suppress(FileNotFoundError):
            self._uploaded[name] = file.write_bytes(buckets.read(self._folder / name))
        return file

    def when_due(self) -> None:
        """Uploads what has grown, if the last time is long enough ago.

        Raises:
          OSError: an object cannot be written.
        """
        if time.monotonic() >= self._due:
            self.now()

    def now(self) -> None:
        """Uploads what has grown.

        Raises:
          OSError: an object cannot be written.
        """
        began = time.monotonic()
        for file in self.local.iterdir():
            data = file.read_bytes()
            if len(data) != self._uploaded.get(file.name):
                buckets.write(self._folder / file.name, data)
                self._uploaded[file.name] = len(data)
        ended = time.monotonic()
        # Long files are uploaded seldom, so that training hardly waits for them.
        self._due = ended + max(_SECONDS, _REST * (ended - began))

    def close(self) -> None:
        """Removes the temporary folder."""
        self._temporary.cleanup()

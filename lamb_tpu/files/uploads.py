"""Growing files on this machine; their copies in a bucket are replaced at intervals."""

import contextlib
import pathlib
import tempfile
import time

from lamb_tpu.files import buckets

_SECONDS = 30.0  # minimum time between two uploads, except before a checkpoint
_REST = 20  # minimum time between two uploads, as a multiple of the duration of the first


class Upload:
    """A temporary folder; each upload sends full files, because a bucket cannot append to objects.

    If the process is killed, lines since the last upload are lost. They belong to updates after the
    last checkpoint, because all lines are uploaded before a checkpoint; a resumed run writes them again.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._temporary = tempfile.TemporaryDirectory(prefix="lamb_tpu-")
        self.local = pathlib.Path(self._temporary.name)
        self._uploaded: dict[str, int] = {}  # file name -> length at its last upload
        self._due = time.monotonic() + _SECONDS

    def fetch(self, name: str) -> pathlib.Path:
        """Copies a file from the bucket if it exists there; returns its path in the temporary folder."""
        file = self.local / name
        with contextlib.suppress(FileNotFoundError):
            self._uploaded[name] = file.write_bytes(buckets.read(self._folder / name))
        return file

    def when_due(self) -> None:
        """Uploads files that have grown, if the next upload is due; raises the same errors as `now`."""
        if time.monotonic() >= self._due:
            self.now()

    def now(self) -> None:
        """Uploads files that have grown; raises an OSError if an object cannot be written."""
        began = time.monotonic()
        for file in self.local.iterdir():
            data = file.read_bytes()
            if len(data) != self._uploaded.get(file.name):
                buckets.write(self._folder / file.name, data)
                self._uploaded[file.name] = len(data)
        ended = time.monotonic()
        # Long files are uploaded rarely, so that training hardly waits for them.
        self._due = ended + max(_SECONDS, _REST * (ended - began))

    def close(self) -> None:
        """Removes the temporary folder."""
        self._temporary.cleanup()

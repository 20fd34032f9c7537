"""A cache of decoded sets, for later runs in the same process.

`reproduce` trains many runs of a table in one process; without the cache, each run would decode the
same files again.
"""

import collections
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

_MOST_BYTES = 2**30  # of all cached sets together
_MOST_SETS = 4  # a run has two sets, for training and evaluation

Arrays = dict[str, np.ndarray]
_decoded: "collections.OrderedDict[tuple, Arrays]" = collections.OrderedDict()


def arrays(
    name: str, files: Iterable[pathlib.Path], read: Callable[[], Mapping[str, np.ndarray]]
) -> Arrays:
    """Returns the result of `read`, from the cache if the files are unchanged since the last read.

    The cache key consists of `name` (of the set and split) and each file's path, size and modification
    time. The arrays become read-only, because callers share them.
    """
    key = (name, *((str(path), *_state(path)) for path in files))
    if key not in _decoded:
        loaded = dict(read())
        for array in loaded.values():
            array.setflags(write=False)
        if _bytes(loaded) > _MOST_BYTES:
            return loaded
        _decoded[key] = loaded
        while len(_decoded) > _MOST_SETS or sum(map(_bytes, _decoded.values())) > _MOST_BYTES:
            _decoded.popitem(last=False)
    _decoded.move_to_end(key)
    return dict(_decoded[key])


def _state(path: pathlib.Path) -> tuple[int, int]:
    status = os.stat(path)  # `stat` of TFDS's path objects lacks the modification time
    return status.st_size, status.st_mtime_ns


def _bytes(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())

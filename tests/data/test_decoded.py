"""Sets are decoded once in a process, unless their files change."""

import os
import pathlib

import numpy as np
import pytest

from lamb_tpu.data import decoded


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoded, "_decoded", type(decoded._decoded)())


class Reader:
    def __init__(self, size: int = 8) -> None:
        self.size, self.count = size, 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.count += 1
        return {"x": np.zeros(self.size, np.uint8)}


def test_a_set_is_read_once_until_a_file_changes(tmp_path: pathlib.Path) -> None:
    path, read = tmp_path / "file", Reader()
    path.write_bytes(b"a")
    first, second = (decoded.arrays("s", [path], read)["x"] for _ in range(2))
    assert first is second and read.count == 1
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1
    decoded.arrays("t", [path], read)
    assert read.count == 2
    os.utime(path, ns=(1, 1))
    decoded.arrays("s", [path], read)
    assert read.count == 3


def test_only_the_last_sets_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reader()
    for name in "abcde":
        decoded.arrays(name, [], read)
    decoded.arrays("e", [], read)
    assert read.count == 5
    decoded.arrays("a", [], read)
    assert read.count == 6
    monkeypatch.setattr(decoded, "_MOST_BYTES", 20)
    large = Reader(30)
    decoded.arrays("large", [], large)
    decoded.arrays("large", [], large)
    assert large.count == 2
    decoded.arrays("f", [], read)
    assert sum(map(decoded._bytes, decoded._decoded.values())) <= 20

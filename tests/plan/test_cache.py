"""Compiled programs on disk: kept, found again, and left alone where they are damaged."""

import importlib.metadata
import pathlib

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.plan.cache import Cache, Compiled, check_folder, default_folder, key_of
from tests import tiny

MEMORY = {"peak": 7}
FITS = Compiled(1.5, "", MEMORY, "HloModule f\n" * 100)
CROWDED = Compiled(0.5, "RESOURCE_EXHAUSTED", None, "")


def test_what_is_kept_is_found(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path / "a" / "b")
    assert cache.load("k") is None
    for compiled in (FITS, CROWDED):
        cache.store("k", compiled, tiny.digits(), "v3-8")
        assert cache.load("k") == compiled
    assert Cache(None).load("k") is None
    Cache(None).store("k", FITS, tiny.digits(), "v3-8")


@pytest.mark.parametrize("name", ["k.json", "k.hlo.gz"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\x1f\x8b\x08", None])
def test_a_damaged_one_is_compiled_again(
    tmp_path: pathlib.Path, name: str, content: bytes | None
) -> None:
    cache = Cache(tmp_path)
    cache.store("k", FITS, tiny.digits(), "v3-8")
    path = tmp_path / name
    if content is None:
        path.write_bytes(path.read_bytes()[:-9])
    else:
        path.write_bytes(content)
    assert cache.load("k") is None
    assert cache.batches(tiny.digits(), "v3-8").keys() <= {64}


def test_batches_that_are_known(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    for batch, compiled in ((64, FITS), (128, FITS), (256, CROWDED)):
        # The rate and the schedule follow the batch and change no shape.
        config = tiny.digits(batch_size=batch, optimizer__learning_rate=batch / 1e5, seed=batch)
        cache.store(f"k{batch}", compiled, config, "v3-8")
    assert cache.batches(tiny.digits(), "v3-8") == {64: True, 128: True, 256: False}
    assert cache.batches(tiny.digits(), "v3-32") == {}
    assert cache.batches(tiny.digits(accumulation_steps=2), "v3-8") == {}
    assert Cache(None).batches(tiny.digits(), "v3-8") == {}


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    places, options = [(0, 0, 0, 0)], {"wrap": (True,)}
    first = key_of("module", places, options)
    assert first == key_of("module", [(0, 0, 0, 0)], {"wrap": (True,)})
    others = {
        key_of("another", places, options),
        key_of("module", [(0, 1, 0, 0)], options),
        key_of("module", places, {"wrap": (False,)}),
    }
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some_flag")
    others.add(key_of("module", places, options))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2")
    others.add(key_of("module", places, options))
    assert len(others | {first}) == 6


def test_folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert check_folder("") == default_folder() == tmp_path / "lamb_tpu" / "plans"
    assert check_folder("none") is None and check_folder(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--cache is '.*file', which is no folder"):
        check_folder(str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"--cache .*file/below cannot be written"):
        Cache(tmp_path / "file" / "below").store("k", FITS, tiny.digits(), "v3-8")

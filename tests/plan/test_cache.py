"""The cache of compiled programs: storing, loading, and compiling again after damage."""

import functools
import gzip
import hashlib
import importlib.metadata
import json
import operator
import os
import pathlib
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.files import writing
from lamb_tpu.plan import cache as cache_lib
from lamb_tpu.plan.cache import Cache, Compiled, Memory, default_folder, key_of, open_cache, read
from lamb_tpu.spec import parse
from tests import tiny

FITS = Compiled(1.5, "", Memory(*[7] * 6), "HloModule f\n" * 100)
CROWDED = Compiled(0.5, "RESOURCE_EXHAUSTED", None, "")
DIGITS = parse(tiny.digits())


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync, to speed up the many stores of these tests."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def stored(folder: pathlib.Path, compiled: Compiled = FITS) -> Cache:
    cache = Cache(folder)
    cache.store("k", compiled, DIGITS, "v3-8")
    return cache


def test_store_and_load(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path / "a" / "b")
    assert cache.load("k") is None
    for compiled in (FITS, CROWDED):
        cache.store("k", compiled, DIGITS, "v3-8")
        assert cache.load("k") == compiled
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["k.hlo.gz", "k.json"]
    assert Cache(None).load("k") is None
    Cache(None).store("k", FITS, DIGITS, "v3-8")


Damage = Callable[[pathlib.Path], Any]


def edited(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    """Applies `edit` to a record and, unless `edit` sets the digest, corrects the digest."""

    def damage(folder: pathlib.Path) -> None:
        record = json.loads((folder / "k.json").read_text())
        before = record["digest"]
        edit(record)
        if record.get("digest") == before:
            text = json.dumps(record | {"digest": ""}, sort_keys=True)
            record["digest"] = hashlib.sha256(text.encode()).hexdigest()
        (folder / "k.json").write_text(json.dumps(record))

    return damage


def changed(key: str, value: Any) -> Damage:
    """Sets the value of a dotted key of a record."""
    *sections, last = key.split(".")
    return edited(
        lambda record: functools.reduce(dict.__getitem__, sections, record).update({last: value})
    )


def content(name: str, data: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(data)


def flipped(name: str, position: int) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[position] ^= 4
        (folder / name).write_bytes(data)

    return damage


def cut(name: str) -> Damage:
    return lambda folder: content(name, (folder / name).read_bytes()[:-9])(folder)


def instead(name: str, make: Damage) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def of_another_key(folder: pathlib.Path) -> None:
    Cache(folder).store("other", FITS, DIGITS, "v3-8")
    (folder / "other.json").replace(folder / "k.json")


NESTED = b'{"key":' + b"[" * 200_000
BOMB = gzip.compress(bytes(10**8), 9)
TYPES: dict[str, list[Any]] = {
    "key": [None, 7, ["k"], "other", "../k"],
    "digest": ["0" * 64, None, 5, ""],
    "program": [None, "0" * 64, []],
    "program_bytes": [-1, 10**12, "100", None, 1.5, 10**400, 0],
    "seconds": ["fast", None, [], -1.0, 1e300],
    "message": [None, 7, {}, "RESOURCE_EXHAUSTED"],
    "memory": [None, [], 7, "much", {}, {"peak": 7}],
    "memory.peak": [-1, 0, 1.5, "7", None, [], 10**30],
    "memory.more": [1],
    "batch_size": ["64", 0, -3, None, 1e400, [64]],
    "family": [None, 1, ["f"], ""],
    "unknown": [1],
}
DAMAGES: dict[str, Damage] = {
    **{
        f"{key}={str(value)[:20]}": changed(key, value)
        for key, values in TYPES.items()
        for value in values
    },
    **{
        f"without {key}": edited(operator.methodcaller("pop", key))
        for key in TYPES
        if "." not in key and key != "unknown"
    },
    **{
        f"{name}: {data[:12]!r}": content(name, data)
        for name in ("k.json", "k.hlo.gz")
        for data in (
            b"",
            b"{}",
            b"[]",
            b"null",
            b"\x1f\x8b\x08",
            b"\xff\xfe",
            b"7",
            NESTED,
            b'{"seconds": NaN}',
            b"x" * (2**20 + 1),
        )
    },
    **{f"{name} cut": cut(name) for name in ("k.json", "k.hlo.gz")},
    **{
        f"{name} flipped at {position}": flipped(name, position)
        for name in ("k.json", "k.hlo.gz")
        for position in (0, 3, 30, -30)
    },
    "a bomb": content("k.hlo.gz", BOMB),
    "a pipe as record": instead("k.json", os.mkfifo),
    "a pipe as program": instead("k.hlo.gz", os.mkfifo),
    "an endless record": instead("k.json", lambda path: path.symlink_to("/dev/zero")),
    "an endless program": instead("k.hlo.gz", lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": instead("k.json", lambda path: path.symlink_to(path)),
    "another key's record": of_another_key,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_record_is_compiled_again(
    damage: Damage, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(DAMAGES) >= 46
    cache = stored(tmp_path)
    damage(tmp_path)
    assert cache.load("k") is None
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {tmp_path}/k.json, a cached program, is damaged (")
    assert line.endswith("; compiling again, to replace it") and len(line) < 500
    assert cache.batches(DIGITS, "v3-8") in ({}, {64: True})
    # Storing again repairs the record and replaces links instead of following them.
    cache.store("k", FITS, DIGITS, "v3-8")
    assert cache.load("k") == FITS and capsys.readouterr().err == ""
    assert (tmp_path / "k.json").lstat().st_size and not (tmp_path / "k.json").is_symlink()


@pytest.mark.parametrize("name", ["k.json", "k.hlo.gz"])
def test_missing_files_are_not_damage(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = stored(tmp_path)
    (tmp_path / name).unlink()
    assert cache.load("k") is None and capsys.readouterr().err == ""


def test_a_link_is_replaced_and_not_followed(tmp_path: pathlib.Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "k.json").symlink_to(thesis)
    assert stored(folder).load("k") == FITS and thesis.read_text() == "years of work"


@pytest.mark.parametrize("size", [10**6, 10**8])
def test_a_decompression_bomb_is_rejected(size: int, tmp_path: pathlib.Path) -> None:
    """No more than the recorded size is decompressed, and a much larger file is not even read."""
    stored(tmp_path)
    record = read(tmp_path / "k.json")
    content("k.hlo.gz", gzip.compress(bytes(size), 9))(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="longer than the record says|has more than"):
            cache_lib._read_program(tmp_path / "k.hlo.gz", record)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_a_folder_instead_of_a_record(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "k.json").mkdir()
    cache = Cache(tmp_path)
    assert cache.load("k") is None and cache.batches(DIGITS, "v3-8") == {}
    cache.store("k", FITS, DIGITS, "v3-8")
    assert [line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"warning: {tmp_path}/k.json, a cached program, is damaged",
        f"warning: --cache {tmp_path} cannot be written",
    ]


def test_concurrent_stores_of_one_key(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = [
        threading.Thread(target=lambda: [stored(tmp_path) for _ in range(10)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Cache(tmp_path).load("k") == FITS and capsys.readouterr().err == ""
    assert sorted(os.listdir(tmp_path)) == ["k.hlo.gz", "k.json"]


def test_the_digest_covers_every_field(tmp_path: pathlib.Path) -> None:
    stored(tmp_path)
    record = read(tmp_path / "k.json")
    assert record.digest == record.digest_of()
    changed("digest", "a" * 64)(tmp_path)
    with pytest.raises(ValueError, match="^its digest does not match its content$"):
        read(tmp_path / "k.json")


def test_known_batches(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    for batch, compiled in ((64, FITS), (128, FITS), (256, CROWDED)):
        # The learning rate and the seed differ too, but they change no shape.
        config = parse(
            tiny.digits(batch_size=batch, optimizer__learning_rate=batch / 1e5, seed=batch)
        )
        cache.store(f"k{batch}", compiled, config, "v3-8")
    assert cache.batches(DIGITS, "v3-8") == {64: True, 128: True, 256: False}
    assert cache.batches(parse(tiny.digits()), "v3-32") == {}
    assert cache.batches(parse(tiny.digits(accumulation_steps=2)), "v3-8") == {}
    assert Cache(None).batches(DIGITS, "v3-8") == {}


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    coordinates, options = [(0, 0, 0, 0)], {"wrap": (True,)}
    first = key_of("module", coordinates, options)
    assert first == key_of("module", [(0, 0, 0, 0)], {"wrap": (True,)})
    others = {
        key_of("another", coordinates, options),
        key_of("module", [(0, 1, 0, 0)], options),
        key_of("module", coordinates, {"wrap": (False,)}),
    }
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--some_flag")
    others.add(key_of("module", coordinates, options))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2")
    others.add(key_of("module", coordinates, options))
    assert len(others | {first}) == 6


def test_folders(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache("").folder == default_folder() == tmp_path / "lamb_tpu" / "plans"
    assert open_cache("none").folder is None and open_cache(str(tmp_path)).folder == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "gs://bucket/caches")  # a relative path is ignored
    assert default_folder().expanduser() == pathlib.Path.home() / ".cache" / "lamb_tpu" / "plans"
    with pytest.raises(UserError, match="^--cache gs://b/x is remote; give a local path"):
        open_cache("gs://b/x")
    with pytest.raises(UserError, match="^--cache ~nobody-of-that-name/x begins with an unknown h"):
        open_cache("~nobody-of-that-name/x")


@pytest.mark.parametrize(
    "name, make",
    [
        ("file", lambda path: path.touch()),
        ("file/below", lambda path: path.parent.touch()),
        ("link", lambda path: path.symlink_to("nowhere")),
        ("loop", lambda path: path.symlink_to(path)),
        ("x" * 300, lambda path: None),
    ],
)
def test_a_folder_that_cannot_be_written(
    name: str,
    make: Callable[[pathlib.Path], None],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    make(path)
    cache = open_cache(str(path))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --cache {path} cannot be written (")
    assert line.endswith(
        "; give another path, or 'none'; the plan continues without storing programs"
    )
    cache.store("k", FITS, DIGITS, "v3-8")
    assert cache.load("k") is None and cache.batches(DIGITS, "v3-8") == {}
    assert capsys.readouterr().err == ""


def test_a_warning_is_one_line_that_is_safe_to_print(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a\nb\x1b[31m").touch()
    open_cache(f"{tmp_path}/a\nb\x1b[31m")
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: --cache {tmp_path}/a\\nb\\x1b[31m cannot be written")


def test_programs_are_loaded_from_a_read_only_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path)

    def full(folder: pathlib.Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(writing, "try_out", full)
    cache = open_cache(str(tmp_path))
    assert "(Read-only file system)" in capsys.readouterr().err
    assert cache.load("k") == FITS
    cut("k.json")(tmp_path)
    assert cache.load("k") is None
    assert capsys.readouterr().err.endswith("; compiling again\n")


def test_a_full_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = open_cache(str(tmp_path))

    def full(*arguments: object) -> None:
        raise UserError("--cache cannot be written (No space left on device); give another")

    monkeypatch.setattr(writing, "replace", full)
    for _ in range(2):
        cache.store("k", FITS, DIGITS, "v3-8")  # warns once and does not raise
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: --cache cannot be written (No space left on device)")

"""Compiled programs in a workdir."""

import os
import pathlib
import re
import shutil
import warnings

import jax
import pytest

from lamb_tpu.store import programs
from tests import tiny


def environment() -> dict[str, str]:
    """One that says nothing of a cache, as a user's."""
    kept = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    # Of the tiny programs here too.
    return kept | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.mark.long
def test_a_resumed_run_compiles_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_LOGGING_LEVEL", "DEBUG")

    def train() -> str:
        done = tiny.command(
            "lamb_tpu.train",
            "--config=configs/digits.py",
            f"--workdir={tmp_path}",
            "--config.duration=2 steps",
            "--config.log.tensorboard=false",
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    hit = r"Persistent compilation cache hit for 'jit_train_step'"
    assert not re.search(hit, train())
    (folder,) = (tmp_path / programs.FOLDER).iterdir()
    assert folder.name.startswith("jaxlib-") and any(folder.glob("jit_train_step-*"))
    shutil.rmtree(tmp_path / "checkpoints")  # else there would be nothing left to train
    assert re.search(hit, train())


def test_a_folder_of_the_users_own_stays(tmp_path: pathlib.Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    assert before == os.environ["JAX_COMPILATION_CACHE_DIR"]
    with programs.kept_in(tmp_path):
        assert jax.config.jax_compilation_cache_dir == before


def test_each_run_has_its_own_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    programs.compilation_cache.reset_cache()  # an earlier test may have opened its folder
    try:
        for number, name in enumerate(("one", "two"), start=2):
            with programs.kept_in(tmp_path / name):
                jax.jit(lambda x, n=number: x * n)(1.0)
            assert jax.config.jax_compilation_cache_dir is None
            assert list((tmp_path / name).rglob("*-cache"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        programs.compilation_cache.reset_cache()


def test_short_runs_keep_every_program(tmp_path: pathlib.Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    limit = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 60.0)
    programs.compilation_cache.reset_cache()  # an earlier test may have opened its folder
    try:
        for every, count in ((False, 0), (True, 1)):
            # A run within has no folder of its own.
            with programs.kept_in(tmp_path, every), programs.kept_in(tmp_path / "run"):
                jax.jit(lambda x: x * 5 + 3)(1.0)
            assert len(list(tmp_path.rglob("jit__lambda*-cache"))) == count
            assert jax.config.jax_persistent_cache_min_compile_time_secs == 60.0
        assert not (tmp_path / "run").exists()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)
        programs.compilation_cache.reset_cache()


def test_damaged_program_is_compiled_anew(tmp_path: pathlib.Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    programs.compilation_cache.reset_cache()  # an earlier test may have opened its folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                with programs.kept_in(tmp_path):
                    assert jax.jit(lambda x: x * 7 + 1)(1.0) == 8
                for entry in tmp_path.rglob("*-cache"):
                    entry.write_bytes(entry.read_bytes()[:100])  # as if killed while writing
                jax.clear_caches()
            (tmp_path / "file").write_text("no folder")
            with programs.kept_in(tmp_path / "file"):
                assert jax.jit(lambda x: x * 8 + 1)(1.0) == 9
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        programs.compilation_cache.reset_cache()


def test_machines_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    here = programs._machine()
    assert here == programs._machine()
    read = pathlib.Path.read_text
    monkeypatch.setattr(
        pathlib.Path,
        "read_text",
        lambda path, *how, **more: (
            "flags : sse2\n" if str(path) == "/proc/cpuinfo" else read(path, *how, **more)
        ),
    )
    assert programs._machine() != here

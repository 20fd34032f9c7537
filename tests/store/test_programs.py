"""Compiled programs in a workdir."""

import os
import pathlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator

import jax
import pytest

from lamb_tpu.store import programs
from tests import tiny


def environment() -> dict[str, str]:
    """An environment without cache settings, like that of a user."""
    variables = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    # Cache tiny programs too.
    return variables | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.mark.long
def test_a_resumed_run_compiles_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_LOGGING_LEVEL", "DEBUG")

    def train() -> str:
        short = ("--config.duration=2 steps", "--config.log.tensorboard=false")
        recipe = "--config=configs/digits.py"
        return tiny.succeed("lamb_tpu.train", recipe, f"--workdir={tmp_path}", *short).stderr

    hit = r"Persistent compilation cache hit for 'jit_train_step'"
    assert not re.search(hit, train())
    (folder,) = (tmp_path / programs.FOLDER).iterdir()
    assert folder.name.startswith("jaxlib-") and any(folder.glob("jit_train_step-*"))
    shutil.rmtree(tmp_path / "checkpoints")  # otherwise there is nothing to train
    assert re.search(hit, train())


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Turns off the compilation cache; afterwards, restores the cache of the tests."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    programs.compilation_cache.reset_cache()  # an earlier test may have opened its folder
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    programs.compilation_cache.reset_cache()


def test_a_cache_set_by_the_user_stays(tmp_path: pathlib.Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    assert before == os.environ["JAX_COMPILATION_CACHE_DIR"]
    with programs.kept_in(tmp_path):
        assert jax.config.jax_compilation_cache_dir == before


def test_each_run_has_its_own_folder(tmp_path: pathlib.Path, no_cache: None) -> None:
    for number, name in enumerate(("one", "two"), start=2):
        with programs.kept_in(tmp_path / name):
            jax.jit(lambda x, n=number: x * n)(1.0)
        assert jax.config.jax_compilation_cache_dir is None
        assert list((tmp_path / name).rglob("*-cache"))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_folder_with_a_pipe_or_a_device_is_not_used(
    make: Callable[[pathlib.Path], None], tmp_path: pathlib.Path, no_cache: None
) -> None:
    folder = tmp_path / programs.FOLDER / programs._machine()
    (folder / "autotuned").mkdir(parents=True)
    with programs.kept_in(tmp_path):
        assert jax.config.jax_compilation_cache_dir == str(folder)
    make(folder / "jit_f-cache")
    with programs.kept_in(tmp_path):
        assert jax.config.jax_compilation_cache_dir is None


def test_short_runs_keep_every_program(tmp_path: pathlib.Path, no_cache: None) -> None:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 60.0)
    for every, count in ((False, 0), (True, 1)):
        # The inner block uses the cache of the outer block, not a folder in its workdir.
        with programs.kept_in(tmp_path, every), programs.kept_in(tmp_path / "run"):
            jax.jit(lambda x: x * 5 + 3)(1.0)
        assert len(list(tmp_path.rglob("jit__lambda*-cache"))) == count
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 60.0
    assert not (tmp_path / "run").exists()


def test_damaged_program_is_compiled_again(tmp_path: pathlib.Path, no_cache: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with programs.kept_in(tmp_path):
                assert jax.jit(lambda x: x * 7 + 1)(1.0) == 8
            for entry in tmp_path.rglob("*-cache"):
                entry.write_bytes(entry.read_bytes()[:100])  # as if killed during the write
            jax.clear_caches()
        (tmp_path / "file").write_text("no folder")
        with programs.kept_in(tmp_path / "file"):
            assert jax.jit(lambda x: x * 8 + 1)(1.0) == 9


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

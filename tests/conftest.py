"""Sets eight simulated CPU devices before jax is imported, and defines shared fixtures."""

import contextlib
import gc
import importlib.util
import os
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import compiling
from tests.seconds import pytest_runtest_call, pytest_terminal_summary  # noqa: F401

pytest.register_assert_rewrite("tests.raising")

if TYPE_CHECKING:
    from tests import gcs

# The CPU runtime sizes its thread pool by the number of cores. With fewer threads than simulated
# devices, the all-reduce of a step can wait forever, so NPROC sets the number of threads.
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

# A shell ignores Ctrl-C in background jobs, and nohup ignores SIGHUP. Child processes would
# inherit that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Reuse programs that earlier tests compiled. Each test process has a separate cache folder, because
# JAX does not write these files atomically.
COMPILED = tempfile.mkdtemp(prefix="lamb_tpu_compiled_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_configure(config: pytest.Config) -> None:
    """Sets options for fast compilation, unless only long tests run, which compute more than they compile."""
    if config.option.markexpr != "long":
        os.environ["XLA_FLAGS"] = compiling.flags()


def pytest_unconfigure() -> None:
    """Removes the cache folder; resets the exit status set by a command that ended in this process."""
    shutil.rmtree(COMPILED, ignore_errors=True)
    if "lamb_tpu.ending" in sys.modules:
        sys.modules["lamb_tpu.ending"].leaving.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Compiles with XLA's defaults for a test marked `optimized`, and for its fixtures."""
    marked = item.get_closest_marker("optimized") is not None
    with compiling.optimized() if marked else contextlib.nullcontext():
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def _forgets_programs() -> Iterator[None]:
    """Drops JAX's compiled programs after a test file if the process uses more than 2 GiB.

    Each program keeps an MLIR context alive, and a new context searches all of them: a process of
    5 GB spent a third of its time on this search.
    """
    yield
    memory = pathlib.Path("/proc/self/statm")
    pages = int(memory.read_text().split()[1]) if memory.exists() else 0
    if "jax" in sys.modules and pages * os.sysconf("SC_PAGE_SIZE") > 2**31:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """The workdir of a complete run of `tiny.digits()`; a test that changes files must use `copy`."""
    from lamb_tpu.train import train
    from tests import tiny

    workdir = tmp_path_factory.mktemp("trained")
    train(tiny.digits(), workdir, quiet=True)
    before = tiny.fingerprint(workdir)
    yield workdir
    assert tiny.fingerprint(workdir) == before, "a test has changed the shared run"


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A workdir of `tiny.bert()` with two checkpoints of random weights; do not change it."""
    from tests import tiny

    workdir = tmp_path_factory.mktemp("pretrained")
    tiny.save(tiny.bert(), workdir)
    before = tiny.fingerprint(workdir)
    yield workdir
    assert tiny.fingerprint(workdir) == before, "a test has changed the shared run"


@pytest.fixture(scope="session")
def _bucket_server() -> Iterator["gcs.Store"]:
    # Imported late, because `buckets` must set its options first.
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed")
    import fsspec

    from tests import gcs

    # One server for all tests, because the clients look up its address only once.
    with gcs.serve() as (store, environment), pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)  # as fsspec does on import
        yield store


@pytest.fixture
def bucket(_bucket_server: "gcs.Store") -> "gcs.Store":
    """The empty bucket gs://bucket."""
    _bucket_server.clear()
    return _bucket_server


@pytest.fixture
def copy(trained: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture
def custom_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An importable folder with the user's modules from `custom_modules`."""
    from tests import custom_modules

    custom_modules.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path

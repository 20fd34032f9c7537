"""Eight simulated CPU devices for every test, set before jax is imported; two runs to share."""

import gc
import importlib.util
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests import gcs

# The CPU runtime sizes its thread pool by the cores it sees; with fewer threads than simulated
# devices the all-reduce of a step can wait for ever. NPROC tells it to start enough.
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

# Programs that an earlier test compiled, or a run that a test started, are not compiled again. Each
# test process has a folder of its own: JAX does not write these files in one piece.
COMPILED = tempfile.mkdtemp(prefix="lamb_tpu_compiled_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_unconfigure() -> None:
    """Removes that folder."""
    shutil.rmtree(COMPILED, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _forgets_programs() -> Iterator[None]:
    """Drops JAX's programs after a file, when there are many.

    Each one that lives keeps an MLIR context, and a new context looks through all of them: at 5 GB
    a process spent a third of its time on that.
    """
    yield
    memory = pathlib.Path("/proc/self/statm")
    pages = int(memory.read_text().split()[1]) if memory.exists() else 0
    if "jax" in sys.modules and pages * os.sysconf("SC_PAGE_SIZE") > 2**31:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """The workdir of a complete run of `tiny.digits()`; take `copy` to change anything."""
    from lamb_tpu.train import train
    from tests import tiny

    workdir = tmp_path_factory.mktemp("trained")
    train(tiny.digits(), workdir, quiet=True)
    before = tiny.fingerprint(workdir)
    yield workdir
    assert tiny.fingerprint(workdir) == before, "a test has changed the shared run"


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A workdir of `tiny.bert()` with two checkpoints of random weights; not to be changed."""
    from tests import tiny

    workdir = tmp_path_factory.mktemp("pretrained")
    tiny.save(tiny.bert(), workdir)
    before = tiny.fingerprint(workdir)
    yield workdir
    assert tiny.fingerprint(workdir) == before, "a test has changed the shared run"


@pytest.fixture(scope="session")
def _bucket_server() -> Iterator["gcs.Store"]:
    # Not imported here, which `buckets` has settings for.
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("gcsfs is not installed")
    import fsspec

    from tests import gcs

    # One for all tests, because the clients look for its address once.
    with gcs.serve() as (store, environment), pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)  # which it did when it was imported
        yield store


@pytest.fixture
def bucket(_bucket_server: "gcs.Store") -> "gcs.Store":
    """The empty bucket gs://bucket."""
    _bucket_server.clear()
    return _bucket_server


@pytest.fixture
def copy(trained: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of that workdir."""
    return pathlib.Path(shutil.copytree(trained, tmp_path / "copy"))


@pytest.fixture
def own_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with modules of a user's own, see `own_modules`; Python looks there."""
    from tests import own_modules

    own_modules.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path

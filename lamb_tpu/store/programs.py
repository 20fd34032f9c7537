"""Compiled programs cached in a folder, so that a resumed run need not compile again."""

import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import warnings
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from lamb_tpu.files import buckets

FOLDER = "compiled"


@contextlib.contextmanager
def kept_in(workdir: pathlib.Path, every: bool = False) -> Iterator[None]:
    """Uses a folder in the workdir as JAX's compilation cache, unless a cache is already set.

    By default JAX caches only programs that took a second or more to compile; with `every`, for
    many short runs, it caches all programs.
    """
    # JAX defines its flags at run time, so type checkers do not know them.
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        yield
        return
    folder = workdir / FOLDER / _machine()
    if not _only_files(folder):
        yield
        return
    limit = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if every:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # The run does not need the cache, and a full disk is reported elsewhere.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)
        # JAX reads the folder's name only once, and this process's next run may use another folder.
        compilation_cache.reset_cache()


def _only_files(folder: pathlib.Path) -> bool:
    """Returns whether a folder is missing or contains only files and folders.

    JAX would wait for the writer of a pipe, and read a link to a device forever.
    """
    if buckets.is_remote(folder):
        return True
    try:
        with os.scandir(folder) as entries:
            return all(
                entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                for entry in entries
            )
    except OSError:
        return not os.path.lexists(folder)  # JAX creates a missing folder


def _machine() -> str:
    """Returns a name for this type of machine, from its version of jaxlib and its instruction set.

    A run may be resumed on another machine, and a program with instructions that the CPU there
    lacks would crash the process.
    """
    details = [importlib.metadata.version("jaxlib"), platform.system(), platform.machine()]
    with contextlib.suppress(OSError):  # systems other than Linux have no such file
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        # 'flags' on x86-64, 'Features' on ARM; all cores have the same.
        details += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    digest = hashlib.sha256("\n".join(details).encode()).hexdigest()
    return f"jaxlib-{details[0]}-{digest[:12]}"

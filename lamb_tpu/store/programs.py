"""Compiled programs kept in a folder, so that a resumed run need not compile again."""

import contextlib
import hashlib
import importlib.metadata
import pathlib
import platform
import warnings
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

FOLDER = "compiled"


@contextlib.contextmanager
def kept_in(workdir: pathlib.Path, every: bool = False) -> Iterator[None]:
    """Makes a folder of the workdir JAX's compilation cache; one that is set already stays.

    JAX's limits apply: by default it keeps what took a second or more to compile, and only process
    0 writes. A program that cannot be read or written is compiled as without the folder.

    Args:
      workdir: a run's folder, or one of many runs that share their programs.
      every: whether to keep programs that took less than a second, too: for many short runs.
    """
    # JAX defines its flags at run time, so type checkers do not know them.
    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        yield
        return
    limit = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(workdir / FOLDER / _machine()))
    if every:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # The run is right without the folder, and a disk that is full is told in a sentence of its own.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)
        # JAX looks at the folder once, and the next run of this process has another one.
        compilation_cache.reset_cache()


def _machine() -> str:
    """Returns a name for this kind of machine, by its version of jaxlib and its instruction set.

    A workdir may be resumed on another machine, and a program with instructions that its CPU does
    not have would end the process.
    """
    facts = [importlib.metadata.version("jaxlib"), platform.system(), platform.machine()]
    with contextlib.suppress(OSError):  # systems other than Linux have no such file
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        # 'flags' on x86-64, 'Features' on ARM; the same for all cores.
        facts += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return f"jaxlib-{facts[0]}-{digest[:12]}"

"""Compiler options for tests: fast compilation, or XLA's defaults for tests marked `optimized`.

Tests spend most of their time in XLA. Without LLVM's optimizations and XLA's new CPU code generator,
an update of LAMB on seven leaves compiles in 0.08 s instead of 0.65 s. Tracing, lowering,
partitioning and XLA's passes stay the same; only the machine code is slower. `conftest` sets
XLA_FLAGS to `flags()` before jax starts, so that commands started by tests use these options too. A
session with only long tests uses XLA's defaults.

A test marked `optimized` compiles with XLA's defaults, as users do. Mark a test that measures memory
or time, reads the compiled program, or depends on the rounding of optimized code.
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

# Each option, with its value in tests and XLA's default.
OPTIONS: dict[str, tuple[bool | int, bool | int]] = {
    "xla_backend_optimization_level": (0, 3),
    "xla_llvm_disable_expensive_passes": (True, False),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # 0.12 has only the new generator
    OPTIONS["xla_cpu_use_fusion_emitters"] = (False, True)


def flags() -> str:
    """Returns the value of XLA_FLAGS for fast compilation."""
    return " ".join(f"--{name}={str(quick).lower()}" for name, (quick, _) in OPTIONS.items())


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """Compiles with XLA's defaults, in this process and in processes that it starts.

    XLA reads XLA_FLAGS only once, so the defaults are passed as options to every CPU program.
    """
    import jax
    from jax._src import compiler

    defaults = {name: default for name, (_, default) in OPTIONS.items()}
    original = compiler.get_compile_options

    def get_compile_options(*args: Any, **kwargs: Any) -> Any:
        backend = kwargs.get("backend")
        if backend is None or backend.platform == "cpu":
            kwargs["env_options_overrides"] = defaults | (kwargs["env_options_overrides"] or {})
        return original(*args, **kwargs)

    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    jax.clear_caches()  # forget the programs that were compiled fast
    with (
        mock.patch.object(compiler, "get_compile_options", get_compile_options),
        mock.patch.dict(os.environ, environment, clear=True),
    ):
        yield

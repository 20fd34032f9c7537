"""Keeps libtpu quiet on a machine without a TPU."""

import os
import sys
from collections.abc import Callable
from typing import Any

# Without the first two variables, libtpu prints lines that ask for them. Without TPU_LOG_DIR it
# writes its log into tpu_logs in the temporary folder, and prints thousands of lines if another
# user owns this folder. The last two variables also silence libtpu's profiler. Only libtpu reads
# these variables, and only while it starts.
_VARIABLES = {
    "TPU_ACCELERATOR_TYPE": "v3-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def hush_libtpu() -> None:
    """Silences libtpu on a machine without a TPU; call it after `import jax`, before JAX is used.

    JAX starts every installed backend. If libtpu is only installed as a compiler, for planning,
    libtpu prints lines about a missing TPU when it starts. This function sets environment
    variables that silence libtpu, but only while libtpu starts, so neither the caller nor its child
    processes see them. On a machine with a TPU the function does nothing.
    """
    # JAX's table of backends is private. If a later JAX lacks it, libtpu prints its lines.
    backends = getattr(sys.modules.get("jax._src.xla_bridge"), "_backend_factories", {})
    # JAX sets this variable when it is imported and finds no TPU.
    if "tpu" in backends and os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        if not isinstance(backends["tpu"].factory, _Hushed):
            backends["tpu"].factory = _Hushed(backends["tpu"].factory)


class _Hushed:
    """Starts a backend with those `_VARIABLES` in the environment that the user has not set."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    def __call__(self) -> Any:
        added = _VARIABLES.keys() - os.environ.keys()
        os.environ.update({name: _VARIABLES[name] for name in added})
        try:
            return self._start()
        finally:
            for name in added:
                os.environ.pop(name, None)

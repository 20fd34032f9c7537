"""Keeps libtpu quiet on a machine without a TPU."""

import os


def hush_libtpu() -> None:
    """Silences libtpu on a machine without a TPU; call after `import jax` and before its use.

    JAX tries every library that is installed, so where libtpu is there as a compiler, as for
    planning, its first use prints lines about a TPU that it cannot find. They ask for the first
    two variables. Without the third, libtpu writes its log into the folder tpu_logs of the
    temporary folder, and prints thousands of lines if another user of the machine owns it. Only
    libtpu reads the three. With a TPU nothing is changed.
    """
    # JAX sets this when it is imported and finds no TPU.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v3-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_LOG_DIR", "disabled")

"""Facts of the machine on which this process runs."""

import os


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    # Containers and batch systems often give a process fewer cores than the machine has. macOS does
    # not tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

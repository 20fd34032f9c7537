"""Properties of the machine on which this process runs."""

import os
import pathlib
import platform
import re

# Names in /proc/cpuinfo, widest vectors first. XLA's results are the same with AVX2 and AVX-512, but
# differ on older processors.
_VECTORS = ("avx512f", "avx2", "avx", "sse4_2")


def num_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    # Containers and batch systems often restrict a process to some cores, which macOS does not report.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Returns the processor's name, family, model and vector instructions, as far as known.

    An example is 'AMD EPYC (family 25, model 17, avx512f)'. The numbers identify the generation; in
    virtual machines, the name often does not.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    cpuinfo = dict(
        re.findall(r"^(model name|cpu family|model|flags)\s*: (.*)$", text, re.MULTILINE)
    )
    if "model name" not in cpuinfo:
        return platform.processor() or platform.machine()
    flags = cpuinfo.get("flags", "").split()
    details = [
        *(
            f"{name} {cpuinfo[key]}"
            for name, key in (("family", "cpu family"), ("model", "model"))
            if key in cpuinfo
        ),
        *[name for name in _VECTORS if name in flags][:1],
    ]
    return cpuinfo["model name"] + (f" ({', '.join(details)})" if details else "")

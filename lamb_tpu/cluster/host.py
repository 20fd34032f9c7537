"""Facts of the machine on which this process runs."""

import os
import pathlib
import platform
import re

# Widest first, as Linux names them. XLA rounds alike with AVX2 and AVX-512, and otherwise without.
_VECTORS = ("avx512f", "avx2", "avx", "sse4_2")


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    # Containers and batch systems often give a process fewer cores than the machine has. macOS does
    # not tell.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Returns the processor's name, family and vector instructions, or the machine's type.

    An example is 'AMD EPYC (family 25, model 17, avx512f)'. Virtual machines often shorten the
    name, so the numbers tell the generation. Only Linux on x86 reports them.
    """
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = dict(re.findall(r"^(model name|cpu family|model|flags)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    flags = found.get("flags", "").split()
    details = [
        *(
            f"{name} {found[key]}"
            for name, key in (("family", "cpu family"), ("model", "model"))
            if key in found
        ),
        *[name for name in _VECTORS if name in flags][:1],
    ]
    return found["model name"] + (f" ({', '.join(details)})" if details else "")

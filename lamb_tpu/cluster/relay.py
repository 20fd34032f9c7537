"""A filter for the stderr of one process of several: it turns JAX' abort into one sentence.

    python -I -S lamb_tpu/cluster/relay.py < PIPE

When another process is killed, stopped or cut off, JAX' coordination service aborts this one from a
C++ thread, with pages of logs and stacks that the process itself cannot suppress. They are held
back here; everything else passes through at once. The file imports nothing of the project, so that
it starts fast.
"""

import os
import re
import signal
import sys
from typing import BinaryIO

# A line of JAX' own log: level, date, time, thread, file.
_LOG = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ (?:coordination_\w+|preemption_sync_manager|client)\.(?:cc|h):\d+\]"
)
# Lines that follow such a line and belong to it.
_MORE = re.compile(
    rb"(?:\d+|\s*|The tasks have crashed.*|Additional GRPC error.*|:UNKNOWN:.*|:?\{.*|RPC: /.*"
    rb"|\*\*\* Check failure.*|    @ .*|=== Source Location Trace.*|\S+\.(?:cc|h):\d+)\s*$"
)
_FATAL = re.compile(rb"F\d{4} .* client\.h:\d+\]")


def relay(source: BinaryIO, target: BinaryIO) -> None:
    """Copies lines until the end; an abort because of another process becomes one sentence.

    Args:
      source: output of the process.
      target: destination of the output.
    """
    held: list[bytes] = []  # lines of JAX' log; written at the end if there was no abort
    fatal: list[bytes] = []  # lines from the abort on
    told = False
    # Line by line and not by blocks, so that output appears when it is written.
    for line in iter(source.readline, b""):
        # The process may have told its user already; then nothing of the log is added.
        own = line.startswith(b"error: ")
        told |= own
        # Behind the abort there are stacks only, of C++ and of Python.
        if fatal and not own:
            fatal.append(line)
        elif _FATAL.match(line):
            fatal.append(line)
        # `_MORE` also fits ordinary output, such as a number, so it counts only after a held line.
        elif _LOG.match(line) or (held and not own and _MORE.match(line)):
            held.append(line)
        else:
            target.write(line)
            target.flush()
    if not told:
        for line in [_sentence(fatal)] if fatal else held:
            target.write(line)
        target.flush()


def _sentence(fatal: list[bytes]) -> bytes:
    # The reason stands in the first lines, before remote errors and stacks.
    text = b" ".join(b"".join(fatal[:4]).partition(b"absl::Status: ")[2].split())
    reason = re.split(rb" RPC: | Additional GRPC| The tasks have crashed| \*\*\*", text)[0]
    return (
        b"error: another process of this run has ended, is stopped or cannot be reached, so this "
        b"one cannot go on (" + reason[:300] + b"); nothing that was saved is lost\n"
    )


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process, not before
    try:
        with os.fdopen(0, "rb") as lines, os.fdopen(2, "wb") as output:
            relay(lines, output)
    except OSError:  # nobody reads the output any more
        sys.exit(1)

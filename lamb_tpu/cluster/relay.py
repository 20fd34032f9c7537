"""Filters the stderr of one of several processes: shortens the output of JAX's abort to a sentence.

    python -I -S lamb_tpu/cluster/relay.py < PIPE

If another process is killed, stopped or disconnected, JAX's coordination service aborts this process
from a C++ thread, with pages of logs and stacks that this process cannot suppress. The filter
holds these pages back, and passes all other output through at once. It imports nothing from the
project, so that it starts fast.
"""

import os
import re
import signal
import sys
from typing import BinaryIO

# A line of JAX's log: level, date, time, thread, file.
_LOG = re.compile(
    rb"[IWEF]\d{4} [\d:.]+ +\d+ (?:coordination_\w+|preemption_sync_manager|client)\.(?:cc|h):\d+\]"
)
# Further lines of such a log message.
_MORE = re.compile(
    rb"(?:\d+|\s*|The tasks have crashed.*|Additional GRPC error.*|:UNKNOWN:.*|:?\{.*|RPC: /.*"
    rb"|\*\*\* Check failure.*|    @ .*|=== Source Location Trace.*|\S+\.(?:cc|h):\d+)\s*$"
)
_FATAL = re.compile(rb"F\d{4} .* client\.h:\d+\]")


def relay(source: BinaryIO, target: BinaryIO) -> None:
    """Copies all lines of `source`, but shortens the output of an abort that another process caused."""
    held: list[bytes] = []  # lines of JAX's log; written at the end if there was no abort
    fatal: list[bytes] = []  # lines since the abort
    reported = False
    # Copy line by line, not in blocks, so that output appears when it is written.
    for line in iter(source.readline, b""):
        # If the process has already printed an error, print nothing from the log.
        is_error = line.startswith(b"error: ")
        reported |= is_error
        # Only stacks of C++ and Python follow the abort.
        if fatal and not is_error:
            fatal.append(line)
        elif _FATAL.match(line):
            fatal.append(line)
        # `_MORE` also matches ordinary output, such as a number, so use it only after a held line.
        elif _LOG.match(line) or (held and not is_error and _MORE.match(line)):
            held.append(line)
        else:
            target.write(line)
            target.flush()
    if not reported:
        for line in [_sentence(fatal)] if fatal else held:
            target.write(line)
        target.flush()


def _sentence(fatal: list[bytes]) -> bytes:
    # The reason is in the first lines, before remote errors and stacks.
    text = b" ".join(b"".join(fatal[:4]).partition(b"absl::Status: ")[2].split())
    reason = re.split(rb" RPC: | Additional GRPC| The tasks have crashed| \*\*\*", text)[0]
    return (
        b"error: another process of this run has ended, is stopped or cannot be reached, so this "
        b"one cannot go on (" + reason[:300] + b"); nothing that was saved is lost\n"
    )


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the filter must not end before the process
    try:
        with os.fdopen(0, "rb") as lines, os.fdopen(2, "wb") as output:
            relay(lines, output)
    except OSError:  # the reader of the output is gone
        sys.exit(1)

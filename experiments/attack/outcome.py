"""Outcomes of a command with a bad input."""

import dataclasses
import re
from collections.abc import Collection

REJECTED, ACCEPTED = "rejected", "accepted"
TRACEBACK, HANG, MEMORY, KILLED = "traceback", "hang", "memory", "killed"
UNCLEAR, RAW, LEFT = "unclear", "raw output", "left behind"
# The two outcomes of a correct program come first.
OUTCOMES = (REJECTED, ACCEPTED, TRACEBACK, HANG, MEMORY, KILLED, UNCLEAR, RAW, LEFT)
MEANINGS = {
    REJECTED: "an error message of one sentence, and an exit status other than 0",
    ACCEPTED: "exit status 0; the table below gives the reason",
    TRACEBACK: "a Python traceback was printed",
    HANG: "the command was still running after 40 s of CPU time, or was idle for 25 s",
    MEMORY: "the command used more than 4 GiB of memory",
    KILLED: "the command was ended by a signal that the test had not sent",
    UNCLEAR: "an exit status other than 0, without an error message of one sentence",
    RAW: "control characters of the input reached the output",
    LEFT: "a process that the command had started was still running two seconds after the command ended",
}
_SENTENCE = re.compile(r"^(error: .|preempted|interrupted|[\w.-]+( [\w.-]+)*: error: .)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclasses.dataclass(frozen=True)
class End:
    """The end of a command.

    Attributes:
      status: exit status; if a signal ended the command, the negative number of the signal.
      out, err: standard output and standard error.
      seconds: wall time.
      stopped: `HANG`, `MEMORY` or `LEFT` if the command exceeded a limit, else ''.
    """

    status: int
    out: str
    err: str
    seconds: float
    stopped: str = ""


def classify(end: End, statuses: Collection[int] = ()) -> str:
    """Returns the outcome of a command.

    Args:
      end: how the command ended.
      statuses: nonzero exit statuses that need no error message, such as 141 after writing to a closed pipe.

    >>> classify(End(2, "", "error: --seeds=-1 must be at least 1\\n", 0.1))
    'rejected'
    >>> twice = "error: no x\\n  | error: no x\\n"  # the launcher quotes a log
    >>> classify(End(2, "", twice, 0.1))
    'rejected'
    >>> classify(End(1, "", "Traceback (most recent call last):\\n", 0.1))
    'traceback'
    """
    printed = end.out + end.err
    if re.search(r"Traceback \(most recent call last\)|^Exception ignored in", printed, re.M):
        return TRACEBACK
    if end.stopped:
        return end.stopped
    if end.status < 0 and end.status not in statuses:
        return KILLED
    if _CONTROLS.search(printed):
        return RAW
    if end.status == 0:
        return ACCEPTED
    lines = end.err.splitlines()
    sentences = [line for line in lines if _SENTENCE.match(line)]
    quoted = (line.removeprefix("  | ") for line in lines if line.startswith("  | "))
    sentences += {line for line in quoted if _SENTENCE.match(line)} - {*sentences}
    return REJECTED if end.status in statuses or len(sentences) == 1 else UNCLEAR

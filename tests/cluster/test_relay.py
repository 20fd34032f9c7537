"""The filtered stderr of a process that JAX aborts because of another process."""

import io
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from lamb_tpu.cluster import relay, signals
from tests import tiny
from tests.cluster.test_distributed import free_port

STOPPED = b"""\
E1122 10:10:29.857922   28423 coordination_service.cc:1549] [1261] Use error polling to propagate \
the following error to all tasks: UNAVAILABLE: The following tasks are unhealthy (stopped sending \
heartbeats):
1
The tasks have crashed. Check the task logs for an earlier error.
E1122 10:10:29.858568   28434 coordination_service_agent.cc:289] Polled an error from coordination \
service (this can be an error from this or another task).
F1122 10:10:29.862565   28434 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped \
sending heartbeats):
1
The tasks have crashed. Check the task logs for an earlier error.

RPC: /xla.coordination.CoordinationService/PollForError
*** Check failure stack trace: ***
    @     0x7f8ae7e40634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
Fatal Python error: Aborted

Thread 0x00007f8a548da6c0 (most recent call first):
  File "threading.py", line 331 in wait
"""
WARNING = b"""\
W1122 10:08:55.081138   26860 preemption_sync_manager.cc:147] Failed to retrieve preemption notice \
from coordination service: UNAVAILABLE: Socket closed
Additional GRPC error information from remote target coordination_service:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}.
"""
# JAX 0.12 adds these two lines to some messages of its log.
TRACE = b"""\
=== Source Location Trace: ===
external/xla+/xla/pjrt/distributed/coordination/coordination_service.cc:232
"""
SENTENCE = (
    b"error: another process of this run has ended, is stopped or cannot be reached, so this one "
    b"cannot go on (UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): "
    b"1); nothing that was saved is lost\n"
)
OWN = b"error: another process of this run has ended, so this one cannot go on\n"


@pytest.mark.parametrize(
    "written, seen",
    [
        (b"", b""),
        (b"one\n\ntwo\n1\n", b"one\n\ntwo\n1\n"),
        (b"no end", b"no end"),
        (b"\xff\x00\n", b"\xff\x00\n"),
        (STOPPED, SENTENCE),
        (b"a line\n" + STOPPED, b"a line\n" + SENTENCE),
        (WARNING + STOPPED + OWN, OWN),
        (WARNING + TRACE + STOPPED, SENTENCE),
        (b"file.cc:7\n", b"file.cc:7\n"),
        (OWN + WARNING + STOPPED, OWN),
        # Without an abort, the log is printed at the end.
        (WARNING + b"a line\n", b"a line\n" + WARNING),
        (
            b"F1122 10:10:29.862565 3 client.h:80] Terminating process absl::Status: DEADLINE: Deadline\n",
            SENTENCE.replace(
                SENTENCE.split(b"go on (")[1].split(b"); n")[0], b"DEADLINE: Deadline"
            ),
        ),
        (
            b"Traceback (most recent call last):\n  File x\nValueError: y\n",
            b"Traceback (most recent call last):\n  File x\nValueError: y\n",
        ),
    ],
)
def test_what_comes_through(written: bytes, seen: bytes) -> None:
    target = io.BytesIO()
    relay.relay(io.BytesIO(written), target)
    assert target.getvalue() == seen


def test_lines_pass_at_once_and_signals_do_not_end_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", relay.__file__], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.stdin.write(b"%d\n" % number)
        process.stdin.flush()
        assert process.stderr.readline() == b"%d\n" % number
        process.send_signal(number)
    _, rest = process.communicate(b"the end\n" + STOPPED, timeout=20)
    assert rest == b"the end\n" + SENTENCE and process.returncode == 0


@pytest.mark.long
def test_stopped_process(tmp_path: pathlib.Path) -> None:
    """Even without the launcher, the other process writes one sentence; JAX would write 45 lines."""
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "1",
        "NPROC": "32",
        "JAX_NUM_PROCESSES": "2",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.worker", "stop_in_a_sentence", str(tmp_path)],
            cwd=tiny.ROOT,
            env={**environment, "JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    try:
        _, output = processes[0].communicate(timeout=100)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert processes[0].returncode == signals.LOST_PEER
    assert output == SENTENCE, output.decode()

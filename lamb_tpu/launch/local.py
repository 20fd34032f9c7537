"""Runs several processes of one run on this machine, on simulated CPU devices.

The processes execute the same code as a run on many hosts, and communicate over loopback. No process
outlives the launcher.
"""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from lamb_tpu import limits, terminal
from lamb_tpu.cluster import children, signals
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets, writing
from lamb_tpu.launch import arguments as arguments_lib

# Time for the other processes to end after one has failed: they cannot continue, but may be writing
# a file.
_SECONDS_AFTER_FAILURE = 3.0
_POLL_SECONDS = 0.05
# A process that loses a peer may appear to end before this peer: wait before naming the cause.
_SETTLE_SECONDS = 0.2
_LINES_SHOWN = 20
_PROCESS_BYTES = 2**28  # lower bound of the memory of a process
_BYTES_READ = 2**20  # bytes read from the end of a log
_INTERRUPTED = 130  # exit status after Ctrl-C
_SHOW_CURSOR = "\x1b[?25h"  # a killed progress bar leaves the cursor hidden


@dataclasses.dataclass
class _Process:
    """One process of the run."""

    index: int  # process id in the run
    # The process. It leads a new session, so that its children can be ended with it.
    popen: subprocess.Popen
    log: pathlib.Path | None  # file for its output; None for the terminal
    log_start: int  # length of the log before this run, in bytes

    def status(self) -> int | None:
        """Returns the exit status, negative for a signal; None while the process runs."""
        if self.popen.returncode is None and self.popen.poll() is not None:
            self._signal_group(signal.SIGKILL)  # end children that the process left running
        return self.popen.returncode

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children if the process still runs."""
        if self.status() is None:  # the system may reuse the id of a process that has ended
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        """Kills the process, if it runs, and its children."""
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def ending(self) -> str:
        """Describes how the process ended."""
        status = self.status()
        if status is None:
            return "runs"
        if status >= 0:
            return f"ended with status {status}"
        return f"was ended by {signal.Signals(-status).name}"


def run_local(
    module: str,
    arguments: Sequence[str],
    num_processes: int,
    devices_per_process: int,
    grace_seconds: float,
) -> int:
    """Runs `python -m module arguments` in several processes of one run on this machine.

    No process outlives this function. On Linux, the processes also end if this process is killed.

    Args:
      module: dotted name of a module that calls `lamb_tpu.cluster.distributed.initialize`.
      arguments: arguments of the module. If they have --workdir, its folder `logs` holds the logs
        of all processes except the first; otherwise a temporary folder does.
      num_processes: number of processes, at least 1.
      devices_per_process: number of simulated CPU devices of each process.
      grace_seconds: time for the processes to end after this process received and forwarded a signal.

    Returns:
      0, or the exit status of the process that failed first (128 plus the signal number if a signal
      ended the process); `os.EX_TEMPFAIL` if the processes were preempted.

    Raises:
      UserError: the module does not exist, or the folder of the logs cannot be written.
    """
    _check_module(module)  # otherwise every process would report the error
    # `terminal.lasting` lets the processes save even if the terminal is closed.
    with terminal.lasting(), _signals_received() as received:
        log_folder, logs = pathlib.Path(), ""
        if num_processes > 1:
            log_folder = _log_folder(arguments)
            logs = f"; output of the other processes: {log_folder}/process-*.log"
        devices = f"{devices_per_process} CPU device(s) each, on this machine"
        _report(f"{num_processes} process(es) with {devices}{logs}")
        port = _free_port()
        processes: list[_Process] = []
        try:
            for index in range(num_processes):
                log = log_folder / f"process-{index}.log" if index else None
                environment = _environment(index, num_processes, devices_per_process, port)
                processes.append(_start(index, [module, *arguments], environment, log))
            return _supervise(processes, received, grace_seconds)
        finally:
            for process in processes:
                process.end()
            if sys.stdout.isatty():
                print(_SHOW_CURSOR, end="", flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        # For port 0 the system chooses a free port.
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(index: int, num_processes: int, devices: int, port: int) -> Mapping[str, str]:
    """Returns the environment that `lamb_tpu.cluster.distributed.initialize` and JAX read."""
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",  # accessible only from this machine
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(index),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # The CPU runtime sizes its thread pool by the number of cores. With fewer threads than
        # simulated devices, the all-reduce of a step can deadlock.
        "NPROC": str(max(32, 4 * devices)),
        "PYTHONUNBUFFERED": "1",  # preserves the last lines of a killed process
    }
    if {"grpc_proxy", "https_proxy", "http_proxy"} & environment.keys():
        environment["no_grpc_proxy"] = "127.0.0.1"  # gRPC must not use the proxy for loopback
    return environment


def _start(
    index: int, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path | None
) -> _Process:
    with contextlib.ExitStack() as stack:
        output: TextIO | None = None
        log_start = 0
        if log is not None:
            # Append to the logs of earlier starts; `log_start` marks the beginning of this start.
            # Read the position before the process exists, because the process shares it.
            output = stack.enter_context(log.open("a"))
            log_start = output.tell()
        popen = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,  # the terminal's Ctrl-C reaches only the launcher, which forwards it
            preexec_fn=children.following(),
        )
        return _Process(index, popen, log, log_start)


@contextlib.contextmanager
def _signals_received() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP in a list instead of ending this process."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        numbers.append(signal.SIGHUP)
    # The handlers only append; `_supervise` polls the list.
    before = [signal.signal(number, lambda got, frame: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _supervise(processes: Sequence[_Process], received: list[int], grace_seconds: float) -> int:
    """Waits for all processes, and ends them after a failure or signal; returns the exit status."""
    deadline = float("inf")
    forwarded = 0
    failed: _Process | None = None
    while running := [process for process in processes if process.status() is None]:
        if failed is None and any(process.status() for process in processes):
            # A process has failed, and the others cannot continue without it.
            time.sleep(_SETTLE_SECONDS)
            failed = _first_failed(processes)
            assert failed is not None  # a process had failed before the wait
            # Preempted processes save and then end without another signal.
            seconds = grace_seconds if _was_asked(failed) else _SECONDS_AFTER_FAILURE
            deadline = min(deadline, time.monotonic() + seconds)
            # After a forwarded signal the processes are expected to end.
            if not forwarded:
                _explain(failed)
                _signal_all(running, signal.SIGTERM)
        # Forward the first signal and leave time to save; kill after a second signal.
        for number in received[forwarded:]:
            forwarded += 1
            if forwarded == 1:
                _report(
                    f"{signal.Signals(number).name}: the processes have {grace_seconds:g} s to "
                    "save and end; send the signal again to kill them"
                )
                _signal_all(running, number)
                deadline = min(deadline, time.monotonic() + grace_seconds)
            else:
                deadline = 0.0
        if time.monotonic() >= deadline:
            names = ", ".join(str(process.index) for process in running)
            _report(f"killing the processes that did not end in time: {names}")
            for process in running:
                process.end()
            break
        time.sleep(_POLL_SECONDS)
    # The last process to run may have failed, or all ended between two polls.
    if failed is None:
        failed = _first_failed(processes)
        if failed is not None and not forwarded:
            _explain(failed)
    if failed is None:
        return 0
    if _is_preempted(failed):
        _report("preempted; start the same command again to resume")
        return os.EX_TEMPFAIL
    status = failed.status()
    assert status is not None  # it has ended
    if status in (_INTERRUPTED, -signal.SIGINT):
        _report("interrupted; start the same command again to resume")
    return status if status > 0 else 128 - status


def _is_preempted(process: _Process) -> bool:
    """Returns whether a process ended because of SIGTERM, with or without a save."""
    return process.status() in (os.EX_TEMPFAIL, -signal.SIGTERM)


def _was_asked(process: _Process) -> bool:
    """Returns whether a process ended because of SIGTERM or Ctrl-C, with or without a save."""
    # -SIGINT: before a program installs its handlers, Ctrl-C has the default action.
    return _is_preempted(process) or process.status() in (_INTERRUPTED, -signal.SIGINT)


def _signal_all(processes: Sequence[_Process], number: int) -> None:
    for process in processes:
        process.signal(number)
        process.signal(signal.SIGCONT)  # a stopped process handles no other signal


def _first_failed(processes: Sequence[_Process]) -> _Process | None:
    """Returns the process whose failure probably caused the other failures.

    A process that loses a peer ends with `signals.LOST_PEER`, or JAX aborts it. So a process that ended in
    another way is the likely cause, especially if no signal asked it to end.
    """
    failed = [process for process in processes if process.status()]
    return min(
        failed,
        # False sorts before True.
        key=lambda process: (
            process.status() in (signals.LOST_PEER, -signal.SIGABRT),
            _was_asked(process),
        ),
        default=None,
    )


def _explain(process: _Process) -> None:
    if _was_asked(process):
        return
    text = f"process {process.index} {process.ending()}"
    if process.log is None:
        _report(f"{text}; its output is above, and the output of other processes is in the logs")
        return
    try:
        with process.log.open("rb") as file:
            file.seek(max(process.log_start, os.path.getsize(process.log) - _BYTES_READ))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:  # the log was deleted with the workdir
        _report(f"{text}; its log {process.log} cannot be read ({error.strerror})")
        return
    # Leave out the pages of stack trace after JAX's last message.
    ends = [number for number, line in enumerate(lines) if line.startswith("*** Check failure")]
    shown = lines[: ends[0] if ends else None][-_LINES_SHOWN:]
    _report(f"{text}; its log {process.log} ends with:")
    print("".join(f"  | {line}\n" for line in shown), end="", file=sys.stderr, flush=True)


def _report(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(num_processes: int, devices_per_process: int) -> None:
    """Rejects more processes or devices than this machine can hold, before any process starts."""
    devices = num_processes * devices_per_process
    if devices > limits.MAX_CPU_DEVICES:
        raise UserError(
            "--processes",
            num_processes,
            f"with --devices-per-process={devices_per_process} makes {devices:,} simulated "
            "devices, each of which takes threads",
            f"use at most {limits.MAX_CPU_DEVICES:,} devices",
        )
    needed, memory = num_processes * _PROCESS_BYTES, _memory()
    if needed > memory:
        raise UserError(
            "--processes",
            num_processes,
            f"needs at least {needed / 2**30:,.0f} GiB ({_PROCESS_BYTES / 2**30:.2g} GiB for each "
            f"process), but this machine has {memory / 2**30:,.0f} GiB",
            f"use at most {memory // _PROCESS_BYTES:,} processes",
        )


def _log_folder(arguments: Sequence[str]) -> pathlib.Path:
    """Returns the folder `logs` in --workdir, or a temporary folder."""
    workdir = arguments_lib.workdir(arguments)
    # Logs are not written to a bucket.
    if workdir is None or buckets.is_remote(workdir):
        return pathlib.Path(tempfile.mkdtemp(prefix="lamb_tpu-logs-"))
    folder = pathlib.Path(workdir).expanduser().absolute() / "logs"
    with writing.checked(folder.parent, "--workdir"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _check_module(name: str) -> None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UserError("--module", name, "does not exist", "give a module such as lamb_tpu.train")

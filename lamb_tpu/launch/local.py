"""Several processes of one run on this machine, on simulated CPU devices.

They execute the code of a run on many hosts and talk over loopback. None outlives the launcher.
"""

import contextlib
import ctypes
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.launch import arguments as arguments_lib

# The time that the other processes have after one has failed. They can do nothing without it, but
# may complete a file that they are writing.
_SECONDS_AFTER_FAILURE = 3.0
_POLL_SECONDS = 0.05
# A process that loses another one may seem to end before that one: wait before deciding.
_SETTLE_SECONDS = 0.2
_LINES_SHOWN = 20
_BYTES_READ = 2**20  # at the end of a log
_PR_SET_PDEATHSIG = 1  # option of Linux' prctl
_INTERRUPTED = 130  # exit status after Ctrl-C
_SHOW_CURSOR = "\x1b[?25h"  # a progress bar that was killed has hidden it


@dataclasses.dataclass
class _Process:
    """One process of the run.

    Attributes:
      index: the process' id in the run.
      popen: the process. It leads a session of its own, so that its children can be ended with it.
      log: file for its output; None is the terminal.
      log_start: length of the log before this run, in bytes.
    """

    index: int
    popen: subprocess.Popen
    log: pathlib.Path | None
    log_start: int

    def status(self) -> int | None:
        """Returns the exit status; minus the signal that ended the process; None while it runs."""
        if self.popen.returncode is None and self.popen.poll() is not None:
            self._signal_group(signal.SIGKILL)  # children that it has left behind
        return self.popen.returncode

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children if it still runs."""
        if self.status() is None:  # later its id may belong to another program
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        """Kills the process, if it runs, and its children."""
        self.signal(signal.SIGKILL)
        self.popen.wait()

    def ending(self) -> str:
        """Returns a description of how the process ended."""
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
    log_folder: pathlib.Path,
) -> int:
    """Runs `python -m module arguments` in several processes of one run on this machine.

    No process outlives this function. On Linux none outlives this process, even if it is killed.

    Args:
      module: dotted name of a module that calls `lamb_tpu.cluster.distributed.initialize`.
      arguments: command-line arguments of the module.
      num_processes: number of processes, at least 1.
      devices_per_process: number of simulated CPU devices of each process.
      grace_seconds: time for the processes to end after a signal to this process, which is sent on.
      log_folder: folder for process-1.log and so on; process 0 writes where this process does.

    Returns:
      0, or the exit status of the process that failed first: 128 plus the signal's number if a
      signal ended it. `os.EX_TEMPFAIL` if the processes were preempted.
    """
    port = _free_port()
    processes: list[_Process] = []
    with _signals_received() as received:
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
        # For port 0 the system chooses a free one.
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(index: int, num_processes: int, devices: int, port: int) -> Mapping[str, str]:
    """Returns the environment that `lamb_tpu.cluster.distributed.initialize` and JAX read."""
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",  # open to this machine only
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(index),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # The CPU runtime sizes its thread pool by the number of cores. With fewer threads than
        # simulated devices the all-reduce of a step can wait forever.
        "NPROC": str(max(32, 4 * devices)),
        "PYTHONUNBUFFERED": "1",  # a killed process leaves its last lines
    }
    if {"grpc_proxy", "https_proxy", "http_proxy"} & environment.keys():
        environment["no_grpc_proxy"] = "127.0.0.1"  # gRPC would look for it behind the proxy
    return environment


def _start(
    index: int, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path | None
) -> _Process:
    with contextlib.ExitStack() as stack:
        output: TextIO | None = None
        log_start = 0
        if log is not None:
            # Logs of earlier starts are kept; `log_start` is where this start's begins. The
            # process shares the file's position, so it is asked for before there is a process.
            output = stack.enter_context(log.open("a"))
            log_start = output.tell()
        popen = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,  # the launcher forwards Ctrl-C; the terminal must not send it
            preexec_fn=_end_with_parent(),
        )
        return _Process(index, popen, log, log_start)


def _end_with_parent() -> Callable[[], None] | None:
    """Returns a function for a child to call first: the kernel then kills it with this process."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)

    return ask_kernel


@contextlib.contextmanager
def _signals_received() -> Iterator[list[int]]:
    """Collects Ctrl-C, SIGTERM and SIGHUP in a list instead of their usual effects."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # not under nohup
        numbers.append(signal.SIGHUP)
    # The handlers only take note: `_supervise` reads the list at each poll.
    before = [signal.signal(number, lambda got, frame: received.append(got)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _supervise(processes: Sequence[_Process], received: list[int], grace_seconds: float) -> int:
    """Waits for all processes, ends them after a failure or signal; returns the run's status."""
    deadline = float("inf")
    forwarded = 0
    failed: _Process | None = None
    while running := [process for process in processes if process.status() is None]:
        if failed is None and any(process.status() for process in processes):
            # A process has failed, and the others cannot go on without it.
            time.sleep(_SETTLE_SECONDS)
            failed = _first_failed(processes)
            assert failed is not None  # one had a status other than 0 before the wait
            # Preempted processes end by themselves, after their last save.
            seconds = grace_seconds if _was_asked(failed) else _SECONDS_AFTER_FAILURE
            deadline = min(deadline, time.monotonic() + seconds)
            # After a forwarded signal the processes are expected to end.
            if not forwarded:
                _explain(failed)
                _signal_all(running, signal.SIGTERM)
        # The first signal is passed on and leaves time to save; a second one kills.
        for number in received[forwarded:]:
            forwarded += 1
            if forwarded == 1:
                _tell(
                    f"{signal.Signals(number).name}: the processes have {grace_seconds:g} s to "
                    "save and end; again to kill them"
                )
                _signal_all(running, number)
                deadline = min(deadline, time.monotonic() + grace_seconds)
            else:
                deadline = 0.0
        if time.monotonic() >= deadline:
            names = ", ".join(str(process.index) for process in running)
            _tell(f"killing process {names}, which did not end in time")
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
        _tell("preempted; start the same command again to resume")
        return os.EX_TEMPFAIL
    status = failed.status()
    assert status is not None  # it has ended
    if status == _INTERRUPTED:
        _tell("interrupted; start the same command again to resume")
    return status if status > 0 else 128 - status


def _is_preempted(process: _Process) -> bool:
    """Returns whether a process was preempted: it saved and ended, or SIGTERM ended it early."""
    return process.status() in (os.EX_TEMPFAIL, -signal.SIGTERM)


def _was_asked(process: _Process) -> bool:
    """Returns whether a process ended because of SIGTERM or Ctrl-C, after saving."""
    return _is_preempted(process) or process.status() == _INTERRUPTED


def _signal_all(processes: Sequence[_Process], number: int) -> None:
    for process in processes:
        process.signal(number)
        process.signal(signal.SIGCONT)  # a stopped process would not receive it


def _first_failed(processes: Sequence[_Process]) -> _Process | None:
    """Returns the process whose failure probably caused the others'.

    JAX aborts a process when it loses another one, so a process that ended in another way is the
    cause. A preempted process never is.
    """
    failed = [process for process in processes if process.status()]
    return min(
        failed,
        # False sorts before True: processes that JAX aborted come last.
        key=lambda process: (process.status() == -signal.SIGABRT, _was_asked(process)),
        default=None,
    )


def _explain(process: _Process) -> None:
    if _was_asked(process):
        return
    text = f"process {process.index} {process.ending()}"
    if process.log is None:
        _tell(f"{text}; its output is above, that of any others in the logs")
        return
    try:
        with process.log.open("rb") as file:
            file.seek(max(process.log_start, os.path.getsize(process.log) - _BYTES_READ))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:  # the folder was deleted with the run's
        _tell(f"{text}; what it wrote in {process.log} cannot be read ({error.strerror})")
        return
    # Pages of a stack trace follow JAX' last message: leave them out.
    ends = [number for number, line in enumerate(lines) if line.startswith("*** Check failure")]
    shown = lines[: ends[0] if ends else None][-_LINES_SHOWN:]
    _tell(f"{text}; all that it wrote is in {process.log}, which ends:")
    print("".join(f"  | {line}\n" for line in shown), end="", file=sys.stderr, flush=True)


def _tell(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def run_here(
    module: str,
    arguments: Sequence[str],
    num_processes: int,
    devices_per_process: int,
    grace_seconds: float,
) -> int:
    """Says what will run and where its logs lie, then calls `run_local`.

    Args:
      module: as for `run_local`, as are the others.
      arguments: logs of processes but the first go to `logs` in the --workdir among them, or to a
        temporary folder.
      num_processes: number of processes.
      devices_per_process: simulated CPU devices of each.
      grace_seconds: time for the processes to end.

    Returns:
      The exit status, as `run_local`.

    Raises:
      UserError: the module does not exist, or the folder of the logs cannot be written.
    """
    _check_module(module)  # otherwise every process would report it
    folder, logs = pathlib.Path(), ""
    if num_processes > 1:
        folder = _log_folder(arguments)
        logs = f"; output of the others: {folder}/process-*.log"
    _tell(
        f"{num_processes} process(es) of {devices_per_process} CPU device(s) on this machine{logs}"
    )
    return run_local(module, arguments, num_processes, devices_per_process, grace_seconds, folder)


def _log_folder(arguments: Sequence[str]) -> pathlib.Path:
    """Returns `logs` in the --workdir among the arguments, or else a temporary folder."""
    workdir = arguments_lib.workdir(arguments)
    # The logs of processes of this machine stay on it.
    if workdir is None or buckets.is_remote(workdir):
        return pathlib.Path(tempfile.mkdtemp(prefix="lamb_tpu-logs-"))
    folder = pathlib.Path(workdir).expanduser().absolute() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--workdir {folder.parent} cannot be written ({error.strerror}); give a folder that "
            "can"
        ) from None
    return folder


def _check_module(name: str) -> None:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise UserError(f"--module={name}: there is no such module")

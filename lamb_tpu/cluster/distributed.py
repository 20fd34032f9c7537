"""Runs of several processes: joins the processes, and ends a process that fails or hangs.

JAX's coordination service aborts a process that cannot join the others. A process that fails waits at
exit for the others, while the others wait for it in a collective operation. This module detects such
failures earlier, and ends the processes with a message.
"""

import _thread
import atexit
import contextlib
import ctypes
import itertools
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from lamb_tpu.cluster import signals
from lamb_tpu.errors import UserError, listed, out_of_range, reason

# Time within which all hosts must start; JAX's default.
INITIALIZATION_SECONDS = 300
# Time after which a dead, stopped or unreachable process is detected and all others end; JAX's
# default is 100 s.
HEARTBEAT_SECONDS = 60
# Time that the first process to end waits for the last.
SHUTDOWN_SECONDS = 120
# JAX must give up later than this module, because JAX's message does not help.
_MARGIN_SECONDS = 60
_SENTENCE_BYTES = 2048  # longest error that is sent to other processes
# Time that `leave` waits for `relay` to write the last output.
_RELAY_SECONDS = 5
_relay: subprocess.Popen | None = None
# Time that processes wait for each other if all end with the same error, so that all print it.
_LEAVING_SECONDS = 10
_leaves_with_all = False
# Keys of the coordination service for a process that was asked to end: JAX sets the first on
# SIGTERM, and `announce_end` the second.
_NOTICES = ("RECEIVED_PREEMPTION_NOTICE", "lamb_tpu/ends")
_NOTICE_SECONDS = 1.0
_ENDING_SECONDS = 2.0  # time that the thread of `follow_notices` has to end
_MEETING_SECONDS = 7 * 24 * 3600  # more than any compilation takes
_meetings = itertools.count()


def initialize_from_flags() -> None:
    """Calls `initialize` with the flags and, if it joins processes, `relay_stderr` and `follow_notices`."""
    values = flags.FLAGS
    initialize(values.coordinator_address, values.num_processes, values.process_id)
    if jax.distributed.is_initialized():
        relay_stderr()
        follow_notices()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_seconds: int = INITIALIZATION_SECONDS,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
) -> None:
    """Joins the processes of this run; call before anything uses JAX's devices.

    Missing values come from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then
    from JAX's cluster detection (on a TPU VM, or under SLURM or Open MPI). Has no effect if no
    cluster is detected, or if the run has only one process.

    Afterwards SIGTERM no longer ends the process. JAX treats it as a preemption notice, which
    `jax.experimental.multihost_utils.reached_preemption_sync_point` reports.

    Args:
      coordinator_address: HOST:PORT at which process 0 listens.
      num_processes: number of processes of the run, at least 1.
      process_id: id of this process, 0 to `num_processes - 1`.
      initialization_seconds: time to wait until all processes have joined.
      heartbeat_seconds: if a process sends no heartbeat for this time, all others end.
      shutdown_seconds: time that the first process to end waits for the last to end.

    Raises:
      UserError: a value is missing or out of range, process 0 cannot listen, or this process
        cannot reach process 0. If other processes do not join in time, this process ends with a
        message and status 2.
    """
    if jax.distributed.is_initialized():
        return
    # All waits below share one time limit.
    began = time.monotonic()
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    # JAX also reads Open MPI's variables, but JAX 0.10 does not read those of Open MPI 5.
    count = _first(num_processes, "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE")
    index = _first(process_id, "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK")
    # A run of one process has nothing to join. `_check` rejects a single process with an index above 0.
    if count == 1 and not index:
        return
    complete = None not in (address, count, index)
    if not complete:
        address, count, index = _detect(address, count, index, initialization_seconds)
    if (address, count, index) == (None, None, None) or (count == 1 and not index):
        return
    address, count, index = _check(address, count, index)

    def left() -> float:
        return max(0.0, began + initialization_seconds - time.monotonic())

    _leave_when_aborted()
    # Check the port before calling JAX, which would wait or abort.
    if index == 0:
        _check_port(address)
    else:
        _wait_for_port(address, f"process {index} of {count}", initialization_seconds, left)
    # Use a thread, because the main thread waits inside JAX's C++ code.
    timer = threading.Timer(left(), _give_up, (address, index, count, initialization_seconds))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            # If all values are given, a surrounding cluster must not assign devices.
            cluster_detection_method="deactivate" if complete else None,
            initialization_timeout=int(left()) + _MARGIN_SECONDS,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=shutdown_seconds,
        )
    finally:
        timer.cancel()


def _leave_when_aborted() -> None:
    """Turns JAX's abort after the loss of another process into an exit with `signals.LOST_PEER`.

    JAX aborts from a C++ thread, where Python cannot handle the signal. Therefore the handler of
    SIGABRT is the C library's `_exit`, which takes the signal's number as the exit status.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library._exit, ctypes.c_void_p))


def announce_end() -> None:
    """Asks the other processes to end with this one, unless they have something to save."""
    with contextlib.suppress(Exception):  # there is only one process, or it has not joined yet
        client().key_value_set(_NOTICES[1], "1", allow_overwrite=True)


def follow_notices() -> threading.Thread:
    """Starts a thread that calls the handler of SIGTERM once any process has been asked to end.

    JAX's handler of SIGTERM only records the signal in the coordination service, which a run polls
    between updates; the thread is for the time before the first update. The thread ends before the
    interpreter exits: a thread that is then in JAX's C++ code would abort the process.
    """
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(over,), name="notices", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(_ENDING_SECONDS)

    atexit.register(end)
    return thread


def _follow(over: threading.Event) -> None:
    while not over.wait(_NOTICE_SECONDS) and not signals.ending.is_set():
        if signals.saving.is_set():
            continue
        service = client()
        if service is None:  # JAX has left the service: the program is ending
            return
        for key in _NOTICES:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the key is not set
                service.key_value_try_get(key)
                # A second signal would end the process without a message.
                if not signals.saving.is_set() and not signals.received.is_set():
                    _thread.interrupt_main(signal.SIGTERM)
                return


def meet() -> None:
    """Waits until all processes of the run have called this function the same number of times."""
    client().wait_at_barrier(f"lamb_tpu/meeting/{next(_meetings)}", _MEETING_SECONDS * 1000)


def _first(value: int | None, *variables: str) -> int | None:
    """Returns `value`; if it is None, the number in the first of `variables` that is set, or None."""
    if value is not None:
        return value
    for name in variables:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                problem = "in the environment is not a whole number"
                raise UserError(name, os.environ[name], problem, "correct or unset it") from None
    return None


def _detect(
    address: str | None, count: int | None, index: int | None, seconds: int
) -> tuple[str | None, int | None, int | None]:
    """Returns the values; fills in missing ones with JAX's cluster detection."""
    # JAX has no public function that detects a cluster without joining it.
    from jax._src.clusters import ClusterEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from a Kubernetes pod without the kubernetes package
        try:
            address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
                address, count, index, [], None, seconds
            )
        except Exception as error:  # from an HTTP request, or another program's variables
            cause = reason(error)[:200]
            raise UserError(
                "JAX",
                ...,
                f"detects a cluster but cannot read its settings ({type(error).__name__}: {cause})",
                "give --coordinator-address, --num-processes and --process-id, or --num-processes=1",
            ) from error
    return address, count, index


def _check(address: str | None, count: int | None, index: int | None) -> tuple[str, int, int]:
    """Returns the three values; raises a UserError if a value is missing or invalid."""
    values = {"coordinator_address": address, "num_processes": count, "process_id": index}
    if count is not None and count < 1:
        raise out_of_range("--num-processes", count, "at least 1")
    missing = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is None]
    if address is None or count is None or index is None:
        known = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        problem = f"lacks {listed(missing, 'and')}"
        remedy = "add each missing flag, or start the run with lamb_tpu.launch, srun or mpirun"
        raise UserError(f"this process ({known})", ..., problem, remedy)
    # A process with an id out of range would wait forever.
    if not 0 <= index < count:
        valid = f"at least 0 and less than --num-processes={count}"
        raise out_of_range("--process-id", index, valid)
    if not re.fullmatch(r".+:\d+", address) or not 0 < _split(address)[1] < 2**16:
        raise UserError("--coordinator-address", address, "is not an address", "use HOST:PORT")
    return address, count, index


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    # Brackets surround an IPv6 address.
    return host.strip("[]"), int(port)


def _check_port(address: str) -> None:
    """Rejects a port on which another program listens: gRPC would let two runs share the port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run may have just ended
        try:
            probe.bind(("", _split(address)[1]))
        except OSError as error:
            raise UserError(
                "process 0",
                ...,
                f"cannot listen at {address} ({error.strerror})",
                "end the program that uses the port, or give all processes another --coordinator-address",
            ) from None


def _wait_for_port(address: str, who: str, seconds: int, left: Callable[[], float]) -> None:
    """Waits until process 0 listens; raises a UserError when no time is `left`."""
    while True:
        try:
            # Limit each attempt to 5 seconds, because a host that drops packets never answers.
            socket.create_connection(_split(address), timeout=max(1.0, min(5.0, left()))).close()
            return
        except OSError as error:
            if not left():
                raise UserError(
                    who,
                    ...,
                    f"could not reach process 0 at {address} in {seconds} s ({reason(error)})",
                    "check that process 0 is running, the address is right, and no firewall blocks it",
                ) from None
        time.sleep(0.2)


def _give_up(address: str, index: int, count: int, seconds: int) -> None:
    """Ends the process with a message while its main thread waits in JAX, before JAX aborts it."""
    proxies = [name for name in os.environ if re.fullmatch("(?i)(grpc|https?)_proxy", name)]
    print(
        f"error: process {index} of {count} has waited {seconds} s for all processes to meet at "
        f"{address}; check that all processes are running, that each has a different --process-id, "
        f"and that all have the same --num-processes"
        + (f"; unset {proxies[0]}, or add the host to no_proxy" if proxies else ""),
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def agree(error: UserError | None) -> None:
    """Raises an error in every process of the run if any process has one; all processes must call it.

    Raises the error of this process, or else that of the first process that has one.
    """
    if jax.process_count() > 1:
        # First send only whether there is an error; usually there is none.
        failed = multihost_utils.process_allgather(np.bool_(error is not None))
        if failed.any():
            # Pad the bytes with zeros: a gather needs the same shape in every process.
            text = np.zeros(_SENTENCE_BYTES, np.uint8)
            encoded = np.frombuffer(str(error or "").encode()[:_SENTENCE_BYTES], np.uint8)
            text[: len(encoded)] = encoded
            first = int(np.argmax(failed))
            sent = multihost_utils.process_allgather(text)[first].tobytes().rstrip(b"\0")
            raise of_all(
                error or UserError(f"process {first}", ..., f": {sent.decode(errors='replace')}")
            )
    if error is not None:
        raise error


def of_all(error: UserError) -> UserError:
    """Returns `error`, and notes that every process raises it, so that `leave` ends all together."""
    global _leaves_with_all
    _leaves_with_all = True
    return error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises a UserError in every process if the block raises one in any; all must enter the block."""
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    # Call this outside the `except` block, because processes without an error must take part.
    agree(failure)


def relay_stderr() -> None:
    """Sends stderr through `relay`, which shortens JAX's logs about a lost process."""
    global _relay
    reading, writing = os.pipe()
    _relay = subprocess.Popen(
        # Run isolated and without site-packages, to start fast.
        [sys.executable, "-I", "-S", str(pathlib.Path(__file__).with_name("relay.py"))],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the process must not end the relay too early
    )
    # Replace descriptor 2, because C++ code writes to it and not to sys.stderr. When this process
    # ends, the relay reaches the end of its pipe.
    os.close(reading)
    sys.stderr.flush()
    os.dup2(writing, 2)
    os.close(writing)


def leave(status: int, together: bool = False) -> NoReturn:
    """Ends this process after a failure; if it is one of several, without exit handlers.

    At an ordinary exit, a process would wait for the others, which wait for it in a collective
    operation, and would then be aborted instead of ending with `status`. If all processes end for
    the same reason (`together`), they briefly wait here for each other. Even then, `sys.exit` is
    not possible, because threads of a failed save may still wait for each other.
    """
    if not jax.distributed.is_initialized():
        sys.exit(status)
    with contextlib.suppress(OSError):  # a closed terminal
        sys.stdout.flush()
        sys.stderr.flush()
    if together or _leaves_with_all:
        with contextlib.suppress(Exception):
            client().wait_at_barrier("lamb_tpu/leave", _LEAVING_SECONDS * 1000)
        if index_and_count()[0] == 0:
            time.sleep(1)  # JAX aborts the others as soon as its service, in this process, ends
    if _relay is not None:
        # Close the last write end of the pipe, so that the relay ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _relay.wait(_RELAY_SECONDS)  # messages must appear before the process ends
    # Skip the exit handlers, because JAX's would wait for the other processes.
    os._exit(status)


def client() -> Any:
    """Returns the client of JAX's coordination service, for which JAX has no public function."""
    from jax._src import distributed

    return distributed.global_state.client


def index_and_count() -> tuple[int, int]:
    """Returns the index of this process and the number of processes.

    Unlike `jax.process_index`, does not wait until all processes have announced their devices.
    """
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


class Watchdog:
    """Ends the process if `progress` is not called within `limit_seconds`; 0 means no limit.

    The coordination service detects a process that is dead or stopped. A process that hangs on a
    file system or a lock counts as alive, and the others would wait forever. The limit includes
    compiling, saving, and waiting for the slowest process. Use as a context manager.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._over = threading.Event()

    def progress(self, what: str) -> None:
        """Restarts the time limit; `what` describes the completed work."""
        self._last = (time.monotonic(), what)

    def __enter__(self) -> "Watchdog":
        self._process = jax.process_index()
        self.progress("its start")
        if self._limit:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        # Check after each quarter of the limit, and at least once a second.
        while not self._over.wait(min(1.0, self._limit / 4)):
            when, what = self._last
            if time.monotonic() - when > self._limit:
                main = threading.main_thread().ident
                assert main is not None  # the thread has started
                # Print the main thread's stack here, because that thread hangs.
                frame = sys._current_frames()[main]
                print(
                    f"error: process {self._process} has made no progress in {self._limit:g} s "
                    f"since {what}; it hangs, or waits for another process that hangs, at this line:\n"
                    + "".join(traceback.format_stack(frame)),
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

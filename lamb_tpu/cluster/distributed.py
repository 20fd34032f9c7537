"""Several processes as one run: joining them, and ending a process that fails or hangs.

JAX' coordination service ends a process with SIGABRT if it cannot join the others. A process that
fails waits for the others, which wait for it in a collective operation. So failures are detected or
ended here first, with one sentence each.
"""

import contextlib
import os
import pathlib
import re
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

from lamb_tpu.errors import UserError

# Time for hosts that do not start together; JAX' own default.
INITIALIZATION_SECONDS = 300
# Time within which a dead, stopped or unreachable process is noticed and all others end; JAX'
# default is 100 s.
HEARTBEAT_SECONDS = 60
# The largest time between the ends of two processes: the first waits for the last.
SHUTDOWN_SECONDS = 120
# JAX must give up later than this module, because its message does not help.
_MARGIN_SECONDS = 60
_SENTENCE_BYTES = 2048  # length of an error that is sent to the other processes
# Time for the last lines of a process that leaves.
_RELAY_SECONDS = 5
_relay: subprocess.Popen | None = None
# Time that processes wait for each other when all end with the same error, so that all print it.
_LEAVING_SECONDS = 10
_leaves_with_all = False


def initialize_from_flags() -> None:
    """Calls `initialize` with the flags of `cli.define_process_flags`; stderr then goes to `relay`."""
    values = flags.FLAGS
    initialize(values.coordinator_address, values.num_processes, values.process_id)
    if jax.distributed.is_initialized():
        relay_stderr()


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_seconds: int = INITIALIZATION_SECONDS,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    shutdown_seconds: int = SHUTDOWN_SECONDS,
) -> None:
    """Joins the processes of this run; call before anything asks JAX for a device.

    Missing values come from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then
    from JAX' own detection: a TPU VM's metadata, SLURM, Open MPI. If nothing is found, or the run
    has only one process, nothing is changed.

    Afterwards SIGTERM no longer ends the process. JAX treats it as the notice of a preemption,
    which `jax.experimental.multihost_utils.reached_preemption_sync_point` reports.

    Args:
      coordinator_address: HOST:PORT at which process 0 listens.
      num_processes: number of processes of the run, at least 1.
      process_id: id of this process, 0 to `num_processes - 1`.
      initialization_seconds: time to wait for all processes.
      heartbeat_seconds: time after which a silent process ends the others.
      shutdown_seconds: time that the first process to end waits for the last.

    Raises:
      UserError: a value is missing or out of range, process 0 cannot listen, or this process
        cannot reach it. If other processes do not arrive, this process ends with such a sentence
        and status 2.
    """
    if jax.distributed.is_initialized():
        return
    # All waiting below shares one limit.
    began = time.monotonic()
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    # JAX reads Open MPI's variables too, but JAX 0.10 does not from Open MPI 5 on.
    count = _first(num_processes, "JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE")
    index = _first(process_id, "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK")
    # A run of one process stays as it is. With an index other than 0 it is a mistake, which
    # `_check` refuses.
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

    # Both failures are found before JAX is called, which would wait or abort.
    if index == 0:
        _check_port(address)
    else:
        _wait_for_port(address, f"process {index} of {count}", initialization_seconds, left)
    # A thread, because the main one waits inside JAX' C++ code.
    timer = threading.Timer(left(), _give_up, (address, index, count, initialization_seconds))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            # With all values given, no surrounding cluster may assign devices either.
            cluster_detection_method="deactivate" if complete else None,
            initialization_timeout=int(left()) + _MARGIN_SECONDS,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=shutdown_seconds,
        )
    finally:
        timer.cancel()


def _first(value: int | None, *variables: str) -> int | None:
    """Returns the value, or else that of the first environment variable that is set."""
    if value is not None:
        return value
    for name in variables:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise UserError(
                    f"{name} is {os.environ[name]!r} in the environment; it must be a whole number"
                ) from None
    return None


def _detect(
    address: str | None, count: int | None, index: int | None, seconds: int
) -> tuple[str | None, int | None, int | None]:
    """Returns the values, with missing ones filled in by JAX' cluster detection."""
    # JAX has no public function that detects a cluster without joining it.
    from jax._src.clusters import ClusterEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in a Kubernetes pod without Kubernetes' package
        try:
            address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
                address, count, index, [], None, seconds
            )
        except Exception as error:  # an HTTP request, another program's variables
            raise UserError(
                f"JAX finds a cluster but not the run's place in it ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}); give --coordinator_address, "
                "--num_processes and --process_id, or --num_processes=1 for a run of one process"
            ) from error
    return address, count, index


def _check(address: str | None, count: int | None, index: int | None) -> tuple[str, int, int]:
    """Returns the three values; refuses missing and wrong ones."""
    values = {"coordinator_address": address, "num_processes": count, "process_id": index}
    if count is not None and count < 1:
        raise UserError(f"num_processes is {count}; it must be at least 1")
    missing = [f"--{name}" for name, value in values.items() if value is None]
    if address is None or count is None or index is None:
        known = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        raise UserError(
            f"this is one process of several ({known}), but {' and '.join(missing)} cannot be "
            "found; give what is missing, or start the run with lamb_tpu.launch, srun or mpirun"
        )
    # A process with such an id would wait for a meeting that cannot take place.
    if not 0 <= index < count:
        raise UserError(
            f"process_id is {index} and num_processes {count}; ids must lie in 0..{count - 1}"
        )
    if not re.fullmatch(r".+:\d+", address) or not 0 < _split(address)[1] < 2**16:
        raise UserError(f"coordinator_address is {address!r}; it must be HOST:PORT")
    return address, count, index


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    # Brackets surround an IPv6 address.
    return host.strip("[]"), int(port)


def _check_port(address: str) -> None:
    """Refuses a port on which another program listens: gRPC would share it, even between runs."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a run may have just ended
        try:
            probe.bind(("", _split(address)[1]))
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen at {address} ({error.strerror}); end the program that "
                "holds the port, perhaps an earlier run, or give another --coordinator_address to "
                "all processes"
            ) from None


def _wait_for_port(address: str, who: str, seconds: int, left: Callable[[], float]) -> None:
    """Waits until process 0 listens."""
    while True:
        try:
            # A host that drops packets answers nothing; each attempt has seconds, not the whole
            # limit.
            socket.create_connection(_split(address), timeout=max(1.0, min(5.0, left()))).close()
            return
        except OSError as error:
            if not left():
                raise UserError(
                    f"{who} could not reach process 0 at {address} in {seconds} s "
                    f"({error.strerror or error}); check whether process 0 runs, whether the "
                    "address is the one it was given, and whether a firewall lies between"
                ) from None
        time.sleep(0.2)


def _give_up(address: str, index: int, count: int, seconds: int) -> None:
    """Ends the process with a sentence while its main thread waits in JAX, which would abort."""
    proxies = [name for name in os.environ if re.fullmatch("(?i)(grpc|https?)_proxy", name)]
    print(
        f"error: process {index} of {count} has waited {seconds} s for all processes to meet at "
        f"{address}; check which of them do not run, that each has its own --process_id and all "
        f"the same --num_processes"
        + (f", and that {proxies[0]} is not set or no_proxy has the host" if proxies else ""),
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def agree(error: UserError | None) -> None:
    """Raises in every process of the run when one of them has an error; all must call it.

    Raises:
      UserError: this process' own error, or that of the first process that has one.
    """
    if jax.process_count() > 1:
        # First whether there is an error at all, which is nearly always all that is sent.
        failed = multihost_utils.process_allgather(np.bool_(error is not None))
        if failed.any():
            # The same shape in every process, as a gather needs: bytes, padded with zeros.
            text = np.zeros(_SENTENCE_BYTES, np.uint8)
            own = np.frombuffer(str(error or "").encode()[:_SENTENCE_BYTES], np.uint8)
            text[: len(own)] = own
            first = int(np.argmax(failed))
            told = multihost_utils.process_allgather(text)[first].tobytes().rstrip(b"\0")
            raise of_all(error or UserError(f"process {first}: {told.decode(errors='replace')}"))
    if error is not None:
        raise error


def of_all(error: UserError) -> UserError:
    """Returns an error that every process raises now, so that `leave` lets them end together."""
    global _leaves_with_all
    _leaves_with_all = True
    return error


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises a UserError of the block in every process; all processes must enter the block."""
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    # Not in the `except` block: processes without an error have to take part too.
    agree(failure)


def relay_stderr() -> None:
    """Sends stderr through `relay`, which shortens JAX' pages about a lost process."""
    global _relay
    reading, writing = os.pipe()
    _relay = subprocess.Popen(
        # Isolated and without site-packages, so that it starts fast.
        [sys.executable, "-I", "-S", str(pathlib.Path(__file__).with_name("relay.py"))],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a signal to the process must not end the relay too early
    )
    # Descriptor 2 itself, because C++ code writes there and knows no sys.stderr. When this process
    # ends, the relay reads the end of its pipe.
    os.close(reading)
    sys.stderr.flush()
    os.dup2(writing, 2)
    os.close(writing)


def leave(status: int) -> NoReturn:
    """Ends a process after a failure of its own; one of several processes ends at once.

    At an ordinary exit a process would wait `shutdown_seconds` for the others, which wait for it in
    a collective operation, and then be aborted instead of ending with `status`. `sys.exit` is right
    if all processes end together, but not after `agree` has raised: threads of a failed save may
    still wait for each other. In that case all processes wait for each other here, for a short
    time.

    Args:
      status: exit status of the process.
    """
    if not jax.distributed.is_initialized():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    if _leaves_with_all:
        with contextlib.suppress(Exception):
            client().wait_at_barrier("lamb_tpu/leave", _LEAVING_SECONDS * 1000)
        if index_and_count()[0] == 0:
            time.sleep(1)  # JAX aborts the others as soon as its service, in this process, ends
    if _relay is not None:
        # This closes the last end of the pipe for writing, so that the relay comes to its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _relay.wait(_RELAY_SECONDS)  # messages must be visible before the process ends
    # No handlers of an ordinary exit: JAX's would wait for the other processes.
    os._exit(status)


def client() -> Any:
    """Returns the client of JAX' coordination service, for which JAX has no public function."""
    from jax._src import distributed

    return distributed.global_state.client


def index_and_count() -> tuple[int, int]:
    """Returns the index of this process and the number of processes, without asking for devices.

    `jax.process_index` waits until every process has announced its devices.
    """
    from jax._src import distributed

    return distributed.global_state.process_id, distributed.global_state.num_processes


class Watchdog:
    """Ends the process when it makes no progress for too long.

    The coordination service notices a process that is dead or stopped. A process that hangs (in a
    file system, a lock) counts as alive, and the others would wait forever. Use as a context
    manager:

        with Watchdog(limit_seconds=1800) as watchdog:
            ...
            watchdog.progress("update 7")

    Args:
      limit_seconds: the longest time between two calls of `progress`, which may include compiling,
        a save, and waiting for the slowest process. 0: no limit.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._over = threading.Event()

    def progress(self, what: str) -> None:
        """Resets the time limit; `what` was just completed."""
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
        # Often enough to notice within a quarter of the limit, and at least once a second.
        while not self._over.wait(min(1.0, self._limit / 4)):
            when, what = self._last
            if time.monotonic() - when > self._limit:
                main = threading.main_thread().ident
                assert main is not None  # it has begun
                # The stack of the main thread, which cannot print it itself.
                frame = sys._current_frames()[main]
                print(
                    f"error: process {self._process} has come no further in {self._limit:g} s "
                    f"since {what}; it hangs here, or waits here for a process that hangs:\n"
                    + "".join(traceback.format_stack(frame)),
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

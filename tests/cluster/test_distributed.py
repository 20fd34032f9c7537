"""Tests how processes join and leave a run, and which settings are detected or rejected."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu.cluster import distributed
from lamb_tpu.errors import UserError
from tests import tiny
from tests.raising import rejected

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost,node[002-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces jax.distributed.initialize, and returns a list that gets the arguments of each call."""
    calls = []

    def record(address: str, count: int, index: int, **others: Any) -> None:
        calls.append({"address": address, "count": count, "index": index, **others})

    for name in list(os.environ):
        if name.startswith(("JAX_COORD", "JAX_NUM_PROC", "JAX_PROC", "SLURM_", "OMPI_", "TPU_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(jax.distributed, "initialize", record)
    return calls


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def listening() -> Iterator[int]:
    """Yields a port at which a program listens without ever answering."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def address_and_ranks(call: dict[str, Any]) -> tuple[str, int, int]:
    return call["address"], call["count"], call["index"]


def test_nothing_is_done_for_one_process(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.initialize()
    distributed.initialize(num_processes=1)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    distributed.initialize()
    for name, value in (SLURM | {"SLURM_NTASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    monkeypatch.delenv("JAX_NUM_PROCESSES")
    distributed.initialize()
    assert joined == []


def test_arguments_come_before_the_environment(
    joined: list, monkeypatch: pytest.MonkeyPatch, listening: int
) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{listening}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    distributed.initialize()
    distributed.initialize(num_processes=9, process_id=8, heartbeat_seconds=7, shutdown_seconds=6)
    address = f"127.0.0.1:{listening}"
    assert [address_and_ranks(call) for call in joined] == [(address, 2, 1), (address, 9, 8)]
    first, second = joined
    # All values are given, so a surrounding cluster must not choose the process's devices.
    assert first["cluster_detection_method"] == "deactivate"
    assert (first["heartbeat_timeout_seconds"], first["shutdown_timeout_seconds"]) == (60, 120)
    assert (second["heartbeat_timeout_seconds"], second["shutdown_timeout_seconds"]) == (7, 6)
    # JAX aborts the process when it gives up, so JAX must give up last.
    assert first["initialization_timeout"] > distributed.INITIALIZATION_SECONDS


def test_slurm(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    (call,) = joined
    assert address_and_ranks(call) == (f"localhost:{65535 - 4095 + 7}", 4, 0)
    assert call["cluster_detection_method"] is None  # JAX detects Slurm to choose the devices


def test_open_mpi(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", f"{5 * 4096}.0;tcp://127.0.0.1:34911")
    distributed.initialize()
    assert address_and_ranks(joined[0]) == (f"127.0.0.1:{65535 - 4095 + 5}", 3, 0)


def test_open_mpi_5_needs_the_address(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI 5 does not report the address. Without an error, three separate runs would share a folder."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--coordinator-address"):
        distributed.initialize()
    address = f"127.0.0.1:{free_port()}"
    distributed.initialize(coordinator_address=address)
    assert [address_and_ranks(call) for call in joined] == [(address, 3, 0)]


@pytest.mark.parametrize(
    "endpoints", ["t1v-n-w-0,t1v-n-w-1", "a:b:127.0.0.1,a:b:10.0.0.2"], ids=["names", "addresses"]
)
def test_metadata_of_a_tpu_vm(
    joined: list, monkeypatch: pytest.MonkeyPatch, endpoints: str
) -> None:
    from jax._src.clusters import cloud_tpu_cluster

    metadata = {
        "agent-worker-number": "0",
        "worker-network-endpoints": endpoints,
        "tpu-env": "ACCELERATOR_TYPE: 'v3-16'",
    }
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (metadata[key], 200))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    distributed.initialize()
    host = endpoints.split(",")[0].rpartition(":")[2]
    assert [address_and_ranks(call) for call in joined] == [(f"{host}:8482", 2, 0)]

    joined.clear()
    metadata["worker-network-endpoints"] = endpoints.split(",")[0]
    distributed.initialize()
    assert joined == []  # a single host


def test_cluster_that_cannot_be_read(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_JOB_ID": "none"}).items():
        monkeypatch.setenv(name, value)
    with rejected("JAX", ..., "(ValueError: invalid literal", "or --num-processes=1"):
        distributed.initialize()


@pytest.mark.parametrize(
    "arguments, fields",
    [
        (
            (None, 2, None),
            ("*(num_processes=2)", ..., "lacks --coordinator-address and --process-id"),
        ),
        (("a:1", None, None), ("*(coordinator_address=a:1)", ..., "lacks --num-processes and --p")),
        (("a", 2, 0), ("--coordinator-address", "a", "is not an address", "use HOST:PORT")),
        (("a:0", 2, 0), ("--coordinator-address", "a:0", "is not an address", "use HOST:PORT")),
        (("a:1", 2, 2), ("--process-id", 2, "is out of range", "less than --num-processes=2")),
        (("a:1", 1, 1), ("--process-id", 1, "is out of range", "less than --num-processes=1")),
        (("a:1", 0, 0), ("--num-processes", 0, "is out of range", "use at least 1")),
    ],
)
def test_error(joined: list, arguments: tuple[Any, ...], fields: tuple[Any, ...]) -> None:
    with rejected(*fields):
        distributed.initialize(*arguments)
    assert not joined


def test_environment_that_is_no_number(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with rejected("JAX_NUM_PROCESSES", "two", "in the environment is not a whole number"):
        distributed.initialize()


def test_port_in_use(joined: list, listening: int) -> None:
    with rejected("process 0", ..., f"cannot listen at 127.0.0.1:{listening} "):
        distributed.initialize(f"127.0.0.1:{listening}", 2, 0)
    assert not joined


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_process_0_out_of_reach(joined: list, host: str) -> None:
    address, began = f"{host}:{free_port()}", time.monotonic()
    with rejected("process 1 of 2", ..., f"could not reach process 0 at {address} in 1 s ("):
        distributed.initialize(address, 2, 1, initialization_seconds=1)
    assert 1 <= time.monotonic() - began < 10 and not joined


def run(code: str) -> tuple[subprocess.CompletedProcess, float]:
    began = time.monotonic()
    done = tiny.python(f"from lamb_tpu.cluster import distributed\n{code}")
    return done, time.monotonic() - began


@pytest.mark.parametrize("index", [0, 1], ids=["others are missing", "process 0 is silent"])
def test_missing_process(listening: int, index: int) -> None:
    """The process prints one line and ends; JAX would abort it 5 s later, with a page of stack traces."""
    address = f"127.0.0.1:{listening if index else free_port()}"
    done, _ = run(f"distributed.initialize({address!r}, 2, {index}, initialization_seconds=1)")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: process {index} of 2 has waited 1 s for all processes to meet")
    assert address in line


def test_no_thread_is_in_jax_when_the_interpreter_ends() -> None:
    """A thread in JAX would abort the process: "FATAL: exception not rethrown"."""
    code = (
        "import atexit, jax, time\n"
        "from lamb_tpu.cluster import distributed\n"
        "class Client:\n"
        "    def key_value_try_get(self, key):\n"
        "        time.sleep(0.2)\n"
        "        raise jax.errors.JaxRuntimeError('there is no such key')\n"
        "distributed.client, distributed._NOTICE_SECONDS = Client, 0.001\n"
        # Exit handlers run in reverse order, so this handler runs last.
        "atexit.register(lambda: print(thread.is_alive()))\n"
        "thread = distributed.follow_notices()\n"
        "time.sleep(0.1)\n"
        "assert thread.is_alive()\n"
    )
    done = tiny.python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_flags() -> None:
    done, _ = run(
        "from absl import flags\n"
        "from lamb_tpu import cli\n"
        "cli.define_process_flags()\n"
        "flags.FLAGS(['x', '--coordinator_address=a', '--num_processes=3', '--process_id=2'])\n"
        "try:\n"
        "    distributed.initialize_from_flags()\n"
        "except distributed.UserError as error:\n"
        "    print(error)\n"
        "flags.FLAGS(['x', '--process_id=4'])\n"
        "distributed.initialize_from_flags()"
    )
    assert done.stdout == "--coordinator-address='a' is not an address; use HOST:PORT\n"
    assert "UserError: --process-id=4 is out of range; use at least 0 and less than" in done.stderr


def test_leaving_a_run_of_one_process() -> None:
    """A run of one process exits normally, with its exit handlers."""
    done, _ = run(
        "import atexit\n"
        "atexit.register(print, 'handlers run')\n"
        "distributed.initialize()\n"
        "distributed.leave(4)"
    )
    assert done.returncode == 4 and done.stdout == "handlers run\n", done.stderr


def test_watchdog_lets_live_what_goes_on() -> None:
    done, seconds = run(
        "import time\n"
        "with distributed.Watchdog(1.0) as watchdog:\n"
        "    for step in range(3):\n"
        "        time.sleep(0.5)\n"
        "        watchdog.progress(step)\n"
        "time.sleep(1.2)\n"
        "print('complete')"
    )
    assert done.returncode == 0 and done.stdout == "complete\n", done.stderr
    assert seconds > 2.7


def test_watchdog_without_a_limit() -> None:
    threads = threading.active_count()
    with distributed.Watchdog(0.0) as watchdog:
        watchdog.progress("update 3")
        assert threading.active_count() == threads


def test_watchdog_ends_what_hangs() -> None:
    done, seconds = run(
        "import time\n"
        "def lost():\n"
        "    time.sleep(600)\n"
        "with distributed.Watchdog(1.0) as watchdog:\n"
        "    watchdog.progress('update 3')\n"
        "    lost()"
    )
    assert done.returncode == 1 and seconds < 30
    # Outside Google Cloud, libtpu may print a warning before this message.
    _, problem, stack = done.stderr.partition(
        "process 0 has made no progress in 1 s since update 3"
    )
    assert problem and any(line.endswith("in lost") for line in stack.splitlines())


def test_error_of_one_process_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.agree(None)
    with distributed.together():
        pass
    with pytest.raises(UserError, match="^own$"), distributed.together():
        raise UserError("own")
    with pytest.raises(KeyError), distributed.together():
        raise KeyError  # other exceptions are raised without waiting for the other processes
    # Values gathered from three processes: first whether there is an error, then its text.
    others = iter([[False, True], ["", "its disk is full: ä"]])

    def gathered(local: np.ndarray) -> np.ndarray:
        rows = [local]
        for value in next(others):
            row = np.zeros_like(local)
            if isinstance(value, bool):
                row = np.asarray(value)
            else:
                row[: len(value.encode())] = np.frombuffer(value.encode(), np.uint8)
            rows.append(row)
        return np.stack(rows)

    monkeypatch.setattr(distributed, "_leaves_with_all", False)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gathered)
    with rejected("process 2", ..., ": its disk is full: ä"):
        distributed.agree(None)

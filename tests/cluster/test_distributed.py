"""Joining the processes of a run: what is found, what is refused, and how one leaves."""

import os
import socket
import subprocess
import sys
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
    """The arguments of the calls of jax.distributed.initialize, which is not called."""
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
    """A port at which something listens that never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def place(call: dict[str, Any]) -> tuple[str, int, int]:
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
    assert [place(call) for call in joined] == [(address, 2, 1), (address, 9, 8)]
    first, second = joined
    # All is said: whatever cluster there is around the process, its devices are its own.
    assert first["cluster_detection_method"] == "deactivate"
    assert (first["heartbeat_timeout_seconds"], first["shutdown_timeout_seconds"]) == (60, 120)
    assert (second["heartbeat_timeout_seconds"], second["shutdown_timeout_seconds"]) == (7, 6)
    # JAX aborts the process when it gives up, so it must be the last to do so.
    assert first["initialization_timeout"] > distributed.INITIALIZATION_SECONDS


def test_slurm(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    (call,) = joined
    assert place(call) == (f"localhost:{65535 - 4095 + 7}", 4, 0)
    assert call["cluster_detection_method"] is None  # JAX also chooses this task's devices


def test_open_mpi(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", f"{5 * 4096}.0;tcp://127.0.0.1:34911")
    distributed.initialize()
    assert place(joined[0]) == (f"127.0.0.1:{65535 - 4095 + 5}", 3, 0)


def test_open_mpi_5_needs_the_address(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not tell where process 0 is; silence would be three runs in one folder."""
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--coordinator_address"):
        distributed.initialize()
    address = f"127.0.0.1:{free_port()}"
    distributed.initialize(coordinator_address=address)
    assert [place(call) for call in joined] == [(address, 3, 0)]


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
    assert [place(call) for call in joined] == [(f"{host}:8482", 2, 0)]

    joined.clear()
    metadata["worker-network-endpoints"] = endpoints.split(",")[0]
    distributed.initialize()
    assert joined == []  # a host alone


def test_cluster_that_cannot_be_read(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_JOB_ID": "none"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="ValueError: .*'none'.*or --num_processes=1 for a run of"):
        distributed.initialize()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_processes=2), "(num_processes 2), but --coordinator_address and --process_id "),
        (dict(coordinator_address="a:1"), "--num_processes and --process_id cannot be found"),
        (dict(coordinator_address="a", num_processes=2, process_id=0), "'a'; it must be HOST:PORT"),
        (dict(coordinator_address="a:0", num_processes=2, process_id=0), "must be HOST:PORT"),
        (dict(coordinator_address="a:1", num_processes=2, process_id=2), "process_id is 2 and num"),
        (dict(coordinator_address="a:1", num_processes=1, process_id=1), "process_id is 1 and num"),
        (dict(coordinator_address="a:1", num_processes=0, process_id=0), "num_processes is 0; it"),
    ],
)
def test_mistake(joined: list, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        distributed.initialize(**arguments)
    assert message in str(error.value) and not joined


def test_environment_that_is_no_number(joined: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(UserError, match="JAX_NUM_PROCESSES is 'two' in the environment"):
        distributed.initialize()


def test_port_in_use(joined: list, listening: int) -> None:
    with pytest.raises(UserError, match=f"process 0 cannot listen at 127.0.0.1:{listening} "):
        distributed.initialize(f"127.0.0.1:{listening}", 2, 0)
    assert not joined


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_process_0_out_of_reach(joined: list, host: str) -> None:
    address, began = f"{host}:{free_port()}", time.monotonic()
    with pytest.raises(UserError) as error:
        distributed.initialize(address, 2, 1, initialization_seconds=1)
    assert f"process 1 of 2 could not reach process 0 at {address} in 1 s (" in str(error.value)
    assert 1 <= time.monotonic() - began < 10 and not joined


def run(code: str) -> tuple[subprocess.CompletedProcess, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", f"from lamb_tpu.cluster import distributed\n{code}"],
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, time.monotonic() - began


@pytest.mark.parametrize("index", [0, 1], ids=["others are missing", "process 0 is silent"])
def test_meeting_that_does_not_take_place(listening: int, index: int) -> None:
    """JAX by itself would abort the process, five seconds later, with a page of its stack."""
    address = f"127.0.0.1:{listening if index else free_port()}"
    done, _ = run(f"distributed.initialize({address!r}, 2, {index}, initialization_seconds=1)")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: process {index} of 2 has waited 1 s for all processes to meet")
    assert address in line


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
    assert done.stdout == "coordinator_address is 'a'; it must be HOST:PORT\n"
    assert done.stderr.endswith("process_id is 4 and num_processes 3; ids must lie in 0..2\n")


def test_leaving_a_run_of_one_process() -> None:
    """An ordinary exit, with its handlers."""
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
    first, *stack = done.stderr.splitlines()
    assert "process 0 has come no further in 1 s since update 3" in first
    assert any(line.endswith("in lost") for line in stack)


def test_error_of_one_process_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed.agree(None)
    with distributed.together():
        pass
    with pytest.raises(UserError, match="^own$"), distributed.together():
        raise UserError("own")
    with pytest.raises(KeyError), distributed.together():
        raise KeyError  # what is no user's is not waited with
    # What the others of three have, first whether, then what.
    others = iter([[False, True], ["", "its disk is full: ä"]])

    def gathered(own: np.ndarray) -> np.ndarray:
        rows = [own]
        for value in next(others):
            row = np.zeros_like(own)
            if isinstance(value, bool):
                row = np.asarray(value)
            else:
                row[: len(value.encode())] = np.frombuffer(value.encode(), np.uint8)
            rows.append(row)
        return np.stack(rows)

    monkeypatch.setattr(distributed, "_leaves_with_all", False)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gathered)
    with pytest.raises(UserError, match="^process 2: its disk is full: ä$"):
        distributed.agree(None)

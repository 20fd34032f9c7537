"""The program of the launcher's tests: `python -m tests.worker MODE FOLDER`.

Each process writes its id into FOLDER, so that a test can check whether the process has ended.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

INDEX = int(os.environ["JAX_PROCESS_ID"])
HEARTBEAT_SECONDS = 3
WATCHDOG_SECONDS = 2.0


def sleep() -> None:
    time.sleep(600)


def fail() -> None:
    """Process 1 fails while the other processes sleep; each process has a child."""
    child = subprocess.Popen(["sleep", "600"])
    announce(child.pid)
    if INDEX == 1:
        print("\n".join(f"line {number}" for number in range(1, 31)))
        sys.exit(3)
    sleep()


def abort() -> None:
    """Process 1 prints what JAX prints before an abort, and aborts."""
    if INDEX == 1:
        print("the reason\n*** Check failure stack trace: ***\n    @ 0x1 function", flush=True)
        os.abort()
    sleep()


def preempted() -> None:
    """Process 0 ends with the status of a saved run; process 1 ignores SIGTERM and ends 4 seconds later."""
    if INDEX == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(4)
    sys.exit(os.EX_TEMPFAIL)


def fail_at_the_end() -> None:
    """Process 1 fails; process 0 ends as preempted once no SIGTERM can stop process 1 any more."""
    if INDEX == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        announce(os.getpid())
        sys.exit(3)
    while not any(folder.iterdir()):
        time.sleep(0.01)
    sys.exit(os.EX_TEMPFAIL)


def stubborn() -> None:
    """Process 0 ignores all signals but SIGKILL; then process 1 fails."""
    if INDEX == 1:
        while not any(folder.iterdir()):
            time.sleep(0.01)
        sys.exit(3)
    deaf()


def deaf() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    announce(os.getpid())
    sleep()


def save() -> None:
    """Ends one second after a signal, as if it were saving, with the status 40 + the signal's number."""

    def receive(number: int, frame: object) -> None:
        time.sleep(1)
        print(f"saved after {signal.Signals(number).name}")
        sys.exit(40 + number)

    signal.signal(signal.SIGINT, receive)
    signal.signal(signal.SIGTERM, receive)
    announce(os.getpid())
    sleep()


def total() -> float:
    """Returns the sum of the values of all devices; a device's value is the index of its process plus 1."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    local = np.full(jax.local_device_count(), INDEX + 1.0, np.float32)
    values = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("data")), local
    )
    return float(jax.jit(lambda x: x.sum())(values))


def join() -> None:
    from lamb_tpu.cluster import distributed

    distributed.initialize(heartbeat_seconds=HEARTBEAT_SECONDS)


def all_reduce() -> None:
    """Prints the sum over the devices of all processes."""
    join()
    import jax

    print(f"process {INDEX} of {jax.process_count()}, {jax.device_count()} devices: {total()}")


def leave() -> None:
    """Process 1 fails in the middle of a run; process 0 waits for process 1 in an all-reduce."""
    join()
    from lamb_tpu.cluster import distributed

    total()
    if INDEX == 1:
        print("the reason")
        distributed.leave(3)
    total()


def stop() -> None:
    """SIGSTOP stops process 1 in the middle of a run."""
    join()
    total()
    if INDEX == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    total()


def stop_in_a_sentence() -> None:
    """Stops process 1 as in `stop`, but after `distributed.relay_stderr`."""
    join()
    from lamb_tpu.cluster import distributed

    distributed.relay_stderr()
    total()
    if INDEX == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    total()


def hang() -> None:
    """Process 1 hangs outside of collectives."""
    join()
    from lamb_tpu.cluster import distributed

    with distributed.Watchdog(WATCHDOG_SECONDS) as watchdog:
        total()
        watchdog.progress("update 7")
        if INDEX == 1:
            sleep()
        total()


def announce(pid: int) -> None:
    """Records the id of a process, so that a test can check whether the process has ended."""
    (folder / str(pid)).touch()


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[2])
    mode = globals()[sys.argv[1]]
    if sys.argv[1] not in ("deaf", "stubborn", "save"):  # these modes announce the process later
        announce(os.getpid())
    mode()

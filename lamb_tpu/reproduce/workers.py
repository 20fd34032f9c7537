"""Trains runs of a table side by side, in several processes."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from lamb_tpu.cluster import children
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.engine import Finished, RunSetup, Take
from lamb_tpu.reproduce.jobs import Job

# JAX's environment variables for the share of accelerator memory that a process takes.
_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_MEMORY = 0.9  # share of an accelerator's memory for all processes together; programs need the rest


def run_side_by_side(
    take: Take, setup: RunSetup, processes: int, done: Callable[[Finished], None]
) -> None:
    """Runs jobs in several processes, which share the cores and accelerators of the machine.

    Each process takes one job after another. Before this function returns or raises, it asks every
    process to save, and waits until all processes have ended. `take` and `done` are called in this process,
    see `engine.run_one_by_one`; `take` is called again after each job, because the job's record may make
    further jobs due.
    """
    # Use huge pages, because arrays are mapped again in every step: page faults took a fifth of the time
    # of an LSTM language model on a CPU.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # Do not fork: JAX threads would be copied in an arbitrary state.
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, Any] = {}
    running: dict[Connection, Sequence[Job]] = {}
    shares = _shares(processes)
    memory = memory_share(processes, os.environ)
    os.environ.setdefault(_PREALLOCATE, "false")  # this process may initialize the devices too

    def give() -> None:
        """Gives jobs to idle processes, and starts processes if there are too few."""
        while len(running) < processes and (taken := take()) is not None:
            idle = next((pipe for pipe in workers if pipe not in running), None)
            if idle is None:
                idle, worker_end = context.Pipe()
                share = shares[len(workers)]
                workers[idle] = context.Process(
                    target=_work, args=(worker_end, share, setup, memory), daemon=False
                )
                workers[idle].start()
                worker_end.close()
            running[idle] = taken[0]
            try:
                idle.send(taken)
            except OSError:
                raise _ended(taken[0][0]) from None

    try:
        give()
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                jobs = running.pop(pipe)
                try:
                    outcome = pipe.recv()
                except (EOFError, OSError):  # OSError: the process ended before it read its job
                    raise _ended(jobs[0]) from None
                if isinstance(outcome, BaseException):
                    raise outcome
                for finished in outcome:
                    done(finished)
            give()
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join()


def memory_share(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables that give each process its share of accelerator memory.

    By default the first process would take three quarters of the memory, and the others would fail.
    Returns no variables if there is only one process, or if the user has set a share. CPUs
    ignore the variables.
    """
    if processes == 1 or not environment.keys().isdisjoint(_FRACTIONS):
        return {}
    return {_FRACTIONS[0]: f"{_MEMORY / processes:.3f}"}


def _ended(job: Job) -> UserError:
    return UserError(
        f"the process of {job.name}",
        problem="was killed or could not start",
        remedy="start the same command again",
    )


def _shares(processes: int) -> list[set[int]]:
    """Returns the cores of each process; empty sets if there are fewer cores than processes."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < processes:
        return [set() for _ in range(processes)]
    return [set(cores[number::processes]) for number in range(processes)]


def _work(
    pipe: Connection, cores: set[int], setup: RunSetup, environment: Mapping[str, str]
) -> None:
    """Runs jobs received through the pipe, until the pipe is closed."""
    os.environ.update(environment)  # JAX reads these variables when it initializes the devices
    if cores:
        os.sched_setaffinity(0, cores)
    # Disable the progress bars of rich: several cannot share a terminal.
    os.environ["TTY_COMPATIBLE"] = "0"
    # Ctrl-C reaches every process of a terminal; ignore it here, because the parent passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None  # this is a worker
    children.follow_parent(parent.pid, signal.SIGTERM)  # makes a run save and exit
    # If the parent was killed, the pipe is broken, so no process can receive a report.
    with contextlib.suppress(EOFError, OSError):
        while True:
            jobs, checkpoints = pipe.recv()
            try:
                outcome: list[Finished] | BaseException = engine.execute_together(
                    jobs, setup, checkpoints
                )
            except (Preempted, UserError) as error:
                outcome = error
            pipe.send(outcome)
            if isinstance(outcome, BaseException):
                return

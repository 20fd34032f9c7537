"""Runs of a table side by side, each in a process of its own."""

import collections
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.reproduce import engine
from lamb_tpu.reproduce.engine import Finished, Place
from lamb_tpu.reproduce.jobs import Job

_POLL_SECONDS = 1.0


def run_side_by_side(
    jobs: Sequence[Job],
    place: Place,
    processes: int,
    begun: Callable[[Job], None],
    done: Callable[[Finished], None],
) -> None:
    """Runs jobs in several processes, which share the cores of the machine between them.

    However this function ends, every process is asked to save and has ended by then.

    Args:
      jobs: in the order in which they begin.
      place: the folders.
      processes: how many run at a time.
      begun, done: as of `engine.run_one_by_one`; called in this process.

    Raises:
      UserError: a run has a mistake, or its process was killed.
    """
    # Huge pages for the workers' arrays, which are mapped anew in every step: without them a fifth
    # of the time of an LSTM language model on a CPU was page faults.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    # A fork would copy JAX' threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    waiting = collections.deque(jobs)
    workers: dict[Connection, Any] = {}
    running: dict[Connection, Job] = {}
    try:
        for share in _shares(min(processes, len(jobs))):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, share, place), daemon=False)
            worker.start()
            theirs.close()
            workers[ours] = worker
            _give(ours, waiting, running, begun)
        while running:
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                job = running.pop(pipe)
                try:
                    found = pipe.recv()
                except EOFError:
                    raise UserError(
                        f"the process of {job.name} was killed; start the same command again"
                    ) from None
                if isinstance(found, BaseException):
                    raise found
                done(found)
                _give(pipe, waiting, running, begun)
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            worker.join()


def _give(
    pipe: Connection,
    waiting: "collections.deque[Job]",
    running: dict[Connection, Job],
    begun: Callable[[Job], None],
) -> None:
    if waiting:
        running[pipe] = waiting.popleft()
        begun(running[pipe])
        pipe.send(running[pipe])


def _shares(processes: int) -> list[set[int]]:
    """Returns the cores of each process; empty sets where there are fewer cores than processes."""
    if not hasattr(os, "sched_getaffinity"):
        return [set() for _ in range(processes)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < processes:
        return [set() for _ in range(processes)]
    return [set(cores[number::processes]) for number in range(processes)]


def _work(pipe: Connection, cores: set[int], place: Place) -> None:
    """Runs the jobs that come through the pipe, until it is closed."""
    if cores:
        os.sched_setaffinity(0, cores)
    # Several progress bars cannot share a terminal; rich draws none then.
    os.environ["TTY_COMPATIBLE"] = "0"
    # Ctrl-C reaches every process of a terminal; the first one passes it on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(engine.execute(job, place))
        except (Preempted, UserError) as error:
            pipe.send(error)
            return


def _end_with(parent: int) -> None:
    """Saves and ends this process when its parent is gone, so that no run goes on unseen."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)

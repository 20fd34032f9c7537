"""Runs side by side have the same results as single runs; an error in one run ends all runs."""

import contextlib
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading
import types
from multiprocessing.connection import Connection

import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.reproduce import engine, workers
from lamb_tpu.reproduce.engine import Finished, RunSetup
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from tests import tiny
from tests.raising import rejected
from tests.reproduce.papers import TABLE, setup, taking, write


def jobs_of(table: Table) -> list[Job]:
    scale = table.scales["small"]
    return engine.due(table, scale, table.cells.values(), 2, Results(table))


@pytest.mark.long
def test_side_by_side(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    jobs, actual = jobs_of(table), list[Finished]()
    workers.run_side_by_side(taking(jobs), setup(tmp_path), 2, actual.append)
    assert sorted(f.job.name for f in actual) == sorted(j.name for j in jobs)
    one = next(f for f in actual if f.job == jobs[0])
    alone = engine.execute(jobs[0], RunSetup(tmp_path / "alone", None))
    for record in (one.record, alone.record):
        del record["seconds"], record["cores"]
    assert one.record == alone.record


@pytest.mark.long
def test_an_error_ends_all(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path, TABLE.replace('"accuracy", label', '"acuracy", label'))
    with pytest.raises(UserError, match="metric.*'acuracy'"):
        workers.run_side_by_side(taking(jobs_of(table)), setup(tmp_path), 2, lambda actual: None)


def test_workers_that_cannot_start(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "many")  # JAX rejects this value when it is imported
    with rejected("*", ..., "was killed or could not start", "start the same command"):
        jobs = taking(jobs_of(write(tmp_path)))
        workers.run_side_by_side(jobs, setup(tmp_path), 2, lambda actual: None)


class Worker:
    """A fake process, whose thread returns each job at once; `started` lists the instances."""

    started: list["Worker"] = []

    def __init__(self, target: object, args: tuple, daemon: bool) -> None:
        self.pipe, _, _, self.environment = args

    def start(self) -> None:
        Worker.started.append(self)
        threading.Thread(target=self.work, args=(self.pipe,), daemon=True).start()
        self.pipe = None

    def work(self, pipe: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                pipe.send(pipe.recv()[0])

    def terminate(self) -> None: ...

    def join(self) -> None: ...


def test_a_process_takes_one_job_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    context = types.SimpleNamespace(Process=Worker, Pipe=multiprocessing.Pipe)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(Connection, "close", lambda self: None)  # a thread shares the connection
    monkeypatch.setattr(Worker, "started", [])
    begun, done = list[int](), list[int]()

    def take() -> tuple[list[int], None] | None:
        # Jobs 2 to 6 become due after the records of jobs 0 and 1, like measurements after a search.
        if len(begun) == (7 if len(done) >= 2 else 2):
            return None
        begun.append(len(begun))
        return [begun[-1]], None

    workers.run_side_by_side(take, None, 2, done.append)
    assert sorted(done) == begun == list(range(7)) and len(Worker.started) == 2
    assert all(
        worker.environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.450"}
        for worker in Worker.started
    )


@pytest.mark.parametrize(
    "processes, environment, share",
    [
        (4, {}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.225"}),
        (1, {}, {}),
        (4, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}, {}),
        (4, {"XLA_CLIENT_MEM_FRACTION": ".1"}, {}),  # JAX rejects both names together
    ],
)
def test_an_accelerators_memory_is_shared(
    processes: int, environment: dict[str, str], share: dict[str, str]
) -> None:
    assert workers.memory_share(processes, environment) == share


def test_cores_are_shared() -> None:
    cores = os.sched_getaffinity(0)
    shares = workers._shares(len(cores))
    assert set().union(*shares) == cores and all(len(share) == 1 for share in shares)
    assert workers._shares(len(cores) + 1) == [set()] * (len(cores) + 1)


# The parent ends while a worker executes a job; then the job returns, is preempted or fails.
WORKER = """
import os, signal
from lamb_tpu.errors import Preempted, UserError
from lamb_tpu.reproduce import engine, workers
import multiprocessing, types

def execute(jobs, place, checkpoints):
    ours.close()
    {body}

engine.execute_together = execute
multiprocessing.parent_process = lambda: types.SimpleNamespace(pid=os.getppid())
ours, theirs = multiprocessing.Pipe()
ours.send((["a job"], None))
workers._work(theirs, set(), None, {{}})
"""


@pytest.mark.parametrize("body", ["return 1", "raise Preempted('saved')", "raise UserError('no')"])
def test_a_worker_without_a_parent_ends_quietly(body: str) -> None:
    done = tiny.python(WORKER.format(body=body))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_parent_leaves_no_worker() -> None:
    code = (
        "import multiprocessing, tempfile, pathlib\n"
        "from lamb_tpu.reproduce import workers\n"
        "context = multiprocessing.get_context('spawn')\n"
        "ours, theirs = context.Pipe()\n"
        "worker = context.Process(target=workers._work, args=(theirs, set(), None, {}))\n"
        "worker.start()\n"
        "print(worker.pid, flush=True)\n"
        "worker.join()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tiny.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    worker = int(process.stdout.readline())
    process.kill()
    assert tiny.has_ended(worker, 30)
    assert process.stderr.read() == ""

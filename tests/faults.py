"""Ends runs of two processes with signals at random moments, and examines the files that remain.

As for a user, lamb_tpu.launch starts the run. The signals go to one or all of the run's processes.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import time

from lamb_tpu.store import checksums
from lamb_tpu.store.metrics import read_records
from tests import tiny

KEEP, KEEP_EVERY, EVAL_EVERY, STEPS = 3, 20, 8, 80
ARGUMENTS = [
    "--config=configs/digits.py:optimizer=lamb,batch=32",
    f"--config.duration={STEPS} steps",
    "--config.checkpoint.every=5 steps",
    f"--config.checkpoint.keep={KEEP}",
    f"--config.checkpoint.keep_every={KEEP_EVERY} steps",
    "--config.checkpoint.best=accuracy",
    f"--config.eval.every={EVAL_EVERY} steps",
    "--config.eval.batch_size=8",
    "--config.log.every=3 steps",
    "--config.log.tensorboard=false",
]


@dataclasses.dataclass(frozen=True)
class Kill:
    """SIGTERM or SIGKILL, sent to process 0, process 1 or 'all' processes, `delay` seconds after the start.

    With 'all', SIGTERM goes to the launcher, as from a scheduler, and SIGKILL to each process.
    """

    number: signal.Signals
    target: int | str
    delay: float


@dataclasses.dataclass
class Start:
    """One execution of the run's command, and its outcome.

    Attributes:
      status: exit status of the launcher.
      printed: output of the launcher and process 0.
      moment: activity of the run when the signal came; '' if the run had already ended.
      finished: updates of the checkpoints that were finished when the signal came.
      last: update of the last record when the signal came; 0 if the run was not yet set up.
      resumed_from: update from which the run resumed, as text; '0' if the run began from scratch; '-'
        if the run ended before it resumed or began.
      seconds: time from the start of both processes to their end.
    """

    status: int
    printed: str
    moment: str
    finished: set[int]
    last: int
    resumed_from: str
    seconds: float


def run(workdir: pathlib.Path, kill: Kill | None = None) -> Start:
    starts = _lines(workdir / "run.jsonl")
    launcher = tiny.start(
        "lamb_tpu.launch", "local", "--processes=2", "--", *ARGUMENTS, f"--workdir={workdir}"
    )
    try:
        processes = _processes(launcher)
        began = time.monotonic()
        moment, finished, last = "", set(), 0
        if kill is not None:
            try:
                launcher.wait(timeout=kill.delay)
            except subprocess.TimeoutExpired:
                finished = checkpoints(workdir)
                moment, last = _moment(workdir, starts)
                try:
                    if kill.target != "all":
                        os.kill(processes[kill.target], kill.number)
                    elif kill.number == signal.SIGTERM:
                        launcher.send_signal(kill.number)
                    else:
                        for process in processes.values():
                            os.kill(process, kill.number)
                except ProcessLookupError:
                    moment = ""  # the run has ended in the meantime, so nothing was killed
        out, err = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    seconds = time.monotonic() - began
    resumed_from = "0" if _lines(workdir / "run.jsonl") > starts else "-"
    if actual := re.search(r"resumed from the checkpoint of update (\d+)", out):
        resumed_from = actual[1]
    return Start(
        status=launcher.returncode,
        printed=out + err,
        moment=moment,
        finished=finished,
        last=last,
        resumed_from=resumed_from,
        seconds=seconds,
    )


def checkpoints(workdir: pathlib.Path) -> set[int]:
    return {
        int(path.name)
        for path in workdir.glob("checkpoints/*")
        if path.name.isdecimal() and checksums.find_damage(path) is None
    }


def lost(workdir: pathlib.Path, finished: set[int]) -> set[int]:
    """Returns the checkpoints that are missing although the run should have kept them.

    Ignores the best checkpoint, because a better checkpoint may have replaced it.
    """
    there = checkpoints(workdir)
    return {
        step
        for step in finished - there
        if step % KEEP_EVERY == 0 or len([newer for newer in there if newer > step]) < KEEP
    }


def _processes(launcher: subprocess.Popen) -> dict[int, int]:
    """Returns the process ids of the launcher's two processes, by process index."""
    path = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    deadline = time.monotonic() + 30
    while True:
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
        actual = {}
        for child in path.read_text().split():
            environment = pathlib.Path(f"/proc/{child}/environ").read_text()
            # Before exec, a process still has the launcher's environment.
            if id_there := re.search(r"\0JAX_PROCESS_ID=(\d)\0", environment):
                actual[int(id_there[1])] = int(child)
        if len(actual) == 2:
            return actual
        time.sleep(0.01)


def _moment(workdir: pathlib.Path, starts: int) -> tuple[str, int]:
    """Returns the run's activity according to its files, and the update of its last record."""
    metrics = workdir / "metrics.jsonl"
    records = read_records(metrics) if metrics.exists() else []
    last = records[-1]["step"] if records else 0
    if _lines(workdir / "run.jsonl") == starts:
        return "start", 0  # existing records are from an earlier start, which was killed
    if last <= json.loads((workdir / "run.jsonl").read_text().splitlines()[-1])["from_step"]:
        return "first update", last
    what = ""
    if records and records[-1]["kind"] == "train" and last % EVAL_EVERY == 0:
        what = ", evaluating"
    saving = [p.name.split(".")[0] for p in workdir.glob("checkpoints/*.orbax-checkpoint-tmp")]
    return f"update {last}{what}" + "".join(f", saving {step}" for step in saving), last


def _lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0

"""Ends runs of two processes by signals at random moments, and looks at what is left.

A run is started as its user starts it, with lamb_tpu.launch, and the signals go to one of its
processes or to all of them.
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
    """A signal: SIGTERM or SIGKILL, to process 0, to process 1 or to 'all', and when, in seconds.

    To all, SIGTERM goes to the launcher, as it comes from a scheduler, and SIGKILL to each process.
    """

    number: signal.Signals
    target: int | str
    delay: float


@dataclasses.dataclass
class Start:
    """One start of the run and its end.

    Attributes:
      status: the launcher's exit status.
      printed: by launcher and process 0.
      moment: what the run was doing when the signal came; '' where it was complete before.
      finished: the checkpoints that were finished then.
      last: update of the last record of this start then; 0 if there was none.
      resumed_from: update at which it began, as text; '-' where it did not get as far.
      seconds: from when both processes were there to their end.
    """

    status: int
    printed: str
    moment: str
    finished: set[int]
    last: int
    resumed_from: str
    seconds: float


def run(workdir: pathlib.Path, kill: Kill | None = None) -> Start:
    """Starts the run, or starts it again, and sends it the signal."""
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
                    moment = ""  # it has ended by itself in the meantime, so nothing was killed
        out, err = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    seconds = time.monotonic() - began
    resumed_from = "0" if _lines(workdir / "run.jsonl") > starts else "-"
    if found := re.search(r"resumed from the checkpoint of update (\d+)", out):
        resumed_from = found[1]
    return Start(launcher.returncode, out + err, moment, finished, last, resumed_from, seconds)


def checkpoints(workdir: pathlib.Path) -> set[int]:
    """Updates of the checkpoints that are finished and whole."""
    return {
        int(path.name)
        for path in workdir.glob("checkpoints/*")
        if path.name.isdecimal() and checksums.find_damage(path) is None
    }


def lost(workdir: pathlib.Path, finished: set[int]) -> set[int]:
    """Checkpoints that are no longer there although by the rule of `keep` they should be.

    Of those beyond the newest, the best one is left out: another may have taken its place.
    """
    there = checkpoints(workdir)
    return {
        step
        for step in finished - there
        if step % KEEP_EVERY == 0 or len([newer for newer in there if newer > step]) < KEEP
    }


def _processes(launcher: subprocess.Popen) -> dict[int, int]:
    """The number of each of the two processes that the launcher has started, by its id."""
    path = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    deadline = time.monotonic() + 30
    while True:
        assert launcher.poll() is None and time.monotonic() < deadline, launcher.communicate()
        found = {}
        for child in path.read_text().split():
            environment = pathlib.Path(f"/proc/{child}/environ").read_text()
            # What is not yet the program itself has the launcher's environment.
            if id_there := re.search(r"\0JAX_PROCESS_ID=(\d)\0", environment):
                found[int(id_there[1])] = int(child)
        if len(found) == 2:
            return found
        time.sleep(0.01)


def _moment(workdir: pathlib.Path, starts: int) -> tuple[str, int]:
    """Returns the run's activity by its files, and the update of this start's last record."""
    metrics = workdir / "metrics.jsonl"
    records = read_records(metrics) if metrics.exists() else []
    last = records[-1]["step"] if records else 0
    if _lines(workdir / "run.jsonl") == starts:
        return "start", 0  # records that are there are of a start that was killed before
    if last <= json.loads((workdir / "run.jsonl").read_text().splitlines()[-1])["from_step"]:
        return "first update", last
    what = ""
    if records and records[-1]["kind"] == "train" and last % EVAL_EVERY == 0:
        what = ", evaluating"
    saving = [p.name.split(".")[0] for p in workdir.glob("checkpoints/*.orbax-checkpoint-tmp")]
    return f"update {last}{what}" + "".join(f", saving {step}" for step in saving), last


def _lines(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0

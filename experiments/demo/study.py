"""Many small runs of the trainer, one after the other, with one bar and one record each."""

import contextlib
import dataclasses
import io
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments import records as records_lib
from lamb_tpu import data
from lamb_tpu.errors import UserError
from lamb_tpu.run.recipe import resolve
from lamb_tpu.store.metrics import read_records
from lamb_tpu.store.workdir import Workdir
from lamb_tpu.train import train
from lamb_tpu.watch.guards import Diverged
from lamb_tpu.watch.progress import format_seconds

RECORDS = "records.jsonl"
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a study.

    Attributes:
      name: of its folder, below `runs` of the study's.
      config: what the trainer gets.
    """

    name: str
    config: ConfigDict

    def folder(self, out: pathlib.Path) -> pathlib.Path:
        """The workdir of the run, in a study that lies in `out`."""
        return out / "runs" / self.name


def run_trials(
    trials: Sequence[Trial],
    out: pathlib.Path,
    show: Callable[[Sequence[Record]], RenderableType],
) -> list[Record]:
    """Trains every trial that is not yet complete, and writes `records.jsonl` as it goes.

    On a terminal `show(records so far)` stands above a progress bar and fills up; elsewhere each
    finished run is one line.

    Args:
      trials: the runs, in this order.
      out: the folder of the study; each run keeps its workdir, with its own metrics.jsonl, in it.
      show: what to draw of the records of the runs finished so far.

    Returns:
      A record for each trial: what it was (name, optimizer, scaling, batch_size, seed,
      learning_rate: the peak, warmup_epochs, updates), what came out (accuracy, loss: of the
      evaluation split after the last update, both None if the run diverged), the curve of
      [epoch, accuracy] at each evaluation, the seconds of its training, the machine and versions.

    Raises:
      UserError: `out` cannot be written, or holds runs of other configs; nothing is trained then.
    """
    _check(trials, out)
    records: list[Record] = []
    with _Display(len(trials), show) as display:
        for trial in trials:
            display.begin(trial.name)
            records.append(_run(trial, out))
            _write(out / RECORDS, records)
            display.finish(records)
    return records


def cell(records: Sequence[Record]) -> str:
    """Mean and standard deviation in percent of the runs of one setting; '' where there are none.

    >>> cell([{"accuracy": 0.90}, {"accuracy": 0.92}, {"accuracy": 0.94}]), cell([])
    ('92.0 ± 2.0', '')
    """
    accuracies = [record["accuracy"] for record in records]
    if not accuracies:
        return ""
    diverged = accuracies.count(None)
    if diverged:
        return f"{diverged} of {len(accuracies)} diverged"
    mean = f"{100 * statistics.fmean(accuracies):.1f}"
    return f"{mean} ± {100 * statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else mean


def _run(trial: Trial, out: pathlib.Path) -> Record:
    config, folder = trial.config, trial.folder(out)
    # The study has its own bar: the run's would stand in the same place.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            result = train(config, folder, label=trial.name, quiet=True)
        except Diverged:
            result = {"accuracy": None, "loss": None}
        num_examples = len(data.load(config.data.name, config.data.train_split))
    recipe = resolve(config, num_examples)
    trained = read_records(folder / "metrics.jsonl", "train")
    return {
        "name": trial.name,
        "optimizer": config.optimizer.name,
        "scaling": config.schedule.scaling,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "learning_rate": recipe.peak_learning_rate,
        "warmup_epochs": recipe.warmup_steps * config.batch_size / num_examples,
        "updates": recipe.total_steps,
        "accuracy": result["accuracy"],
        "loss": result["loss"],
        "curve": [
            [round(record["epoch"], 3), round(record["accuracy"], 5)]
            for record in records_lib.evaluations(folder)
        ],
        # Of the run that trained, also when this one found it complete.
        **records_lib.facts(folder),
        "seconds": round(trained[-1]["seconds"], 3) if trained else 0.0,
    }


def _check(trials: Sequence[Trial], out: pathlib.Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / RECORDS).touch()
    except OSError as error:
        raise UserError(
            f"--out={out} cannot be written ({error.strerror}); give a folder that can"
        ) from None
    for trial in trials:
        try:
            Workdir(trial.folder(out)).check(trial.config)
        except UserError as error:
            raise UserError(
                f"--out={out} cannot be used again, delete it or give another --out: {error}"
            ) from None


def _write(path: pathlib.Path, records: Sequence[Record]) -> None:
    # By rename, so that a study killed here leaves the old file or the new one.
    temporary = path.with_suffix(".jsonl.new")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
    temporary.replace(path)


class _Display:
    """A table that fills up over a bar, or a line for each run where there is no terminal."""

    def __init__(self, total: int, show: Callable[[Sequence[Record]], RenderableType]) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._show = show
        self._total = total
        self._start = time.monotonic()
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            speed_estimate_period=1e9,
        )
        self._task = self._bar.add_task("", total=total)
        self._live = None
        if self._console.is_terminal:
            self._live = Live(
                Group(show([]), self._bar),
                console=self._console,
                transient=True,  # the finished table is the caller's to print
                redirect_stdout=False,
            )

    def __enter__(self) -> "_Display":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def begin(self, name: str) -> None:
        """Says what is running."""
        self._bar.update(self._task, description=name)

    def finish(self, records: Sequence[Record]) -> None:
        """Shows the records, of which the last is new."""
        done = len(records)
        self._bar.update(self._task, completed=done)
        if self._live:
            self._live.update(Group(self._show(records), self._bar))
            return
        last = records[-1]
        accuracy = last["accuracy"]
        outcome = "diverged" if accuracy is None else f"accuracy {100 * accuracy:.2f} %"
        left = (time.monotonic() - self._start) / done * (self._total - done)
        self._console.print(
            f"{done}/{self._total} {last['name']}: {outcome}, trained in {last['seconds']:.1f} s; "
            f"{format_seconds(left)} left",
            markup=False,
        )
        self._console.file.flush()

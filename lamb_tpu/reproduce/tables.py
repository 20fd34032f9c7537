"""The papers' tables: their cells, scales and searches. `loading` reads them from files."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

SCALES = ("smoke", "small", "paper")
# Further columns that a table may ask for, beside the metric: key in its file -> head.
COLUMNS = {
    "updates": "updates",
    "average_batch": "average batch",
    "sent_bytes": "bytes a device sends for an update",
    "to_baseline": "to its baseline, %",
}


class Metric(NamedTuple):
    """The number that a table shows.

    Attributes:
      key: its key in a run's evaluation, such as 'accuracy'.
      label: its name for readers, such as 'test accuracy'.
      digits: decimals to show.
      better: 'higher' or 'lower'.
      factor: measured values times this are in the unit of the published ones, such as 100 where a
        paper gives percent.
    """

    key: str
    label: str
    digits: int = 4
    better: str = "higher"
    factor: float = 1.0


class Tuning(NamedTuple):
    """A search for one key of the config, alike for every cell, before the cell is measured.

    Attributes:
      key: the key, such as 'optimizer.learning_rate'.
      factors: the values are the cell's own times these.
      overrides: of the runs that search, such as a held-out part of the training set.
      seeds: runs of each value, with seeds from 0.
    """

    key: str
    factors: tuple[float, ...]
    overrides: Mapping[str, Any]
    seeds: int = 1


class Space(NamedTuple):
    """Range in which `run --tune=N` searches, alike for every cell; see `tuning`.

    Attributes:
      key: the key of the config.
      low, high: the values lie between the cell's own times these.
      overrides: of the runs that search.
    """

    key: str = "optimizer.learning_rate"
    low: float = 0.125
    high: float = 8.0
    overrides: Mapping[str, Any] = {
        "data.train_split": "train[:90%]",
        "data.eval_split": "train[90%:]",
    }


def _time(minutes: float) -> str:
    return f"{minutes:g} minutes" if minutes >= 1 else f"{60 * minutes:.0f} seconds"


class Scale(NamedTuple):
    """A size at which a table can be run.

    Attributes:
      name: one of `SCALES`.
      stages: recipes with arguments, such as 'mnist_lenet:network=lenet5'; each starts from the
        weights of the one before, and the last is measured.
      metric: what is measured.
      overrides: keys of the last stage's config.
      seeds: how many runs of a cell the table asks for.
      about: how it differs from the paper's, for readers.
      data: folder below --data of each stage's data set; '' where it needs none.
      hardware: what a run needs, for readers.
      minutes: estimate of a run's time by platform: on two cores of a 'cpu', one 'gpu', or the
        'tpu' that `hardware` names.
      examples: of an epoch of the first stage, to draw its learning rate; 0 if not known.
      cpu_devices: devices that the CPU is to have, such as 8 where a cell is about what devices
        send each other; 1 where any number gives the same.
    """

    name: str
    stages: tuple[str, ...]
    metric: Metric
    overrides: Mapping[str, Any]
    seeds: int = 1
    about: str = ""
    data: tuple[str, ...] = ("",)
    hardware: str = ""
    minutes: Mapping[str, float] = {}
    examples: int = 0
    cpu_devices: int = 1

    @property
    def cost(self) -> str:
        """Hardware and estimated time of a run, as text; '' without either."""
        times = (
            f"about {_time(minutes)} a run on a {platform.upper()}"
            for platform, minutes in self.minutes.items()
        )
        return ", ".join(filter(None, [self.hardware, *times]))


class Cell(NamedTuple):
    """One setting of a table.

    Attributes:
      name: unique within the table.
      argument: of the first stage's recipe, such as 'optimizer=lamb'.
      stages: recipes in place of the scale's last ones; empty: the scale's. A cell with fewer than
        the scale leaves out the first, such as the pre-training of a network with random weights.
      overrides: keys of the last stage's config.
      first: keys of the first stage's config, where there are several stages.
      published: the paper's values by key of the metric; text for a run that failed there.
      known: 'seen', 'recalled' or '' if the paper has no value.
      unknown: why the cell cannot be run, such as 'settings not published'; '' if it can.
      tuned_by: name of the cell whose search is this one's too, such as that of the smallest batch;
        '': its own.
      search: overrides of its runs that search, beside those of `Tuning`.
      baseline: name of the cell with which the column `to_baseline` compares it; '': none.
      row, column: its place in a matrix, such as 'LAMB' and '1,024'; '' if it has none.
    """

    name: str
    argument: str = ""
    stages: tuple[str, ...] = ()
    overrides: Mapping[str, Any] = {}
    first: Mapping[str, Any] = {}
    published: Mapping[str, float | str] = {}
    known: str = ""
    unknown: str = ""
    tuned_by: str = ""
    search: Mapping[str, Any] = {}
    baseline: str = ""
    row: str = ""
    column: str = ""


class Paper(NamedTuple):
    """A paper.

    Attributes:
      key: name of its folder.
      title: its title.
      arxiv: its arXiv identifier; '' if none.
      about: what to know about it.
      name: a short name for readers, such as 'LAMB'.
      missing: pairs of what the paper has and its tables here have not, and why.
    """

    key: str
    title: str
    arxiv: str = ""
    about: str = ""
    name: str = ""
    missing: tuple[tuple[str, str], ...] = ()


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
      key: such as 'lamb/mnist'.
      path: its file; the records of its runs lie beside it.
      paper: the paper.
      title: for readers.
      source: the table's place in the paper.
      about: for readers: what differs, how the values are known.
      scales: by name.
      cells: by name.
      tuning: the search before each measurement, or None.
      space: where `run --tune=N` searches.
      form: '' for the table as its file has it, 'tuned' for what `tuning.tuned` makes of it.
      columns: keys of `COLUMNS`, shown beside the metric where the cells are a list.
    """

    key: str
    path: pathlib.Path
    paper: Paper
    title: str
    source: str
    about: str
    scales: Mapping[str, Scale]
    cells: Mapping[str, Cell]
    tuning: Tuning | None = None
    space: Space = Space()
    form: str = ""
    columns: tuple[str, ...] = ()

    def measured_scales(self) -> list[Scale]:
        """Returns the scales whose runs are results, the paper's own first."""
        return [self.scales[name] for name in ("paper", "small") if name in self.scales]

    @property
    def records(self) -> pathlib.Path:
        """The file of its measured runs."""
        return self.path.with_suffix(f".{self.form}.jsonl" if self.form else ".jsonl")

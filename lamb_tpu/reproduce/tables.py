"""The papers' tables: their cells, scales and searches. `loading` reads them from files."""

import pathlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

from lamb_tpu import limits
from lamb_tpu.errors import UserError

Word = Annotated[str, Meta(min_length=1, max_length=100)]
Line = Annotated[str, Meta(max_length=500)]
Factor = Annotated[float, Meta(gt=0, le=1e9)]
Seeds = Annotated[int, Meta(ge=1, le=limits.MAX_SEEDS)]
Better = Literal["higher", "lower"]
SCALES = ("smoke", "small", "paper")
# Additional columns that a table can show: key in the table's file -> header on the pages.
COLUMNS = {
    "updates": "updates",
    "average_batch": "average batch",
    "sent_bytes": "bytes sent per device and update",
    "to_baseline": "vs. baseline, %",
}


class Metric(Struct, frozen=True, forbid_unknown_fields=True):
    """The number that a table shows.

    Attributes:
      key: the key of the metric in a run's evaluation, such as 'accuracy'.
      label: the name of the metric for readers, such as 'test accuracy'.
      digits: number of decimals to show.
      factor: multiplier from the measured to the published unit, such as 100 for percent.
      chance: the metric of random guessing, in the unit of the records, such as 0.1 for the accuracy
        among 10 classes; None if unknown. See `divergence`.
    """

    key: Word
    label: Line
    digits: Annotated[int, Meta(ge=0, le=17)] = 4
    better: Better = "higher"
    factor: Factor = 1.0
    chance: Factor | None = None


class Tuning(Struct, frozen=True, forbid_unknown_fields=True):
    """A search over one config key before a cell is measured; it is the same for every cell.

    Attributes:
      key: the key, such as 'optimizer.learning_rate'.
      factors: multipliers of the cell's default value.
      overrides: config overrides of the runs of the search, such as a held-out part of the training set.
      seeds: number of runs per value; their seeds start at 0.
    """

    key: Word
    factors: Annotated[tuple[Factor, ...], Meta(min_length=1, max_length=limits.MAX_TRIALS)]
    overrides: dict[str, Any] = {}
    seeds: Seeds = 1


class Space(Struct, frozen=True, forbid_unknown_fields=True):
    """The search of `run --tune=N`, the same for every cell; see `tuning`.

    Attributes:
      key: the config key.
      range: bounds, as multiples of the cell's default value.
      overrides: config overrides of the runs of the search.
    """

    key: Word = "optimizer.learning_rate"
    range: tuple[Factor, Factor] = (0.125, 8.0)
    overrides: dict[str, Any] = {}


class Scale(NamedTuple):
    """A size at which a table can be run.

    Attributes:
      name: one of `SCALES`.
      stages: recipes with arguments, such as 'mnist_lenet:network=lenet5'. Each stage starts from the
        weights of the previous stage; the last stage is measured.
      metric: the metric to measure.
      overrides: config overrides of the last stage.
      seeds: number of runs per cell that the table requests.
      about: differences from the paper's setting, for readers.
      data: for each stage, the folder of its data set below --data; '' if the stage needs none.
      hardware: required hardware, for readers.
      minutes: estimated minutes of a run, by platform: on two cores of a 'cpu', on one 'gpu', or on the
        'tpu' that `hardware` names. Used until a run on the platform is recorded; see `timing`.
      examples: examples per epoch of the first stage, to plot its learning rate; 0 if unknown.
      cpu_devices: number of CPU devices to create, such as 8 for a cell about communication;
        1 if the number does not matter.
      over_cells: for each stage, config overrides that replace values of the cells, such as the batch
        size of a smoke run; empty for none.
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
    over_cells: tuple[Mapping[str, Any], ...] = ()


class Cell(NamedTuple):
    """One setting of a table.

    Attributes:
      name: a name that is unique within the table.
      argument: argument of the first stage's recipe, such as 'optimizer=lamb'.
      stages: recipes that replace those of the scale; if empty, the scale's are used. A cell with fewer
        stages than the scale skips the first stages, such as pre-training, and starts from random weights.
        At the scale smoke each recipe gets the argument `smoke`.
      overrides: config overrides of the last stage.
      first: config overrides of the first of several stages.
      published: the paper's values by metric key; a text, such as 'diverged', for a run that failed.
      known: 'seen' or 'recalled' for the published values; '' if there are none.
      unknown: why the cell cannot be run, such as 'settings not published'; '' if it can.
      tuned_by: name of the cell whose search result this cell uses, such as the cell with the smallest
        batch; if '', this cell has a search.
      search: additional config overrides of the runs of this cell's search, see `Tuning`.
      baseline: name of the cell that is the baseline in the column `to_baseline`; '' for none.
      row, column: position in the table's matrix, such as 'LAMB' and '1,024'; '' without a matrix.
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
      key: name of the paper's folder.
      arxiv: arXiv identifier; '' if the paper has none.
      about: notes for readers.
      name: a short name, such as 'LAMB'.
      missing: pairs of a result that no table here covers, and the reason.
    """

    key: str
    title: str
    arxiv: str = ""
    about: str = ""
    name: str = ""
    missing: tuple[tuple[str, str], ...] = ()


def check_runs(
    where: str, cells: Collection[Cell], seeds: int, tuning: Tuning | None = None
) -> None:
    """Rejects a table with too many runs to list and count; `where` names the table in messages."""
    searches = 0 if tuning is None else len(tuning.factors) * tuning.seeds
    runs = len(cells) * (seeds + searches)
    if runs > limits.MAX_RUNS:
        raise UserError(
            where,
            problem=f"asks for {runs:,} runs: {len(cells):,} cells, each with {seeds:,} seeds "
            f"and {searches:,} search runs",
            remedy=f"use at most {limits.MAX_RUNS:,} runs",
        )


class Table(NamedTuple):
    """A table of a paper.

    Attributes:
      key: the table's name, such as 'lamb/mnist'.
      path: the table's file; the records of the table's runs are beside this file.
      scales, cells: the scales and the cells by name.
      source: location of the table in the paper.
      about: notes for readers, such as differences from the paper.
      tuning: the search before each measurement; None without a search.
      space: range of the search by `run --tune=N`.
      form: '' for the table that its file defines, 'tuned' for the result of `tuning.tuned`.
      columns: keys of `COLUMNS`, shown beside the metric in lists of cells.
    """

    key: str
    path: pathlib.Path
    paper: Paper
    title: str
    scales: Mapping[str, Scale]
    cells: Mapping[str, Cell]
    source: str = ""
    about: str = ""
    tuning: Tuning | None = None
    space: Space = Space()
    form: str = ""
    columns: tuple[str, ...] = ()

    def measured_scales(self) -> list[Scale]:
        """Returns the scales whose runs count as results (not smoke), the paper's scale first."""
        return [self.scales[name] for name in ("paper", "small") if name in self.scales]

    @property
    def records(self) -> pathlib.Path:
        """The file of the table's records."""
        return self.path.with_suffix(f".{self.form}.jsonl" if self.form else ".jsonl")

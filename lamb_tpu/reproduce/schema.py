"""The schema of the papers' TOML files: every key with its type and bounds.

`loading` converts each file to these structs, and thus checks every value, before it builds a `Table`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lamb_tpu import limits
from lamb_tpu.reproduce.tables import Line, Metric, Seeds, Space, Tuning, Word

Text = Annotated[str, Meta(max_length=10_000)]
Recipe = Annotated[str, Meta(min_length=1, max_length=1_000)]
# A number on a page, which shows all its digits. The bounds exclude NaN and infinities.
Int = Annotated[int, Meta(ge=-(10**15), le=10**15)]
Float = Annotated[float, Meta(ge=-1e15, le=1e15)]
Minutes = Annotated[float, Meta(ge=0, le=limits.MAX_SECONDS / 60)]
Published = Int | Float | Annotated[str, Meta(max_length=100)]


class _Form(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class MissingForm(_Form, frozen=True):
    """A result of a paper that no table covers, and the reason."""

    what: Line
    why: Line


class PaperForm(_Form, frozen=True):
    """The file paper.toml; see `tables.Paper`."""

    title: Line
    arxiv: Line = ""
    about: Text = ""
    name: Line = ""
    missing: list[MissingForm] = []


class MinutesForm(_Form, frozen=True):
    """Estimated minutes of a run; 0 for no estimate."""

    cpu: Minutes = 0.0
    gpu: Minutes = 0.0
    tpu: Minutes = 0.0


class ScaleForm(_Form, frozen=True):
    """The section of a scale; see `tables.Scale`. Either `config` or `stages` is required."""

    config: Recipe | None = None
    stages: list[Recipe] = []
    metric: Metric | None = None
    overrides: dict[str, Any] = {}
    over_cells: list[dict[str, Any]] = []
    seeds: Seeds = 1
    about: Text = ""
    data: list[Line] | None = None
    hardware: Line = ""
    minutes: MinutesForm = MinutesForm()
    examples: Annotated[int, Meta(ge=0, le=10**12)] = 0
    cpu_devices: Annotated[int, Meta(ge=1, le=limits.MAX_CPU_DEVICES)] = 1


class ScalesForm(_Form, frozen=True):
    """The sections of all scales; None for a scale that the table does not have."""

    smoke: ScaleForm | None = None
    small: ScaleForm | None = None
    paper: ScaleForm | None = None


class CellForm(_Form, frozen=True):
    """An entry of [[cells]]; see `tables.Cell`. `loading` checks the values of `published`."""

    name: Word
    argument: Line = ""
    config: Recipe | None = None
    stages: list[Recipe] = []
    overrides: dict[str, Any] = {}
    first: dict[str, Any] = {}
    published: dict[str, Any] = {}
    known: Literal["seen", "recalled", ""] = ""
    unknown: Text = ""
    tuned_by: Line = ""
    search: dict[str, Any] = {}
    baseline: Line = ""
    row: Line = ""
    column: Line = ""


class TableForm(_Form, frozen=True):
    """The file of a table; see `tables.Table`."""

    title: Line
    metric: Metric
    scales: ScalesForm
    cells: Annotated[list[CellForm], Meta(min_length=1, max_length=limits.MAX_CELLS)]
    source: Line = ""
    known: Literal["seen", "recalled", ""] = ""
    about: Text = ""
    columns: list[Line] = []
    tuning: Tuning | None = None
    tune: Space = Space()

"""Prints the commands that train each cell with seed 0, on this machine or on a TPU slice.

The output is a shell script, with variables for values that were not given. The script checks that each
variable is set, and otherwise prints how to set it.
"""

import os
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from lamb_tpu.data import folders
from lamb_tpu.data.folders import DataFolder
from lamb_tpu.errors import UserError
from lamb_tpu.files import buckets
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.reproduce.choosing import choose_cells, choose_scale
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.summary import cost, summaries
from lamb_tpu.reproduce.tables import Cell, Scale, Table

_VARIABLES = {
    "DATA": "set DATA to the folder of the data sets listed in the comments above, or give "
    "reproduce commands --data=DIR",
    "BUCKET": "set BUCKET to the name of your bucket, which holds the data and receives the runs",
    "ZONE": "set ZONE to a zone of the cloud that has the slice, such as europe-west4-a",
    "PROJECT": "set PROJECT to your project in the cloud",
}
DATA, BUCKET, ZONE, PROJECT = (f"${{{name}}}" for name in _VARIABLES)
_ACTIVE = re.compile("(" + "|".join(map(re.escape, (DATA, BUCKET, ZONE, PROJECT))) + ")")


def show(
    tables: Sequence[Table],
    scale: str | None,
    cells: str | None,
    data: str | None = None,
    topology: str | None = None,
) -> None:
    """Prints the commands of some tables, for this machine or a TPU slice, such as 'v3-1024'.

    If `scale` is None, uses the paper's scale; if `cells` is None, all cells that can be run. `data` is the
    folder that contains the data sets' folders; with `topology` it is in a bucket. If `data` is None, the
    printed commands use a shell variable.
    """
    if topology is not None:
        from lamb_tpu.reproduce import launches  # imported late, because it imports every model

        if data is not None and not buckets.is_remote(data):
            raise UserError(
                "--data",
                data,
                "is a folder on this machine",
                "with --topology, use a folder in a bucket, such as --data=gs://BUCKET/data, "
                "which is copied to every host",
            )
    if data is not None and buckets.is_remote(data):
        buckets.check_folder(data, "--data")
        if topology is None:
            raise UserError(
                "--data",
                data,
                "is remote",
                "use a folder on this machine, or add --topology for a launch, which copies "
                "the folder to every host",
            )
    elif data is not None:
        data = str(buckets.local(data, "--data").absolute())
    for table in tables:
        size = choose_scale(table, scale, "paper")
        chosen = choose_cells(table, cells)
        if topology is not None:
            lines = launches.lines(table, size, chosen, data, topology)
        else:
            lines = here(table, size, chosen, data)
        print("\n".join([*head(table, size), *lines]))


def head(table: Table, scale: Scale) -> list[str]:
    """Returns comments about a table at a scale."""
    cost_text = cost(scale, summaries(table, scale, Results(table)))
    lines = [comment(f"{table.key}, {scale.name}" + (cost_text and f": {cost_text}"))]
    if scale.name == "smoke":
        lines.append(comment(f"not the paper's setting: {scale.about}"))
    if table.tuning is not None:
        lines.append(comment(f"{table.tuning.key} has the recipe's value; `run` searches it first"))
    return lines


def here(table: Table, scale: Scale, cells: Sequence[Cell], data: str | None) -> list[str]:
    """Returns comments about the data that cells need, and then the commands that train the cells."""
    needed = needs(table, scale, cells, DATA if data is None else data)
    missing = [folder for folder in needed.values() if not folder.downloaded]
    root = data
    lines = []
    if data is None and missing:
        root = DATA
        lines += [
            comment("DATA is the folder of the data sets. It must contain"),
            *listing(needed, DATA),
            *checked("DATA"),
        ]
    elif data is None and needed:
        lines += [comment("downloaded, unless --data=DIR contains"), *listing(needed, "DIR")]
    elif data is not None and needed:
        lines += [comment("data sets"), *listing(needed, data)]
    for cell in cells:
        stages = jobs_lib.stages(Job(table, scale, cell, 0), root)
        for stage in stages:
            stage.config()  # reject a cell whose command would fail
        lines += jobs_lib.commands(pathlib.Path("runs", table.key, cell.name), stages, quote)
    return lines


def needs(table: Table, scale: Scale, cells: Iterable[Cell], root: str) -> dict[str, DataFolder]:
    """Returns the data folders that cells read: their names below --data, and their required content."""
    data_sets, files = dict[str, DataFolder](), dict[str, DataFolder]()
    for cell in cells:
        stages = jobs_lib.stages(Job(table, scale, cell, 0))
        for name, stage in zip(scale.data[-len(stages) :], stages):
            if name and name not in data_sets:
                config = stage.config()
                folder = folders.folder_of(
                    config.data.name,
                    f"{root}/{name}",
                    (config.data.train_split, config.data.eval_split),
                    config.model.get("vocab_size", 30_522),
                )
                if folder is not None:
                    data_sets[name] = folder
            for key, value in stage.overrides.items():
                if isinstance(value, str) and value.startswith(jobs_lib.DATA):
                    other, _, file = value.removeprefix(jobs_lib.DATA).partition("/")
                    files[other] = DataFolder(key, f"the file {file}")
    return files | data_sets


def listing(needed: Mapping[str, DataFolder], root: str) -> list[str]:
    """Returns comments about data folders below `root`, with the commands that create them."""
    lines = []
    for name, folder in needed.items():
        exists = os.path.isdir(os.path.join(root, name))
        lines.append(comment(f"  {name}: {folder.holds}" + " (there)" * exists))
        if not exists:
            lines += [comment("    " + " ".join(map(quote, words))) for words in folder.commands]
    return lines


def comment(text: str) -> str:
    """Formats text as a one-line comment, keeping the indentation."""
    indent = len(text) - len(text.lstrip(" "))
    return f"# {' ' * indent}{' '.join(text.split())}"


def checked(*names: str) -> list[str]:
    """Returns shell lines that stop the script if a variable is not set."""
    return [f': "${{{name}:?{_VARIABLES[name]}}}"' for name in names]


def quote(word: str) -> str:
    """Quotes a word for a shell, but leaves the variables of this module active.

    >>> print(quote("--config.data.dir=${DATA}/my text"))
    --config.data.dir="${DATA}"'/my text'
    """
    return (
        "".join(
            f'"{part}"' if _ACTIVE.fullmatch(part) else shlex.quote(part)
            for part in _ACTIVE.split(word)
            if part
        )
        or "''"
    )

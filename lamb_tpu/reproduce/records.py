"""The schema of a table's records, and the functions that read and check their files.

Records may come from other machines, or be changed by editors and merges. Every value is checked when it
is read, so code outside this module need not handle wrong types or infinite numbers.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import UNSET, Meta, Struct, UnsetType

from lamb_tpu.errors import UserError, shown
from lamb_tpu.files import reading, schema
from lamb_tpu.reproduce import jobs as jobs_lib
from lamb_tpu.store.metrics import parse_line
from lamb_tpu.store.schema import (
    LARGEST,
    Count,
    Number,
    Positive,
    Seconds,
    Seed,
    check_config,
    check_each,
)

Record = dict[str, Any]
Configs = list[dict[str, Any]]
_MOST_STAGES = 100
# Excludes control characters, because they could disturb a terminal or a page, and surrogates, because
# they cannot be encoded.
_PLAIN = r"^[^\x00-\x1f\x7f\ud800-\udfff]*$"
_Word = Annotated[str, Meta(min_length=1, max_length=200, pattern=_PLAIN)]
_Text = Annotated[str, Meta(max_length=1000, pattern=_PLAIN)]
_Factor = Annotated[float, Meta(gt=0, le=LARGEST)]
_Curve = Annotated[list[tuple[Number, Number | None]], Meta(max_length=10_000)]


class _Record(Struct):
    """The record of one run, made by `results.of_run`. Newer versions may add keys.

    Attributes:
      cell, scale, seed, factor: the job that the run measures.
      chosen: the factor selected by a preceding search.
      values: metrics of the last evaluation; None if the run diverged.
      diverged: why the run ended early.
      updates, examples: number of completed updates, and number of examples in these updates.
      sent_bytes: mean number of bytes that a device sends per update.
      seconds: time of training, evaluation and saving; if one program trains several runs, this run's
        share of the program's time.
      together: number of runs that the program trained; missing if it trained one run.
      batch: config.batch_size.
      learning_rate: the largest learning rate used.
      config: hash of the configs.
      evaluations: pairs of epoch and metric; None if the metric was not finite.
      losses: pairs of update and training loss.
      ratios: pairs of update and trust ratio for each layer.
    """

    cell: _Word
    scale: _Word
    seed: Seed
    factor: _Factor | None
    values: dict[_Text, Any] | None
    config: Annotated[str, Meta(pattern="^[0-9a-f]{12}$")]
    updates: Count
    seconds: Seconds
    batch: Positive
    optimizer: _Word
    device: _Text
    devices: Positive
    cores: Count | None
    jax: _Text
    commit: _Text | None
    evaluations: _Curve
    losses: _Curve
    ratios: dict[_Text, Any]
    chosen: _Factor | None = None
    diverged: _Text | None = None
    examples: Count | UnsetType = UNSET
    sent_bytes: Count | None = None
    learning_rate: Annotated[float, Meta(ge=0, le=LARGEST)] | None = None
    python: _Text | None = None
    processor: _Text | None = None
    together: Positive | UnsetType = UNSET


class _CarriedRun(Struct):
    record: dict[str, Any]
    configs: list[dict[str, Any]]


class _CarriedTable(Struct):
    """The records of one table in a file written by `run --carry`."""

    table: _Word
    form: _Text
    runs: list[_CarriedRun]


class Files(NamedTuple):
    """Content of the two files that store a table's records.

    Attributes:
      records: valid records with their line numbers.
      configs: valid configs by hash.
      damage: a sentence for each damaged entry, with its file, line and key.
    """

    records: list[tuple[int, Record]]
    configs: dict[str, Configs]
    damage: list[str]


def read(path: pathlib.Path, configs_path: pathlib.Path) -> Files:
    """Reads the records of a table and their configs; omits and reports damaged entries."""
    valid, damage = list[tuple[int, Record]](), list[str]()
    configs = _read_configs(configs_path, damage)
    try:
        # Read the last line too if it lacks a final newline, which an editor may have removed.
        lines = reading.read_text(path).split("\n")
    except FileNotFoundError:
        lines = []
    except ValueError as error:
        lines = []
        damage.append(f"{path} cannot be read ({error})")
    keys = dict[Any, int]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            record = parse_line(line, where)
            check(record, where)
            first = keys.setdefault(key_of(record), number)
            if first != number:
                raise UserError(where, ..., f"has the cell, scale, seed and factor of line {first}")
            if record["config"] not in configs:
                raise UserError(
                    f"{where}: config",
                    record["config"],
                    f"is not the hash of valid configs in {configs_path.name}",
                )
        except UserError as error:
            damage.append(str(error))
        else:
            valid.append((number, record))
    return Files(valid, configs, damage)


def _read_configs(path: pathlib.Path, damage: list[str]) -> dict[str, Configs]:
    try:
        content = reading.read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        damage.append(f"{path} cannot be read ({error})")
        return {}
    if not isinstance(content, dict):
        damage.append(f"{path} is {shown(content)}; it must map hashes to configs")
        return {}
    valid = {}
    for digest, configs in content.items():
        try:
            check_configs(configs, digest, str(path), digest)
        except UserError as error:
            damage.append(str(error))
        else:
            valid[digest] = configs
    return valid


def key_of(record: Mapping[str, Any]) -> tuple[str, str, int, float | None]:
    """Returns the key of a record, unique within a table: scale, cell, seed and factor."""
    return record["scale"], record["cell"], record["seed"], record["factor"]


def check(record: Any, where: str) -> None:
    """Checks every value of a record; `where` is the record's file and line, for messages."""
    schema.convert(record, _Record, where)
    check_each(record["values"] or {}, Number, where, "values.")
    check_each(record["ratios"], _Curve, where, "ratios.")
    steps = {tuple(step for step, _ in curve) for curve in record["ratios"].values()}
    if len(steps) > 1 or any(list(each) != sorted(set(each)) for each in steps):
        raise UserError(
            f"{where}: ratios",
            problem="must have the same updates, in ascending order, for every layer",
        )


def check_configs(configs: Any, digest: str, where: str, key: str = "") -> None:
    """Checks the configs of a run's stages, and their hash.

    For messages, `where` is the file, and `key` the key of the configs in the file ('' for none).
    """
    stages = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=_MOST_STAGES)]
    schema.convert(configs, stages, where, key[:100])
    for number, flat in enumerate(configs, start=1):
        check_config(flat, where, f"{key[:100]}[{number}].")
    actual = jobs_lib.config_hash(configs)
    if digest != actual:
        raise UserError(
            f"{where}: the configs stored under the hash {shown(digest)}",
            problem=f"have been changed: they now have the hash {actual!r}",
        )


def read_carried(path: pathlib.Path) -> list[tuple[str, str, list[tuple[Record, Configs]]]]:
    """Returns each table's key, form, and pairs of record and configs, from a file of `run --carry`."""
    try:
        content = reading.read_json(path)
        tables = schema.convert(content, list[_CarriedTable], "its content")
    except (ValueError, UserError) as error:
        raise UserError(
            path,
            problem=f"is neither a workdir nor a file of `run --carry` ({error})",
            remedy="give one of them",
        ) from None
    if not any(table.runs for table in tables):
        raise UserError(
            path, problem="has no records", remedy="give a file to which `run --carry` added some"
        )
    for table in tables:
        for number, run in enumerate(table.runs, start=1):
            where = f"record {number} of {table.table} in {path}"
            check(run.record, where)
            check_configs(run.configs, run.record["config"], where)
    return [
        (table.table, table.form, [(run.record, run.configs) for run in table.runs])
        for table in tables
    ]


def dump(record: Mapping[str, Any]) -> str:
    """Returns a record as a line of its file; rejects a record that `read` would reject."""
    check(record, f"the record of {record.get('cell')}, seed {record.get('seed')}")
    return json.dumps(record, allow_nan=False) + "\n"

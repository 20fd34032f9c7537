"""Schemas of the files in a workdir: config.json, and the lines of metrics.jsonl and run.jsonl.

They reject a damaged or foreign file when the file is read, not later when a value is used.
"""

import sys
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from lamb_tpu.files import schema

# Up to this bound, sums, squares and plot axes of values are finite.
LARGEST = 1e100
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]  # up to 300 years
Count = Annotated[int, Meta(ge=0, le=10**15)]
Positive = Annotated[int, Meta(ge=1, le=10**15)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=1000)]
_Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Plain = bool | _Int | float | Annotated[str, Meta(max_length=100_000)] | None
# An item of a list in a flattened config, nested up to six levels.
_Item: Any = _Plain
for _ in range(6):
    _Item = _Plain | GenericAlias(list, _Item) | GenericAlias(dict, (str, _Item))
_Value = _Plain | list[_Item]
# JSON has no NaN or infinity; records have text in their place.
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Metric = _Finite | _Int | bool | Text | list[Any] | None
_Measure = Number | Literal["nan", "inf", "-inf"] | UnsetType


class _Line(Struct):
    """A line of metrics.jsonl, see `metrics.MetricsWriter`. Other keys are metrics."""

    step: Count
    kind: Text
    loss: _Measure = UNSET
    learning_rate: _Measure = UNSET
    examples_per_second: _Measure = UNSET
    noise_scale: _Measure = UNSET
    examples: Count | UnsetType = UNSET
    batch_size: Positive | UnsetType = UNSET
    sent_bytes: Annotated[float, Meta(ge=0, le=1e18)] | UnsetType = UNSET
    epoch: Annotated[float, Meta(ge=0, le=1e15)] | UnsetType = UNSET
    seconds: Seconds | UnsetType = UNSET


class _Receipt(Struct):
    """A line of run.jsonl: versions and hardware at one start or resumption; older files have fewer keys."""

    device: Text
    devices: Positive
    cores: Count | UnsetType | None = UNSET
    jax: Text | UnsetType = UNSET
    python: Text | UnsetType | None = UNSET
    processor: Text | UnsetType | None = UNSET
    commit: Text | UnsetType | None = UNSET
    together: Positive | UnsetType = UNSET


_OF_CONFIG: dict[str, Any] = {
    "seed": Seed,
    "batch_size": Positive,
    "duration": Text,
    "init_from": Text | None,
    "optimizer.name": Text,
    "model.name": Text,
    "task.name": Text,
    "data.name": Text,
    "target.metric": Text | None,
    "target.mode": Text | None,
    "target.stop": bool,
    "checkpoint.best": Text | None,
    "checkpoint.best_mode": Text | None,
}


def check_metrics(line: Any, where: str) -> None:
    """Checks a line of metrics.jsonl; `where` is the line and its file, for messages."""
    schema.convert(line, _Line, where)
    check_each(line, _Metric, where)


def check_receipt(line: Any, where: str) -> None:
    """Checks a line of run.jsonl; see `check_metrics`."""
    schema.convert(line, _Receipt, where)


def check_config(flat: Any, where: str, prefix: str = "") -> None:
    """Checks a flattened config; messages name the file as `where` and add `prefix` to the keys."""
    check_each(flat, _Value, where, prefix)
    for key, wanted in _OF_CONFIG.items():
        if key in flat:
            schema.convert(flat[key], wanted, where, f"{prefix}{key}")


def check_each(content: Any, kind: Any, where: str, prefix: str = "") -> None:
    """Checks that `content` is an object whose values all have the type `kind`."""
    try:
        msgspec.convert(content, dict[str, kind])
    except (msgspec.ValidationError, UnicodeEncodeError):
        # msgspec's messages do not name the key in a dictionary, so check the values one by one.
        schema.convert(content, dict[str, Any], where, prefix.rstrip("."))
        for key, value in content.items():
            schema.convert(value, kind, where, f"{prefix}{key}")
        raise

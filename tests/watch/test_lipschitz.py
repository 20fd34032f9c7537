"""Tests that records have the local Lipschitz estimate, which does not change the training."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from lamb_tpu.watch.lipschitz import Lipschitz
from tests import tiny
from tests.watch.observing import record


class Pauses:
    def __init__(self) -> None:
        self.output: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def __call__(self, step: int, reason: str) -> Iterator[None]:
        self.output.append((step, reason))
        yield


def observed(rows: int) -> tuple[dict[str, float], list[tuple[int, str]]]:
    run, pauses = prepare(tiny.digits(log__lipschitz_rows=rows), None), Pauses()
    observer, one = Lipschitz(run, pauses), record(7, state=run.first_state())
    observer.recorded(one)
    return one.values, pauses.output


def test_the_record_has_the_estimate() -> None:
    values, pauses = observed(64)
    assert list(values) == ["lipschitz"] and 0 < values["lipschitz"] < 100
    assert pauses == [(7, "estimate")]
    more, _ = observed(256)
    assert more["lipschitz"] != values["lipschitz"]  # the estimate uses more examples


def test_off_by_default() -> None:
    assert observed(0) == ({}, [])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (257, "lipschitz_rows=257 is more than the number of training examples; use at most 256"),
        (9, "config.log.lipschitz_rows=9 is not divisible by 8 devices; use 8 or 16"),
        (-8, "config.log.lipschitz_rows=-8 is out of range; use at least 0"),
    ],
)
def test_errors(rows: int, message: str) -> None:
    assert len(jax.devices()) == 8
    with pytest.raises(UserError, match=message):
        observed(rows)


@pytest.mark.long
def test_training_keeps_its_bits(tmp_path: pathlib.Path) -> None:
    actual = {}
    for name, rows in {"without": 0, "with": 32}.items():
        config = tiny.digits(duration="6 steps", log__lipschitz_rows=rows)
        train(config, tmp_path / name, quiet=True)
        actual[name] = tiny.restored(config, tmp_path / name)[0]
    tiny.assert_equal(actual["with"], actual["without"])
    records = read_records(tmp_path / "with" / "metrics.jsonl", "train")
    assert len(records) == 6 and all(each["lipschitz"] > 0 for each in records)
    others = read_records(tmp_path / "without" / "metrics.jsonl", "train")
    assert [each["loss"] for each in records] == [each["loss"] for each in others]
    assert "lipschitz" not in others[0]
